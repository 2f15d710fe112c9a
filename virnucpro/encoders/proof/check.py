"""What an encoder does on a device: ``models check``, and the trials of ``virnucpro devices``.

``models check`` compares our encoder with fair-esm, with the same weights.

Ours embeds the panel in the run's precision, in batches, as a run does. fair-esm embeds it in
float32, one protein at a time: it is the oracle. A vector may be as far from the oracle's as the
roundings of the precision explain, see ``fair_esm``. The mean over the residues is compared, which
a run takes, and every residue: what goes wrong far from the start of a protein, such as rotary
angles in bf16, nearly vanishes in a mean.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch

from virnucpro.encoders import triton_kernels
from virnucpro.encoders.base import Encoder, Model, Rows, load_encoder
from virnucpro.encoders.catalogue import open_model
from virnucpro.encoders.esm2.attention import E4M3
from virnucpro.encoders.esm2.model import check_device
from virnucpro.encoders.proof import fair_esm
from virnucpro.encoders.transfer import use_device
from virnucpro.ground.config import EncoderSpec, Precision
from virnucpro.ground.devices import (
    Choice,
    choose_devices,
    choose_precision,
    choose_tokens,
)
from virnucpro.ground.errors import UnavailableError, UsageError
from virnucpro.ground.events import OnEvent, Progress
from virnucpro.ground.log import announce, printable
from virnucpro.ground.options import ComputeOptions
from virnucpro.ground.processes import Child, Pipe, Raised, interrupts_held, start

# Our roundings are other ones than those that the tolerance is measured with, of the same size: the
# worst of thirty proteins is as far in both, but for chance. It was 0.8 to 1.1 times as far in bf16
# with 2, 6 and 12 layers, and twice as far is allowed.
MARGIN = 2.0
_N_SHOWN = 3  # proteins named in the verdict

Vectors = Mapping[str, Rows]  # by the id of the protein: (n_residues, dim), or (1, dim) if pooled


@dataclass(frozen=True, slots=True)
class _Deviation:
    """How far the vectors of a protein are from the oracle's, relative to their length."""

    protein: str
    n_residues: int
    cosine: float  # distance of the means over the residues: 1 - cos
    mean: float  # L2 distance of these means
    residue: float  # L2 distance of a residue, the largest


@dataclass(frozen=True, slots=True)
class _Oracle:
    """fair-esm's vectors, and the largest distances from them that roundings explain."""

    residues: Vectors
    mean: float
    residue: float
    tokens_per_second: float

    def share(self, deviation: _Deviation) -> float:
        """How much of what is explained a protein takes; more than 1 is too much."""
        return max(deviation.mean / self.mean, deviation.residue / self.residue)


@dataclass(frozen=True, slots=True)
class _DeviceCheck:
    """The vectors of our encoder on one device beside fair-esm's; the worst protein first."""

    device: str
    kernel: str
    deviations: tuple[_Deviation, ...]
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class _Check:
    """A model, checked on each of the devices."""

    spec: EncoderSpec
    oracle: _Oracle
    devices: tuple[_DeviceCheck, ...]

    def failures(self, device: _DeviceCheck) -> list[_Deviation]:
        return [one for one in device.deviations if self.oracle.share(one) > 1]

    @property
    def has_passed(self) -> bool:
        return not any(map(self.failures, self.devices))

    def report_lines(self) -> list[str]:
        """The distances, the verdict and the speeds, for people."""
        spec = self.spec
        lines = [
            f"model: {printable(spec.model)}, layer {spec.layer}, {spec.pooling} pooling",
            f"oracle: fair-esm in float32, one protein at a time, "
            f"{self.oracle.tokens_per_second:,.0f} tokens/s",
        ]
        for device in self.devices:
            table = [
                f"{one.protein:<14}{one.n_residues:>8,}{one.cosine:>17.1e}{one.mean:>10.1e}"
                f"{one.residue:>19.1e}{self.oracle.share(one):>11.0%}"
                for one in device.deviations
            ]
            lines += [
                "",
                "protein       residues  cosine distance  mean, L2  worst residue, L2  tolerance",
                *table,
                "",
                f"virnucpro: {spec.precision} on {device.device}, {device.kernel}, "
                f"{device.tokens_per_second:,.0f} tokens/s",
                self.verdict(device),
            ]
        return lines

    def verdict(self, device: _DeviceCheck) -> str:
        """One line on one device."""
        oracle, failures = self.oracle, self.failures(device)
        named = ", ".join(
            f"{one.protein} ({oracle.share(one):.0%} of the tolerance)"
            for one in (failures or device.deviations)[: _N_SHOWN if failures else 1]
        )
        limit = (
            f"what roundings in {self.spec.precision} explain with these weights "
            f"(mean {oracle.mean:.1e}, residue {oracle.residue:.1e})"
        )
        n = len(device.deviations)
        if failures:
            return f"failed: {len(failures)} of {n} proteins are beyond {limit}; worst {named}"
        return f"passed: all {n} proteins are within {limit}; worst {named}"


