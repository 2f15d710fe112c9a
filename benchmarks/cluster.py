"""A run on many machines, but for the computing: one plan, many ``work`` at once, one end.

Every shard holds one frame, and the encoder is ``composition``, whose vectors are empty. So what is
timed is reading, locking, looking, writing and syncing, on one file system. Processes stand for
machines; they are forked, so that their start takes no time.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from virnucpro.callers.caller import Caller
from virnucpro.engine.executor import InlineExecutor, NoExecutor
from virnucpro.ground.config import EncoderSpec, Recipe, Resources
from virnucpro.ground.option_fields import make
from virnucpro.run.folder import RunDir
from virnucpro.run.plan import read_plan
from virnucpro.run.status import measure_run
from virnucpro.stories.options import ExtractOptions
from virnucpro.stories.pipeline import make_job, run
from virnucpro.stories.resolve import RunConfig, WorkConfig
from virnucpro.stories.work import Part, embed, find_owed, find_run

_BASES = 60  # of a record: on average 2.3 of its six frames are open
_RESOURCES = Resources(devices=("cpu",), tokens_per_batch=2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRow:
    n_workers: int
    n_shards: int
    plan_seconds: float
    look_seconds: float  # of one process, for the plan and the labels of its part
    work_seconds: float  # until the last of all processes has ended
    shards_per_second: float
    status_seconds: float
    end_seconds: float  # all shards verified, all tables and the index written


def time_cluster(n_workers: int, n_shards: int) -> ClusterRow:
    with TemporaryDirectory(prefix="virnucpro-measure-") as folder:
        root = Path(folder)
        fasta = root / "reads.fa"
        rng = random.Random(1)
        with fasta.open("w") as out:
            for i in range(int(n_shards / 2.28)):
                out.write(f">r{i}\n{''.join(rng.choices('ACGT', k=_BASES))}\n")
        with _timed() as plan:
            run(_config(fasta, root / "run", plan_only=True), NoExecutor(), lambda _: None)
        n = measure_run(root / "run")["shards"]["total"]
        fork = multiprocessing.get_context("fork")
        looks = fork.SimpleQueue()
        parts = [Part(i, n_workers) for i in range(n_workers)]
        workers = [fork.Process(target=_work, args=(root / "run", part, looks)) for part in parts]
        with _timed() as work:
            for worker in workers:
                worker.start()
            look_seconds = [looks.get() for _ in workers]
            for worker in workers:
                worker.join()
        assert not any(worker.exitcode for worker in workers)
        with _timed() as status:
            assert measure_run(root / "run")["shards"]["pending"] == 0
        with _timed() as end:
            resumed = _config(fasta, root / "run", resume=True)
            run(resumed, NoExecutor(), lambda _: None)
        shutil.rmtree(root / "run")
    return ClusterRow(
        n_workers=n_workers,
        n_shards=n,
        plan_seconds=plan[0],
        look_seconds=max(look_seconds),
        work_seconds=work[0],
        shards_per_second=n / work[0],
        status_seconds=status[0],
        end_seconds=end[0],
    )


def _config(fasta: Path, folder: Path, **how: bool) -> RunConfig:
    options = {"input": [fasta], "output_dir": folder, "keep_intermediate": True, **how}
    encoder = EncoderSpec(
        family="composition",
        model="none",
        sha256="0" * 64,
        layer=1,
        pooling="mean",
        precision="fp32",
        dim=0,
        reads="dna",
    )
    recipe = Recipe(
        command="extract",
        input_type="nucleotide",
        chunk_size=_BASES,
        min_length=0,
        encoders=(encoder,),
        residues_per_shard=1,
    )
    return RunConfig(
        options=make(ExtractOptions, options),
        caller=Caller(),
        recipe=recipe,
        resources=_RESOURCES,
        checkpoints=(fasta,),
        weights=(fasta,),
        models=("none",),
    )


def _work(folder: Path, part: Part, looks: multiprocessing.SimpleQueue[float]) -> None:
    """The steps of ``work`` on a model that needs no file."""
    rundir = RunDir(folder)
    with rundir.shared():
        with _timed() as look:
            manifest = find_run(rundir)
            plan = read_plan(rundir, manifest)
            assert plan is not None
            shards = find_owed(rundir, manifest, part.of(plan.shards), lambda _: None)
        looks.put(look[0])
        job = make_job(rundir, manifest.recipe, (folder,))
        config = WorkConfig(resources=_RESOURCES, weights=(folder,), announcements=())
        with closing(embed(shards, job, config, lambda _: InlineExecutor())) as events:
            for _ in events:
                pass


@contextmanager
def _timed() -> Iterator[list[float]]:
    """The seconds of a block, in a list of one."""
    seconds: list[float] = []
    start = time.monotonic()
    yield seconds
    seconds.append(round(time.monotonic() - start, 2))
