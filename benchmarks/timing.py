"""Time encoders on the same weights and proteins, in the same process.

A pass is the same for every program: plan batches, embed each, and copy its vectors out while the
next one is embedded, as a worker does. Hooks measure the time inside the model's forward; the rest
is the host's.

Each way runs once to warm up and to get its vectors. Then all ways run in turn, so that other load
on the machine affects all equally. On a GPU, which may hold only one model, one way runs after the
other. Figures are from medians of the wall time. The first way with figures is the reference for
the others.

A layout divides a CPU's cores: one process with all threads, or one process per core. Processes
start once, before the measurement, and keep the encoders they loaded. Each embeds the same share of
the proteins. The parent measures the time from the first request to the last answer.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from virnucpro.core.child_process import (
    ChildError,
    ChildProcess,
    Pipe,
    defer_interrupts,
    start_process,
)
from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.recipe import EncoderSpec, Precision
from virnucpro.models.attention import choose_kernel
from virnucpro.models.base import Encoder, Pending
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.loading import load_esm2, read_heads
from virnucpro.models.transformer import DTYPES
from virnucpro.models.transformer_encoder import load_encoder
from virnucpro.models.validation import reference as fair_esm
from virnucpro.models.validation.fair_esm import load_fair_esm
from virnucpro.models.validation.random_weights import BLOCK, Lengths, make_proteins, six_frame_500
from virnucpro.models.validation.roundings import largest_distance
from virnucpro.models.validation.timing import FAIR_ESM_TOKENS, count_tokens, time_batches

OURS = "virnucpro"
Vectors = NDArray[np.float32]
Mark = float | torch.cuda.Event


# Proteins


def _reads_150(rng: np.random.Generator) -> Lengths:
    """Make proteins like the stop-free frames of 150-base reads."""
    return (150 - rng.integers(0, 3, BLOCK)) // 3


def _proteins(rng: np.random.Generator) -> Lengths:
    """Make proteins like whole ones: half are below 270 residues, and there is a long tail."""
    return np.exp(rng.normal(np.log(270), 0.7, BLOCK)).astype(np.int64).clip(30, 2000)


PROFILES: Mapping[str, Callable[[np.random.Generator], Lengths]] = {
    "six-frame-500": six_frame_500,
    "reads-150": _reads_150,
    "proteins": _proteins,
}


def proteins_of(profile: str, n_tokens: int, seed: int) -> list[str]:
    """Make as many proteins of a profile as fit into ``n_tokens``, at least one."""
    return make_proteins(n_tokens, seed, PROFILES[profile])


def lengths_of(proteins: Sequence[str]) -> Lengths:
    return np.array([len(protein) for protein in proteins], dtype=np.int64)


# One pass


@dataclass(frozen=True, slots=True)
class Setting:
    """A model and the device it runs on. Picklable."""

    checkpoint: Path
    shape: ESM2Shape
    device: str
    tokens_per_batch: int  # as a run of VirNucPro would choose here

    @property
    def model(self) -> str:
        return self.checkpoint.stem

    def spec(self, precision: Precision, family: str = "esm2") -> EncoderSpec:
        return EncoderSpec(
            family=family,
            model=self.model,
            sha256="",
            layer=self.shape.n_layers,
            pooling="mean",
            precision=precision,
            dim=self.shape.dim,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TimedEncoder:
    """A loaded model, and how to plan and embed batches."""

    model: nn.Module
    setting: Setting
    plan: Callable[[Sequence[str]], list[list[int]]]
    embed: Callable[[list[str]], Tensor]  # a batch -> (n_proteins, dim) float32


@dataclass(frozen=True, slots=True)
class Way:
    """A program with its settings. Picklable: ``load`` is a function of a module."""

    program: str
    precision: Precision | Literal["int8"]
    how: str  # batches, kernel
    load: Callable[[Setting], TimedEncoder]

    @property
    def name(self) -> str:
        return f"{self.program} {self.precision}, {self.how}"


@dataclass(frozen=True, slots=True)
class Pass:
    """The figures of one pass over the proteins."""

    seconds: float
    cpu_seconds: float
    forward_seconds: float
    n_batches: int
    peak_bytes: int | None  # in the device: the weights and the peak of other memory


def mean_pass(passes: Sequence[Pass]) -> Pass:
    """The mean of passes over the same proteins, with the largest peak of memory."""
    n = len(passes)
    peaks = [one.peak_bytes for one in passes if one.peak_bytes is not None]
    return Pass(
        seconds=sum(one.seconds for one in passes) / n,
        cpu_seconds=sum(one.cpu_seconds for one in passes) / n,
        forward_seconds=sum(one.forward_seconds for one in passes) / n,
        n_batches=passes[0].n_batches,
        peak_bytes=max(peaks, default=None),
    )


def time_pass(encoder: TimedEncoder, proteins: Sequence[str]) -> tuple[Pass, Vectors]:
    """Embed all proteins. Returns the figures and the vectors, (n_proteins, dim)."""
    device = torch.device(encoder.setting.device)
    starts: list[Mark] = []
    ends: list[Mark] = []
    hooks = (
        encoder.model.register_forward_pre_hook(lambda *_: starts.append(_mark(device))),
        encoder.model.register_forward_hook(lambda *_: ends.append(_mark(device))),
    )
    vectors = np.full((len(proteins), encoder.setting.shape.dim), np.nan, dtype=np.float32)
    memory = _reset_memory(device)
    synchronize(device)
    in_progress = deque[list[int]]()

    def plan_batches() -> Iterator[list[str]]:
        for rows in encoder.plan(proteins):
            in_progress.append(rows)
            yield [proteins[i] for i in rows]

    def store(embedded: Vectors) -> None:
        vectors[in_progress.popleft()] = embedded

    try:
        timing = time_batches(partial(_start, encoder), plan_batches(), store)
    finally:
        for hook in hooks:
            hook.remove()
    peak = None
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - memory + _n_bytes(encoder.model)
    forward = sum(map(_seconds_between, starts, ends))
    return Pass(timing.seconds, timing.cpu_seconds, forward, timing.n_batches, peak), vectors


def _start(encoder: TimedEncoder, batch: Sequence[str]) -> Pending:
    """Start a batch, and the copy of its vectors, for which a GPU does not wait."""
    embedded = encoder.embed(list(batch)).to("cpu", non_blocking=True)
    copied = _mark(torch.device(encoder.setting.device))

    def rows() -> Vectors:
        if not isinstance(copied, float):
            copied.synchronize()
        vectors: Vectors = embedded.numpy()
        return vectors

    return Pending(rows)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _mark(device: torch.device) -> Mark:
    """The time on the clock of the device. A GPU does not wait for it."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
    synchronize(device)
    return time.perf_counter()