def check(model: str, options: ComputeOptions, on_event: OnEvent) -> _Check:
    """Embed the panel with a model in both programs, on every device that is asked for.

    Raises:
        UsageError, UnavailableError: the check cannot be made: the model, the device or the
            precision is not there, or one of the programs does not run.
    """
    choice = choose_devices(options)
    is_emulated = options.precision == "fp8" and choice.kind == "cpu"
    precision = "fp8" if is_emulated else choose_precision(options.precision, choice)
    return check_on(choice, open_model(model, on_event), precision, on_event)


def check_on(choice: Choice, model: Model, precision: Precision, on_event: OnEvent) -> _Check:
    """Embed the panel on devices that are there. Raises as ``check``."""
    if model.family != "esm2":
        raise UsageError(
            f"{printable(model.name)} is not an ESM-2: fair-esm has no vectors of it",
            hint="check the ESM-2 that it reads, if it reads one",
        )
    weights, digest = model.prepare(precision, None, on_event)
    spec = EncoderSpec(
        model=model.name,
        sha256=digest,
        layer=model.n_layers,
        pooling="mean",
        precision=precision,
        dim=model.dim,
    )
    for description in choice.descriptions:
        announce(description)
    devices = tuple(dict.fromkeys(choice.devices))  # the workers of a CPU are one device
    n_tokens = choose_tokens(choice, model.footprint, precision)
    oracle = _ask_oracle(spec, model, devices[0], on_event)
    checks = []
    for device in devices:
        use_device(torch.device(device))
        stage = f"virnucpro, {precision}, {device}"
        with unavailable_where_it_fails(f"virnucpro in {precision}", device):
            encoder = load_encoder(replace(spec, pooling="none"), weights, torch.device(device))
            residues, _ = _embed(encoder, n_tokens, f"{stage}, residues", on_event)
            encoder = load_encoder(spec, weights, torch.device(device))
            means, rate = _embed(encoder, n_tokens, stage, on_event)
        deviations = find_deviations(means, residues, oracle.residues)
        deviations.sort(key=oracle.share, reverse=True)
        checks.append(_DeviceCheck(device, encoder.kernel, tuple(deviations), rate))
    return _Check(spec, oracle, tuple(checks))


