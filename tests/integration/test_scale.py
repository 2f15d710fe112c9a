"""Large inputs: what is in memory, and what a resumed run reads before it continues.

Full size: ``pytest tests/integration/test_scale.py --records 10000000 --shards 100000``.
"""

from __future__ import annotations

import gc
import json
import resource
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import TINY, Tiny
from forkserver_runner import fork_server
from run_helpers import again, run_inline, statuses

from virnucpro.core.events import EmbeddingStarted, Progress
from virnucpro.core.helper_pool import HelperPool
from virnucpro.core.recipe import EncoderSpec, Recipe
from virnucpro.core.types import Embeddings
from virnucpro.engine.base import Resources, WorkerConfig
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.input_scan import InputScan
from virnucpro.sequences.inputs import InputFile
from virnucpro.store.feature_store import FeatureStore
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Plan, Selection, reject_duplicates
from virnucpro.store.run_dir import RunDir
from virnucpro.workflows.collect_inputs import collect_inputs
from virnucpro.workflows.extract_config import ExtractConfig
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.run_steps import find_pending

PROC = Path("/proc/self")
needs_proc = pytest.mark.skipif(
    not (PROC / "io").exists(), reason="the kernel does not tell what a process reads and holds"
)
DIM = 2048
RECIPE = Recipe(
    command="extract",
    input_type="nucleotide",
    chunk_size=500,
    min_length=0,
    encoders=(
        EncoderSpec(
            model="tiny",
            sha256="0" * 64,
            layer=TINY.n_layers,
            pooling="mean",
            precision="fp32",
            dim=DIM,
        ),
    ),
)


def nothing(*_: object) -> None:
    pass


