"""Simulate devices: plan, processes, files and tables are real, and kernels are waits.

A simulated device takes n / speed seconds for a batch of n tokens, and no core, like a GPU. A batch
waits until the previous one is done, and a device without a batch is idle. The host's part is real
except for the launch of kernels: proteins are packed, rows are copied, scores or feature files are
written, and a head joined with the scorer calls the records (its weights are random). With a
``dilation`` of 10, devices are ten times slower. So a host with a few cores represents one with ten
times as many, and a second of a device represents a tenth of a second.

``busy`` is measured by the wall clock on this host, with all its other load. ``busy_alone`` is
computed in the same run, by a clock that runs only while the worker's main thread or its device
computes. It is the share on a host that has a core for each thread and a parent that keeps up. CPU
seconds per million tokens show how many devices the parent can keep up with.

``n_devices_worth`` counts from the start of the run. It therefore includes the plan, for which all
devices wait, and the start of the workers.
"""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import mean
from tempfile import TemporaryDirectory

import numpy as np
import torch
from front_end import CHUNK_SIZE, make_contigs, make_reads
from numpy.typing import NDArray
from timing import FAILURES, reason_of

from virnucpro.core.atomic_io import EMBEDDED_FOLDER
from virnucpro.core.errors import VirnucproError
from virnucpro.core.events import (
    EmbeddingStarted,
    RunEvent,
    ShardDone,
    ShardsPlanned,
    WorkerEvent,
)
from virnucpro.core.option_schema import build_options
from virnucpro.core.recipe import EncoderSpec, Recipe
from virnucpro.engine.base import Resources, WorkerConfig
from virnucpro.engine.local import ProcessExecutor
from virnucpro.engine.worker import Worker
from virnucpro.models.base import Pending, Rows
from virnucpro.models.packing import PackedBatch, plan_batches
from virnucpro.models.protein_tokens import EXTRA_TOKENS
from virnucpro.models.registry import FAMILIES, Family
from virnucpro.sequences.fasta import write_record
from virnucpro.sequences.kmers import N_FEATURES
from virnucpro.viral.classifier_choice import choose_classifier
from virnucpro.viral.head import EncoderInfo, Head, Network
from virnucpro.workflows.predict import run_predict
from virnucpro.workflows.predict_config import PredictConfig
from virnucpro.workflows.predict_options import PredictOptions

_FAMILY = "simulated"  # also the name of this module
_HASH = "0" * 64  # where no file exists
_MAX_ROWS = 8192  # in a batch
_COVERAGE = 4  # of contigs by reads
_N_SAMPLED = 1_000  # vectors
_LOG_ODDS = -0.2  # of a vector to be viral, on average; the standard deviation is 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRow:
    input: str
    n_bases: int
    n_devices: int
    n_helpers: int  # processes that make shards and tables
    speed: float  # tokens per second of each device
    dilation: float  # how many times slower the devices are
    dim: int
    tokens_per_batch: int
    keep_vectors: bool = False  # False: workers apply the head, and only scores are written
    n_shards: int | None = None
    n_tokens: int | None = None
    busy: float | None = None  # share of the time between a device's first and last batch
    busy_alone: float | None = None  # the same, if no thread waited for a core or another thread
    busy_of_run: float | None = None  # share of the time between the run's first and last batch
    before: float | None = None  # seconds from the start of the run to the first batch
    outside: float | None = None  # seconds from the last batch until the last shard is written
    after: float | None = None  # seconds from there to the end of the run, not dilated
    cpu_of_worker: float | None = None  # seconds per million tokens
    cpu_of_parent: float | None = None  # the same, while devices work and after
    cpu_of_helpers: float | None = None  # the same, for plan and tables, with their start
    cpu_of_plan: float | None = None  # the same, of the parent before devices work
    seconds: float | None = None  # of the run, from its start to its end
    n_devices_worth: float | None = None  # tokens in that time, over what one device could do
    reason: str = ""