def _ask_oracle(spec: EncoderSpec, model: Model, device: str, on_event: OnEvent) -> _Oracle:
    """
    Raises:
        UnavailableError: fair-esm does not run here, or the precision does not hold its numbers.
    """
    precision = spec.precision
    spec = replace(spec, family="fair-esm", pooling="none", precision="fp32")
    with unavailable_where_it_fails("fair-esm in float32", device):
        use_device(torch.device(device))
        encoder = fair_esm.load(spec, model.path, torch.device(device))
        residues, rate = _embed(encoder, 1, f"fair-esm, float32, {device}", on_event)
        longest = max(map(encoder.count_tokens, ([len(text)] for text in make_panel().values())))
        fair_esm.add_roundings(encoder.model, precision, longest)
        rounded, _ = _embed(encoder, 1, f"what {precision} rounds off, {device}", on_event)
    explained = find_deviations(_means(rounded), rounded, residues)
    largest = MARGIN * max(one.residue for one in explained)
    if not math.isfinite(largest):
        raise UnavailableError(
            f"{precision} cannot hold the numbers of {printable(model.name)}",
            hint="give --precision bf16 or fp32, here and in every run with this model",
        )
    return _Oracle(residues, MARGIN * max(one.mean for one in explained), largest, rate)


def _means(residues: Vectors) -> Vectors:
    return {
        name: rows.mean(axis=0, keepdims=True, dtype=np.float64) for name, rows in residues.items()
    }


def _embed(
    encoder: Encoder, tokens_per_batch: int, stage: str, on_event: OnEvent
) -> tuple[Vectors, float]:
    """The vectors of the panel, and tokens per second, without the first, short batch."""
    panel = make_panel()
    ids, proteins = list(panel), list(panel.values())
    lengths = [len(protein) for protein in proteins]
    # one by one: without the padding between sequences
    counts = [encoder.count_tokens([length]) for length in lengths]
    vectors: dict[str, Rows] = {}
    n_done = 0
    encoder.start([min(proteins, key=len)]).rows()  # what is loaded at first use
    started = time.perf_counter()
    for rows in encoder.plan(lengths, tokens_per_batch):
        batch = encoder.start([proteins[i] for i in rows]).rows()
        n_rows = [lengths[i] if encoder.spec.per_residue else 1 for i in rows]
        parts = np.split(batch, np.cumsum(n_rows)[:-1])
        vectors |= {ids[i]: part for i, part in zip(rows, parts, strict=True)}
        n_done += sum(counts[i] for i in rows)
        on_event(Progress(stage, n_done, sum(counts), "tokens"))
    return vectors, n_done / (time.perf_counter() - started)


def find_deviations(means: Vectors, residues: Vectors, oracle: Vectors) -> list[_Deviation]:
    """How far means and residues are from the oracle's residues, by id."""
    deviations = []
    exact = _means(oracle)
    for name, protein in make_panel().items():
        (a,), (b,) = means[name].astype(np.float64), exact[name]
        cosine = max(0.0, float(1 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b))))
        mean = fair_esm.largest_distance(means[name], exact[name])
        residue = fair_esm.largest_distance(residues[name], oracle[name])
        deviations.append(_Deviation(name, len(protein), cosine, mean, residue))
    return deviations