def _seconds_between(start: Mark, end: Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000


def _reset_memory(device: torch.device) -> int:
    """Reset the peak of memory; return the bytes that are allocated now."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _n_bytes(model: nn.Module) -> int:
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def plan_by(encoder: Encoder, n_tokens: int) -> Callable[[Sequence[str]], list[list[int]]]:
    """A function that plans batches of at most ``n_tokens`` as the encoder does."""
    return lambda proteins: encoder.plan([len(protein) for protein in proteins], n_tokens)


def load_ours(setting: Setting, precision: Precision) -> TimedEncoder:
    """Load the encoder of a worker."""
    device = torch.device(setting.device)
    spec = setting.spec(precision)
    ours = load_encoder(spec, setting.checkpoint, device, load_esm2, read_heads)
    return TimedEncoder(ours.model, setting, plan_by(ours, setting.tokens_per_batch), ours.embed)


def our_ways(precisions: Sequence[Precision], setting: Setting) -> list[Way]:
    """Each precision, with the kernel that a run would use."""
    device = torch.device(setting.device)
    ways = []
    for precision in precisions:
        kernel = choose_kernel(device, DTYPES[precision], setting.shape.head_dim)
        how = f"{kernel.__name__}, {setting.tokens_per_batch} tokens"
        ways.append(Way(OURS, precision, how, partial(load_ours, precision=precision)))
    return ways


def fair_esm_ways(setting: Setting, *, has_bf16: bool) -> list[Way]:
    """fair-esm as published, then with its fastest settings."""
    ways = [Way("fair-esm", "fp32", f"as published, {FAIR_ESM_TOKENS} tokens", fair_esm_published)]
    if has_bf16:
        how = f"{padded_tokens(setting)} tokens"
        ways.append(Way("fair-esm", "bf16", how, fair_esm_bf16))
    return ways


def fair_esm_published(setting: Setting) -> TimedEncoder:
    """The loop of scripts/extract.py, without the file per protein and the cut at 1,022 residues.

    As there, logits and whole representations are copied to the CPU and averaged there.
    """
    device = torch.device(setting.device)
    model = fair_esm.load_model(setting.checkpoint, setting.shape, torch.float32, device)
    convert = model.alphabet.get_batch_converter()
    layer = setting.shape.n_layers

    def plan(proteins: Sequence[str]) -> list[list[int]]:
        data = load_fair_esm().data.FastaBatchedDataset(
            [str(i) for i in range(len(proteins))], proteins
        )
        batches: list[list[int]] = data.get_batch_indices(FAIR_ESM_TOKENS, extra_toks_per_seq=1)
        return batches

    @torch.no_grad()
    def embed(proteins: list[str]) -> Tensor:
        _, texts, tokens = convert([("", protein) for protein in proteins])
        out = model(tokens.to(setting.device), repr_layers=[layer], return_contacts=False)
        out["logits"].cpu()
        hidden = out["representations"][layer].cpu()
        return torch.stack(
            [hidden[row, 1 : len(text) + 1].mean(0).clone() for row, text in enumerate(texts)]
        )

    return TimedEncoder(model, setting, plan, embed)


def fair_esm_bf16(setting: Setting) -> TimedEncoder:
    """fair-esm's model in bf16: sorted, padded batches that fill the device, pooled on it."""
    spec = setting.spec("bf16", family="fair-esm")
    encoder = fair_esm.load(spec, setting.checkpoint, torch.device(setting.device))
    plan = plan_by(encoder, padded_tokens(setting))
    return TimedEncoder(encoder.model, setting, plan, encoder.embed)


def padded_tokens(setting: Setting) -> int:
    return max(FAIR_ESM_TOKENS, setting.tokens_per_batch)


# Ways side by side

LONG_SECONDS = 5.0  # a longer pass is repeated only once, because it varies little
# errors of other people's code that fails: no memory, no kernel, another version
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    ImportError,
    OSError,
    EOFError,
    MemoryError,
    UnavailableError,
)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRow:
    """One way in one layout. Without figures, they are None, and ``reason`` says why."""

    model: str
    profile: str
    program: str
    precision: Precision | Literal["int8"]
    how: str
    layout: str
    n_proteins: int
    n_tokens: int
    reason: str = ""
    tokens_per_second: float | None = None
    ratio: float | None = None  # to the reference: the first row with figures
    largest_error: float | None = None  # relative L2 distance of a vector from the reference's
    n_batches: int | None = None
    seconds_per_batch: float | None = None
    host_share: float | None = None  # of the time: outside the model's forward
    peak_bytes: int | None = None
    seconds: tuple[float, ...] = ()
    cpu_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What all ways embed, and how often."""

    profile: str
    proteins: Sequence[str]
    repeats: int
    min_seconds: float = 0.0  # of a repeat, which has as many passes as it takes
    one_by_one: bool = False  # only one model is loaded at a time


@dataclass(slots=True, eq=False)
class _Lane:
    """A row that is being measured."""

    way: Way
    layout: Layout
    vectors: Vectors | None = None
    passes: list[Pass] = field(default_factory=list)
    reason: str = ""
    n_due: int = 0

    @property
    def seconds(self) -> float:
        return median(found.seconds for found in self.passes)

    def run(self, proteins: Sequence[str]) -> tuple[Pass, Vectors] | None:
        try:
            outcome = self.layout.time(self.way, proteins)
            if np.isfinite(outcome[1]).all():
                return outcome
            self.fail("its vectors are not finite")
        except FAILURES as error:
            self.fail(reason_of(error))
        return None

    def repeat(self, comparison: Comparison) -> None:
        """Measure once: a pass, or the mean of as many passes as fill the least time."""
        passes: list[Pass] = []
        while not passes or sum(one.seconds for one in passes) < comparison.min_seconds:
            outcome = self.run(comparison.proteins)
            if outcome is None:
                return
            passes.append(outcome[0])
        self.passes.append(mean_pass(passes))
        self.n_due -= 1

    def fail(self, reason: str) -> None:
        self.reason = reason
        self.n_due = 0
        self.vectors = None


def compare_ways(
    comparison: Comparison, ways: Sequence[Way], places: Sequence[Layout]
) -> Iterator[EncoderRow]:
    """Yield a row for each way in each layout as soon as it is known, the reference first."""
    lanes = [_Lane(way, layout) for way in ways for layout in places]
    reference = None
    for together in [[lane] for lane in lanes] if comparison.one_by_one else [lanes]:
        _measure(comparison, together)
        for lane in together:
            if reference is None and not lane.reason:
                reference = lane
            row = _row(comparison, lane, reference)
            if comparison.one_by_one:  # before others load a model
                lane.layout.release(lane.way)
            yield row


def _measure(comparison: Comparison, lanes: Sequence[_Lane]) -> None:
    for lane in lanes:  # the warm-up
        if outcome := lane.run(comparison.proteins):
            first, lane.vectors = outcome
            lane.n_due = comparison.repeats if first.seconds < LONG_SECONDS else 1
    while any(lane.n_due for lane in lanes):
        for lane in lanes:
            if lane.n_due:
                lane.repeat(comparison)


def _row(comparison: Comparison, lane: _Lane, reference: _Lane | None) -> EncoderRow:
    lengths = lengths_of(comparison.proteins)
    way = lane.way
    setting = lane.layout.setting
    row = EncoderRow(
        model=setting.model,
        profile=comparison.profile,
        program=way.program,
        precision=way.precision,
        how=way.how,
        layout=lane.layout.name,
        n_proteins=len(lengths),
        n_tokens=count_tokens(comparison.proteins),
        reason=lane.reason,
    )
    if lane.vectors is None or reference is None or reference.vectors is None:
        return row
    passes = lane.passes
    rate = row.n_tokens / lane.seconds
    forward = median(found.forward_seconds / found.seconds for found in passes)
    return replace(
        row,
        tokens_per_second=rate,
        ratio=reference.seconds / lane.seconds,
        largest_error=largest_distance(lane.vectors, reference.vectors),
        n_batches=passes[0].n_batches,
        seconds_per_batch=lane.seconds * lane.layout.n_processes / passes[0].n_batches,
        host_share=max(0.0, 1 - forward),
        peak_bytes=passes[0].peak_bytes,
        seconds=tuple(found.seconds for found in passes),
        cpu_seconds=tuple(found.cpu_seconds for found in passes),
    )


# Layouts


@dataclass(slots=True, eq=False)
class _OneProcess:
    """This process, with all its threads."""

    name: str
    setting: Setting
    n_processes: int = 1
    encoders: dict[str, TimedEncoder] = field(default_factory=dict)  # by the name of the way

    def time(self, way: Way, proteins: Sequence[str]) -> tuple[Pass, Vectors]:
        """Time a pass. The encoder is loaded before, if needed."""
        if way.name not in self.encoders:
            self.encoders[way.name] = way.load(self.setting)
        try:
            return time_pass(self.encoders[way.name], proteins)
        except FAILURES:
            self.release(way)  # the next one needs its memory
            raise

    def release(self, way: Way) -> None:
        """Free the memory of a loaded encoder; the next pass loads it again."""
        self.encoders.pop(way.name, None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(slots=True, eq=False)
class _ManyProcesses:
    """``n_processes`` of one thread each, started at the first use."""

    setting: Setting
    n_processes: int
    n_ways: int
    children: list[ChildProcess] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.n_processes} x 1 thread"

    def time(self, way: Way, proteins: Sequence[str]) -> tuple[Pass, Vectors]:
        """Time a pass. The encoder is loaded before, if needed."""
        if not self.children:
            self.start()
        self.ask([(way, [])] * self.n_processes)  # load the encoder
        order = np.argsort([-len(protein) for protein in proteins], kind="stable")
        shares = [order[i :: self.n_processes].tolist() for i in range(self.n_processes)]
        requests = [(way, [proteins[i] for i in share]) for share in shares]
        started = time.perf_counter()
        answers = self.ask(requests)
        seconds = time.perf_counter() - started
        vectors = np.full((len(proteins), self.setting.shape.dim), np.nan, dtype=np.float32)
        for share, (_, part) in zip(shares, answers, strict=True):
            vectors[share] = part
        passes = [found for found, _ in answers]
        return Pass(
            seconds=seconds,
            cpu_seconds=sum(found.cpu_seconds for found in passes),
            forward_seconds=sum(found.forward_seconds for found in passes) / self.n_processes,
            n_batches=sum(found.n_batches for found in passes),
            peak_bytes=None,
        ), vectors

    def release(self, way: Way) -> None:
        """End all processes, with the encoders they loaded."""

    def ask(self, requests: Sequence[_Request]) -> list[tuple[Pass, Vectors]]:
        """
        Raises:
            UnavailableError: a process answers with an error, or has died.
        """
        try:
            for child, request in zip(self.children, requests, strict=True):
                child.pipe.send(request)
            answers = [child.pipe.recv() for child in self.children]
        except (OSError, EOFError) as error:
            self.close()
            raise UnavailableError("a process died") from error
        for answer in answers:
            if isinstance(answer, ChildError):
                self.close()
                raise UnavailableError(answer.reason)
            if isinstance(answer, str):
                raise UnavailableError(answer)
        return answers

    def start(self) -> None:
        n_bytes = self.n_processes * (_GIB // 2 + 4 * self.setting.shape.n_parameters * self.n_ways)
        available = psutil.virtual_memory().available
        if n_bytes > 0.8 * available:
            raise UnavailableError(
                f"{self.n_processes} processes would need {n_bytes / _GIB:.0f} GiB; "
                f"{available / _GIB:.0f} GiB are free"
            )
        with defer_interrupts():
            for _ in range(self.n_processes):
                self.children.append(start_process(_serve, self.setting))

    def close(self) -> None:
        ChildProcess.kill_all(self.children)
        self.children.clear()


Layout = _OneProcess | _ManyProcesses
_Request = tuple[Way, list[str]]


def _serve(pipe: Pipe, setting: Setting) -> None:
    """Embed what the parent sends: the main function of a process in ``_ManyProcesses``."""
    torch.set_num_threads(1)
    here = _OneProcess("1 thread", setting)
    while True:
        way, proteins = pipe.recv()
        try:
            answer: object = here.time(way, proteins)
        except FAILURES as error:
            answer = reason_of(error)
        pipe.send(answer)


def reason_of(error: BaseException) -> str:
    if isinstance(error, UnavailableError):
        return str(error)
    return f"{type(error).__name__}: {printable(error)}"


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Let torch use ``n`` threads in the ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def layouts(setting: Setting, n_threads: int, n_ways: int) -> Iterator[list[Layout]]:
    """The layouts that make sense on the device, first that with one process."""
    if not setting.device.startswith("cpu"):
        yield [_OneProcess(f"1 process, {setting.device}", setting)]
        return
    one = _OneProcess(f"1 x {n_threads} thread{'s' * (n_threads > 1)}", setting)
    many = _ManyProcesses(setting, n_threads, n_ways)
    try:
        with threads(n_threads):
            both: list[Layout] = [one, many]
            yield both[:n_threads]
    finally:
        many.close()