@dataclass(slots=True)
class Timeline:
    """The batches of a device, by one clock."""

    first: float = 0.0  # start of the first batch
    free: float = 0.0  # end of the last batch

    def add(self, now: float, seconds: float) -> float:
        """Add a batch that arrives now; return its end."""
        self.first = self.first or now
        self.free = max(now, self.free) + seconds
        return self.free


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A batch on a simulated device."""

    device: SimulatedEncoder
    vectors: Rows
    end: float
    end_alone: float

    def rows(self) -> Rows:
        time.sleep(max(0.0, self.end - time.monotonic()))
        self.device.slept += max(0.0, self.end_alone - self.device.clock)
        return self.vectors


@dataclass(slots=True)
class SimulatedEncoder:
    """An encoder with a device that takes time but no core; see ``base.Encoder``."""

    spec: EncoderSpec
    speed: float  # tokens per second
    n_tokens: int = 0
    measured: Timeline = field(default_factory=Timeline)
    alone: Timeline = field(default_factory=Timeline)
    slept: float = 0.0  # seconds of waiting for the device, on a host without other load
    vectors: Rows = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        self.vectors = rng.standard_normal((_MAX_ROWS, self.spec.dim), dtype=np.float32)

    @property
    def clock(self) -> float:
        """Seconds that the thread has computed or waited for its device."""
        return time.thread_time() + self.slept

    @property
    def kernel(self) -> str:
        return "waits"

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths) + EXTRA_TOKENS * len(lengths)

    def count_flop(self, lengths: Sequence[int]) -> float:
        return 0.0

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return plan_batches(lengths, tokens_per_batch)

    def start(self, sequences: Sequence[str]) -> Pending:
        n_tokens = len(PackedBatch.from_sequences(sequences).tokens)
        self.n_tokens += n_tokens
        seconds = n_tokens / self.speed
        end = self.measured.add(time.monotonic(), seconds)
        end_alone = self.alone.add(self.clock, seconds)
        return Pending(_Waiting(self, self.vectors[: len(sequences)], end, end_alone).rows)


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> SimulatedEncoder:
    """Load an encoder from a file that has the speed of its device."""
    return SimulatedEncoder(spec, float(weights.read_text()))


def register() -> None:
    """Register the family in this process."""
    FAMILIES.setdefault(_FAMILY, Family(_FAMILY))


class SimulatedWorker(Worker):
    """A worker with two batches in flight, as on a GPU, that leaves its figures in a file."""

    def __init__(self, job: WorkerConfig, resources: Resources, name: str, device: str) -> None:
        register()
        super().__init__(job, resources, name, device)
        self.batches_in_flight = 2
        (encoder,) = self.encoders
        assert isinstance(encoder, SimulatedEncoder)
        encoder.n_tokens = 0  # do not count the trials of ``Worker``
        encoder.measured = Timeline()
        encoder.alone = Timeline()
        self.simulated = encoder
        self.cpu_before = time.process_time()

    def finish(self) -> Iterator[WorkerEvent]:
        try:
            yield from super().finish()
        finally:  # the generator may be closed early
            self.leave_figures()

    def leave_figures(self) -> None:
        device = self.simulated
        figures = {
            "first": device.measured.first,
            "last": device.measured.free,
            "alone": device.alone.free - device.alone.first,
            "busy": device.n_tokens / device.speed,
            "n_tokens": device.n_tokens,
            "cpu": time.process_time() - self.cpu_before,
            "cpu_with_start": time.process_time(),
        }
        (self.job.weights[0].parent / f"{self.name}.json").write_text(json.dumps(figures))


class _Watch:
    """Records when the last shard was written, and the parent's CPU time before the first one."""

    def __init__(self) -> None:
        self.cpu_before = self.last_done = 0.0
        self.n_shards = 0

    def __call__(self, event: RunEvent) -> None:
        match event:
            case EmbeddingStarted(pending=pending):
                self.cpu_before = time.process_time()
                self.n_shards = len(pending)
            case ShardsPlanned(pending=pending):
                self.n_shards += len(pending)
            case ShardDone():
                self.last_done = time.monotonic()