@contextmanager
def unavailable_where_it_fails(program: str, device: str) -> Iterator[None]:
    """Say which program does not run on which device, and what to do.

    Raises:
        UnavailableError: what was called has no room on the device, or no kernel for it.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UnavailableError(
            f"{program} does not fit into the memory of {device}: {printable(error)}",
            hint="free the GPU (`nvidia-smi` shows who uses it), or check with --device cpu",
        ) from error
    except (RuntimeError, ImportError) as error:
        raise UnavailableError(
            f"{program} does not run on {device}: {printable(error)}",
            hint="other kernels run with --precision fp32, another device with --device cpu; "
            "`virnucpro devices` shows what torch was built for",
        ) from error


# What ``virnucpro devices`` says of fp8 and of our kernels. Each GPU is tried in a process of its
# own, so that this one never starts CUDA.

_MOST_SECONDS = 60.0  # that the trials may take: each kernel is compiled, where it never was


def try_gpus(devices: Iterable[str]) -> dict[str, dict[str, str]]:
    """Why GPUs, named as torch names them, have no fp8, and do not run our kernels.

    By "fp8" and the name of the kernel; empty where they do.
    """
    with interrupts_held():
        children = {device: start(_try, device) for device in devices}
    try:
        end = time.monotonic() + _MOST_SECONDS
        return {device: _outcome(child, end) for device, child in children.items()}
    finally:
        for child in children.values():  # and the compilers that it started
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
        Child.kill_all(list(children.values()))


def _outcome(child: Child, end: float) -> dict[str, str]:
    reason = f"no answer within {_MOST_SECONDS:.0f} s"
    try:
        if child.pipe.poll(max(0.0, end - time.monotonic())):
            answer = child.pipe.recv()
            if not isinstance(answer, Raised):
                return dict(answer)
            reason = answer.reason
    except (EOFError, OSError):
        reason = f"its process ended: {child.cause_of_end(5)}"
    return dict.fromkeys(("fp8", *triton_kernels.NAMES), reason)


def _try(pipe: Pipe, name: str) -> None:
    os.setsid()  # so that it can be killed with all that it starts
    device, no_fp8 = torch.device(name), ""
    use_device(device)
    try:
        check_device(device)
    except UnavailableError as error:
        no_fp8 = str(error)
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    number = torch.bfloat16 if has_bf16 else torch.float16
    refusals = triton_kernels.refusals(device, number if no_fp8 else E4M3)
    pipe.send({"fp8": no_fp8, **refusals, **triton_kernels.refusals(device, torch.float32)})


# The panel: the same letters on every machine, from 1 to 1,022 residues, which are what ESM-2 was
# trained on at most. ``random.Random.random`` gives the same numbers in every version of Python,
# which no other generator promises.

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
ODD_LETTERS = "XBZUOJ.-*"  # J and * have no token of their own, and read as <unk>
LENGTHS = (1, 2, 3, 5, 9, 16, 33, 50, 63, 64, 100, 128, 166, 167, 257, 400, 512, 777, 1022)
_SEED = 1
_KNOWN = {
    "ubiquitin": ("MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"),
    "lysozyme": (
        "KVFGRCELAAAMKRHGLDNYRGYSLGNWVCAAKFESNFNTQATNRNTDGSTDYGILQINSRWWCNDGRTPGSRNLCNIPC"
        "SALLSSDITASVNCAKKIVSDGNGMNAWVAWRNRCKGTDVQAWIRGCRL"
    ),
    "gfp": (
        "MSKGEELFTGVVPILVELDGDVNGHKFSVSGEGEGDATYGKLTLKFICTTGKLPVPWPTLVTTFSYGVQCFSRYPDHMKQ"
        "HDFFKSAMPEGYVQERTIFFKDDGNYKTRAEVKFEGDTLVNRIELKGIDFKEDGNILGHKLEYNYNSHNVYIMADKQKNG"
        "IKVNFKIRHNIEDGSVQLADHYQQNTPIGDGPVLLPDNHYLSTQSALSKDPNEKRDHMVLLEFVTAAGITHGMDELYK"
    ),
}
_EVERY = 5  # residue of a known protein, replaced by an odd letter


def make_panel() -> dict[str, str]:
    """Proteins by id: known ones, random ones, and some with odd letters or in lower case."""
    rng, ubiquitin = Random(_SEED), _KNOWN["ubiquitin"]
    panel = dict(_KNOWN)
    for length in LENGTHS:
        letters = [AMINO_ACIDS[int(rng.random() * len(AMINO_ACIDS))] for _ in range(length)]
        panel[f"random_{length}"] = "".join(letters)
    for letter in ODD_LETTERS:
        letters = list(ubiquitin)
        letters[::_EVERY] = letter * len(letters[::_EVERY])
        panel[f"odd_{letter}"] = "".join(letters)
    panel["odd_all"] = 7 * ODD_LETTERS
    panel["only_X"] = 40 * "X"
    panel["lower_case"] = ubiquitin.lower()
    return panel