def kernel_says(file: str, key: str) -> int:
    lines = (PROC / file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def adopted_plan(rundir: RunDir, manifest: Manifest) -> Plan:
    with rundir.planning():
        plan = Plan.cut(rundir, manifest, keep_intermediate=False).plan_slices(
            Selection(), nothing, HelperPool()
        )
        plan.write_listing()
        rundir.adopt_plan()
    return plan


# Planning

READ_LENGTH = 150
FEW_RECORDS = 50_000  # fill a block of letters, and shards of both kinds


def write_reads(path: Path, n_records: int) -> None:
    """Write reads with many repeats, so that the table of known proteins stays small."""
    rng = np.random.default_rng(3)
    pool = [rng.choice(list(b"ACGT"), READ_LENGTH).astype(np.uint8).tobytes() for _ in range(4000)]
    with path.open("wb") as out:
        for i in range(n_records):
            out.write(b">read%d\n%s\n" % (i, pool[i % len(pool)]))


def plan_reads(fasta: Path, n_records: int, told: Path) -> None:
    """Print the peak memory that planning adds, in bytes. Run it in a separate process."""
    rundir = open_run_dir(fasta.with_suffix(".run"))
    rundir.root.mkdir()
    manifest = Manifest(
        RECIPE, tuple(InputScan(is_strict=True).hash([InputFile(str(fasta))], nothing))
    )
    gc.collect()
    before = kernel_says("status", "VmHWM:")
    plan = adopted_plan(rundir, manifest)
    peak = (kernel_says("status", "VmHWM:") - before) * 1024
    assert plan.counts.n_records == n_records
    told.write_text(json.dumps(peak))


N_HASHES = 2_000_000


def look_for_duplicates(told: Path) -> None:
    """Print the peak memory on top of the id hashes, in bytes. Run it in a separate process."""
    hashes = array("q")
    hashes.frombytes(np.random.default_rng(0).integers(-(2**62), 2**62, N_HASHES).tobytes())
    before = kernel_says("status", "VmHWM:")
    reject_duplicates(hashes, Manifest(RECIPE, ()))
    told.write_text(json.dumps((kernel_says("status", "VmHWM:") - before) * 1024))


def survey_reads(paths: list[Path], told: Path) -> None:
    """Print the peak memory that a scan of the input adds, in bytes.

    Run it in a separate process.
    """
    inputs = InputScan(is_strict=True).hash((InputFile(str(path)) for path in paths), nothing)
    survey = InputScan()
    before = kernel_says("status", "VmHWM:")
    kept = survey.run(inputs)
    survey.share_ids(kept)
    told.write_text(json.dumps((kernel_says("status", "VmHWM:") - before) * 1024))


def run_alone(told_by: Callable[[Path], None], told: Path) -> int:
    process = fork_server().Process(target=told_by, args=(told,))
    process.start()
    process.join()
    found: int = json.loads(told.read_text())
    return found


def memory_of_planning(folder: Path, n_records: int) -> int:
    fasta = folder / f"{n_records}.fa"
    told = folder / f"{n_records}.json"
    write_reads(fasta, n_records)
    return run_alone(partial(plan_reads, fasta, n_records), told)


@needs_proc
def test_planning_memory_per_record(tmp_path, request):
    """Memory also has a byte per record while neighbours are compared. The rest has a fixed size.

    The growing array may be a sixteenth larger than its content. In addition there may be 4 MiB in
    the allocator, and 1 kB for each shard, of which there is one for 2,000 records.
    """
    n_records = request.config.getoption("--records")
    assert run_alone(look_for_duplicates, tmp_path / "told.json") < 10 * N_HASHES
    fixed = memory_of_planning(tmp_path, FEW_RECORDS)
    assert fixed < 96 << 20
    most = 17 * n_records + n_records // 2 + (4 << 20) + n_records // 2
    assert memory_of_planning(tmp_path, n_records) - fixed < most


@needs_proc
def test_files_are_compared_in_9_bytes_per_record(tmp_path, request):
    """8 bytes in an array that may be a sixteenth too large, and 1 while neighbours are compared.

    A file that is read takes some more, whatever its size. Ids differ everywhere.
    """
    peaks = []
    for n_records in (FEW_RECORDS, request.config.getoption("--records")):
        path = tmp_path / f"{n_records}.fa"
        other = tmp_path / "other.fa"
        write_reads(path, n_records)
        other.write_text(">another\nACGT\n")
        peaks.append(run_alone(partial(survey_reads, [path, other]), tmp_path / "told.json"))
    assert peaks[1] - peaks[0] < 10 * n_records + (4 << 20)


# Resuming

N_RESIDUES = 60  # of each protein, which is a shard by itself
LABEL_BYTES = 2048  # a label has about 700


@dataclass(frozen=True)
class FinishedRun:
    config: ExtractConfig
    rundir: RunDir
    plan: Plan
    store: FeatureStore

    def pending(self) -> list[int]:
        shards = find_pending([self.store], self.plan.shards, frozenset(), nothing)
        return [shard.index for shard in shards]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny: Tiny, request) -> FinishedRun:
    """A run folder with many embedded shards, before its tables are made."""
    folder = tmp_path_factory.mktemp("finished")
    rng = np.random.default_rng(5)
    fasta = folder / "proteins.faa"
    with fasta.open("w") as out:
        for i in range(request.config.getoption("--shards")):
            protein = "".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), N_RESIDUES))
            out.write(f">p{i}\n{protein}\n")
    config = ExtractConfig(
        options=ExtractOptions(input=(fasta,), output_dir=folder / "run"),
        recipe=replace(RECIPE, residues_per_shard=N_RESIDUES),
        resources=Resources(devices=("cpu",), tokens_per_batch=2048),
        checkpoints=(tiny.model,),
        weights=(tiny.model,),
    )
    rundir = open_run_dir(config.output)
    rundir.root.mkdir()
    rundir.features.mkdir()
    manifest = collect_inputs(config, rundir, None, nothing)
    plan = adopted_plan(rundir, manifest)
    rundir.write_manifest(manifest, {"state": "unfinished"})
    (store,) = WorkerConfig.from_recipe(rundir, manifest.recipe, config.weights).stores
    for shard in plan.shards:
        embeddings = Embeddings(
            ids=(f"p{shard.index}",),
            lengths=np.array([N_RESIDUES], dtype=np.int32),
            vectors=rng.standard_normal((1, DIM)).astype(np.float32),
            sequence_sha256=np.zeros((1, 32), dtype=np.uint8),
        )
        store.write(shard, embeddings)
    return FinishedRun(config, rundir, plan, store)


@needs_proc
def test_finished_shards_are_listed_by_label(finished):
    assert finished.store.path(finished.plan.shards[0]).stat().st_size > 4 * LABEL_BYTES
    before = kernel_says("io", "rchar:")
    assert finished.pending() == []
    n_bytes = kernel_says("io", "rchar:") - before
    assert n_bytes < LABEL_BYTES * len(finished.plan.shards)


def test_resumed_run_of_many_shards_embeds_nothing(finished):
    events = []
    summary = run_inline(again(finished.config, resume=True), None, events.append)
    assert summary.exit_code == 0
    assert not any(isinstance(event, EmbeddingStarted) for event in events)
    stages = {event.stage for event in events if isinstance(event, Progress)}
    assert {"checking shards", "checking finished shards", "writing tables"} <= stages
    found = statuses(finished.config.output, "records.tsv")
    assert found == {f"p{i}": "embedded" for i in range(len(finished.plan.shards))}


def read_merged(path: Path, n_files: int) -> None:
    """Read in a separate process, with fewer open files than a store has."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    with h5py.File(path) as h5:
        ids = h5["ids"].asstr()[:].tolist()
        vectors = h5["embeddings"][:]
    assert ids == [f"p{i}" for i in range(n_files)]
    assert np.isfinite(vectors).all()


def test_features_are_read_with_few_open_files(finished):
    run_inline(again(finished.config, resume=True), None)
    n_files = len(finished.plan.shards)
    assert n_files > 64
    about = (finished.rundir.feature_index, n_files)
    reader = fork_server().Process(target=read_merged, args=about)
    reader.start()
    reader.join()
    assert reader.exitcode == 0