def simulate(kind: str, n_bases: int, rows: Sequence[SimulatedRow]) -> Iterator[SimulatedRow]:
    """Do one run per row, all on the same synthetic contigs, or reads from them."""
    register()
    with TemporaryDirectory(prefix="virnucpro-measure-") as folder:
        fasta = Path(folder) / "input.fa"
        random = Random(1)
        if kind == "contigs":
            sequences = make_contigs(random, n_bases)
        else:
            sequences = make_reads(random, make_contigs(random, n_bases // _COVERAGE), n_bases)
        write_input(fasta, sequences)
        for number, row in enumerate(rows):
            run_folder = Path(folder) / str(number)
            run_folder.mkdir()
            try:
                yield _simulate(fasta, row, run_folder)
            except (*FAILURES, VirnucproError) as error:
                yield replace(row, reason=reason_of(error))
            shutil.rmtree(run_folder)


def write_input(fasta: Path, sequences: Iterable[str]) -> Path:
    """Write sequences as FASTA."""
    with fasta.open("w", encoding="utf-8") as out:
        for number, sequence in enumerate(sequences):
            write_record(out, f"record_{number}", sequence)
    return fasta


def _simulate(fasta: Path, row: SimulatedRow, folder: Path) -> SimulatedRow:
    weights = folder / "speed"
    weights.write_text(str(row.speed / row.dilation))
    watch = _Watch()
    cpu_before = time.process_time()
    children_cpu = _cpu_of_children()
    start = time.monotonic()
    config = config_of(row, fasta, folder / "run", weights)
    run_predict(config, ProcessExecutor(config.resources.devices, SimulatedWorker), watch)
    end = time.monotonic()
    cpu = time.process_time()
    children_cpu = _cpu_of_children() - children_cpu
    devices = [json.loads(path.read_text()) for path in folder.glob("cpu*.json")]
    used = [device for device in devices if device["n_tokens"]]
    n_tokens = sum(device["n_tokens"] for device in used)
    first = min(d["first"] for d in used)
    last = max(d["last"] for d in used)
    millions = n_tokens / 1e6
    return replace(
        row,
        n_shards=watch.n_shards,
        n_tokens=n_tokens,
        busy=mean(d["busy"] / (d["last"] - d["first"]) for d in used),
        busy_alone=mean(d["busy"] / d["alone"] for d in used),
        busy_of_run=sum(d["busy"] for d in used) / (last - first) / row.n_devices,
        before=first - start,
        outside=watch.last_done - last,
        after=end - watch.last_done,
        cpu_of_worker=sum(d["cpu"] for d in used) / millions,
        cpu_of_parent=(cpu - watch.cpu_before) / millions,
        cpu_of_helpers=(children_cpu - sum(d["cpu_with_start"] for d in devices)) / millions,
        cpu_of_plan=(watch.cpu_before - cpu_before) / millions,
        seconds=end - start,
        n_devices_worth=n_tokens / (end - start) / (row.speed / row.dilation),
    )


def _cpu_of_children() -> float:
    """The CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _head(dim: int) -> Head:
    """The embedded head with random weights for vectors of this length.

    It calls about 3 % of the reads viral, with vectors of 1,280 numbers.
    """
    head = Head.load(EMBEDDED_FOLDER / "head.safetensors")
    rng = np.random.default_rng(1)

    def log_odds(network: Network, vectors: NDArray[np.float64]) -> NDArray[np.float64]:
        scores = network.classify(vectors)
        odds: NDArray[np.float64] = np.log(scores / (1 - scores))
        return odds

    def network(n_inputs: int, like: Network) -> Network:
        vectors = np.zeros((_N_SAMPLED, n_inputs))
        vectors[:, :dim] = rng.standard_normal((_N_SAMPLED, dim))
        layers = []
        for _, bias in like.layers:
            weight = rng.standard_normal((len(bias), n_inputs)) / n_inputs**0.5
            layers.append((weight.astype(np.float32), bias.copy()))
            n_inputs = len(bias)
        network = Network(tuple(layers))
        weight, bias = network.layers[-1]
        bias[:] = 0
        weight /= log_odds(network, vectors).std()
        bias[1] = _LOG_ODDS - log_odds(network, vectors).mean()
        return network

    encoder = EncoderInfo(
        family=_FAMILY, name=_FAMILY, encoder_id=_HASH, layer=1, pooling="mean", dim=dim
    )
    assert head.protein and head.nucleotide
    return Head(
        facts=replace(head.facts, encoders=(encoder,)),
        protein=network(dim, head.protein),
        nucleotide=network(dim + N_FEATURES, head.nucleotide),
        sha256=_HASH,
    )


def config_of(row: SimulatedRow, fasta: Path, output: Path, weights: Path) -> PredictConfig:
    """The configuration of a row's run, with a head joined with the scorer."""
    head = _head(row.dim)
    encoder = EncoderSpec(
        family=_FAMILY,
        model=_FAMILY,
        sha256=_HASH,
        layer=1,
        pooling="mean",
        precision="fp32",
        dim=row.dim,
    )
    recipe = Recipe(
        command="predict",
        input_type="nucleotide",
        chunk_size=CHUNK_SIZE,
        min_length=0,
        encoders=(encoder,),
        head_sha256=head.sha256,
        keep_vectors=row.keep_vectors,
    )
    devices = ("cpu",) * row.n_devices
    options = build_options(
        PredictOptions, {"input": [fasta], "output_dir": output, "report": False}
    )
    return PredictConfig(
        options=options,
        classifier=choose_classifier(options, "auto", head),
        recipe=recipe,
        resources=Resources(
            devices=devices, tokens_per_batch=row.tokens_per_batch, n_helpers=row.n_helpers
        ),
        checkpoints=(weights,),
        weights=(weights,),
        models=(_FAMILY,),
    )
