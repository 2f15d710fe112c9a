"""A run that keeps no vectors has the tables of one that keeps them, whatever interrupts it."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import faulty_workers
import numpy as np
import pytest
from conftest import open_dna, random_dna
from numpy.typing import NDArray
from run_helpers import (
    again,
    execute,
    failures,
    flip_bit,
    forget_hashes,
    invoke,
    leftovers,
    rows,
    run_inline,
    tables,
    write_fasta,
    write_run_json,
)
from safetensors.numpy import load, save

from virnucpro.api import read_features
from virnucpro.core.errors import InputMissingError, ResumeError, UsageError
from virnucpro.core.events import BatchDone, RunEvent, ShardDone, WorkerEvent
from virnucpro.core.option_schema import build_options
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Shard
from virnucpro.engine.base import Resources, WorkerConfig
from virnucpro.engine.local import InlineExecutor, ProcessExecutor
from virnucpro.engine.worker import Worker
from virnucpro.results.outputs import open_run_dir
from virnucpro.store.feature_file import read_checksummed, write_checksummed
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.recompute import recompute

SMALL = {"residues_per_shard": 900, "bytes_per_slice": 2**13}


@pytest.fixture(scope="module")
def records() -> dict[str, str]:
    """Records with frames that are equal in protein, in bases, in both, or only at their start."""
    rng = np.random.default_rng(3)
    found = {}
    for number in range(12):
        bases = open_dna(330, rng)
        found[f"r{number}"] = bases
        found[f"r{number}_again"] = bases
        found[f"r{number}_synonym"] = bases.replace("GCA", "GCC").replace("CTT", "CTC")
        found[f"r{number}_gap"] = bases[:150] + "NNN" + bases[153:]
        found[f"r{number}_gap_again"] = bases[:150] + "NNN" + bases[153:]
        found[f"r{number}_other_gap"] = bases[:150] + "RYN" + bases[153:]
        found[f"r{number}_end"] = bases[:240]
        found[f"r{number}_open_end"] = bases[:240] + "NNNNNN"
        found[f"r{number}_near_end"] = bases[:241] + "NNNNN"
    found |= {f"random{number}": random_dna(500, rng) for number in range(8)}
    return found


@pytest.fixture(scope="module")
def fasta(tmp_path_factory, records) -> Path:
    return write_fasta(tmp_path_factory.mktemp("input") / "records.fa", records)


@pytest.fixture(scope="module")
def with_vectors(configure, tiny, fasta, tmp_path_factory) -> Path:
    """A finished run that keeps its vectors. No test changes it."""
    config = configure(fasta, output=tmp_path_factory.mktemp("with") / "run", **SMALL)
    run_inline(config, tiny.head)
    return config.output


@pytest.fixture
def scored(predicted, fasta) -> Callable[..., Path]:
    """Run without vectors. -> the run folder"""

    def run(*inputs: Path, **changes: object) -> Path:
        return predicted(*(inputs or (fasta,)), **{**SMALL, "keep_vectors": False, **changes})

    return run


def score_files(folder: Path) -> list[Path]:
    return sorted((folder / "scores").glob("*.frames"))


def assert_same_tables(one: Path, other: Path) -> None:
    assert tables(one) == tables(other)
    assert failures(one) == failures(other)
    assert not leftovers(one)


def test_tables_do_not_depend_on_kept_vectors(scored, with_vectors):
    folder = scored()
    assert_same_tables(folder, with_vectors)
    assert len(score_files(folder)) > 3
    assert not (folder / "features").exists()
    assert not (folder / "features.h5").exists()
    with pytest.raises(InputMissingError, match="without vectors") as caught:
        dict(read_features(folder))
    assert str(caught.value.hint).endswith("with a model and keep_vectors='yes'")


def test_equal_frames_are_embedded_once(scored, tmp_path, records):
    events: list[object] = []
    once = {name: bases for name, bases in records.items() if not name.endswith("_again")}
    scored(on_event=events.append)
    n_all = sum(len(event.rows) for event in events if isinstance(event, BatchDone))
    events.clear()
    scored(write_fasta(tmp_path / "once.fa", once), output=tmp_path / "o", on_event=events.append)
    assert n_all == sum(len(event.rows) for event in events if isinstance(event, BatchDone))


def test_proteins_have_the_same_tables(predicted, tmp_path):
    rng = np.random.default_rng(1)
    proteins = ["".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), 60)) for _ in range(30)]
    fasta = write_fasta(tmp_path / "p.faa", {f"p{i}": text for i, text in enumerate(2 * proteins)})
    kept = predicted(
        fasta, input_type="protein", chunk_size=0, residues_per_shard=700, output=tmp_path / "kept"
    )
    folder = predicted(
        fasta, input_type="protein", chunk_size=0, residues_per_shard=700, keep_vectors=False
    )
    assert_same_tables(folder, kept)
    assert len(score_files(folder)) > 1


def test_score_file_has_the_vectors_of_waiting_frames_only(scored):
    """A vector has 128 bytes."""
    folder = scored()
    n_frames = len(rows(folder / "prediction_results.txt"))
    assert sum(path.stat().st_size for path in score_files(folder)) < 400 * n_frames


class KilledWriter(faulty_workers.FatalWriter):
    """Exits while it writes shard 0, once the file of scores is there."""

    def _write_shard(self, finished: object) -> tuple[float, str]:
        outcome = Worker._write_shard(self, finished)
        if finished.attempt.shard.index == 0 and not (self.job.root / "killed").exists():
            (self.job.root / "killed").touch()
            faulty_workers.os.kill(faulty_workers.os.getpid(), faulty_workers.signal.SIGKILL)
        return outcome


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("worker", [KilledWriter, faulty_workers.StumblingWorker])
def test_killed_worker_loses_no_score(make_config, tiny, fasta, with_vectors, worker):
    config = make_config(fasta, keep_vectors=False, **SMALL)
    events: list[object] = []
    executor = ProcessExecutor(("cpu",), worker)
    exit_code = run_inline(config, tiny.head, events.append, executor).exit_code
    if worker is KilledWriter:
        assert exit_code == 0
    else:  # the shard that kills every worker is lost, and done again
        assert exit_code == 2
        run_inline(again(config, resume=True), tiny.head)
    assert_same_tables(config.output, with_vectors)
    assert not (config.output / "features").exists()


@pytest.mark.parametrize("harm", ["gone", "truncated", "damaged", "of another shard"])
def test_resume_scores_a_missing_or_damaged_shard_again(scored, with_vectors, harm):
    folder = scored()
    one, two = score_files(folder)[1:3]
    match harm:
        case "gone":
            one.unlink()
        case "truncated":
            one.write_bytes(one.read_bytes()[:-9])
        case "damaged":
            flip_bit(one, 200)
        case _:
            one.write_bytes(two.read_bytes())
    assert invoke("status", folder, "--verify")[0] == 1
    for table in ("predictions.tsv", "viral.fasta"):
        (folder / table).unlink()
    events: list[object] = []
    scored(resume=True, on_event=events.append)
    assert [event.shard.index for event in events if isinstance(event, ShardDone)] == [1]
    assert_same_tables(folder, with_vectors)
    assert invoke("status", folder, "--verify")[0] == 0


def test_failed_frames_and_their_copies_are_named_as_with_vectors(
    make_config, tiny, tmp_path, records
):
    poison = "TGGTGGTGGTGGTGTTGGTGGTGGTGG"  # see ``faulty_workers.POISON``
    bases = records["r0"][:150] + poison + records["r0"][150:]
    fasta = write_fasta(tmp_path / "p.fa", {**records, "bad": bases, "bad_again": bases})

    class Refusing(Worker):
        def start(self, encoder, sequences):
            if any(faulty_workers.POISON in text for text in sequences):
                raise RuntimeError("a test refuses this")
            return super().start(encoder, sequences)

    folders = []
    for keep in (True, False):
        config = make_config(fasta, output=tmp_path / str(keep), keep_vectors=keep, **SMALL)
        executor = InlineExecutor(worker=Refusing)
        assert run_inline(config, tiny.head, executor=executor).exit_code == 2
        folders.append(config)
    kept, scores = folders
    assert_same_tables(scores.output, kept.output)
    assert "bad_again" in failures(scores.output)["failed_sequences.fa"].decode()
    for config in folders:  # both are done again
        assert run_inline(again(config, resume=True), tiny.head).exit_code == 0
    assert_same_tables(scores.output, kept.output)


# A run that keeps its vectors


@pytest.fixture
def output(tmp_path) -> Path:
    """The folder that ``make_config`` uses."""
    return tmp_path / "run"


class Interrupted(InlineExecutor):
    """Embeds all shards, then ends as after Ctrl-C."""

    def run(
        self, shards: Sequence[Shard], job: WorkerConfig, resources: Resources
    ) -> Generator[WorkerEvent, None, None]:
        yield from super().run(shards, job, resources)
        raise KeyboardInterrupt


@pytest.fixture
def resume(make_config, tiny, fasta) -> Callable[[], Path]:
    """Embed the shards of a run with vectors. -> complete it, without embedding any"""
    config = make_config(fasta, **SMALL)
    with pytest.raises(KeyboardInterrupt):
        run_inline(config, tiny.head, executor=Interrupted())

    def complete() -> Path:
        events: list[RunEvent] = []
        run_inline(again(config, resume=True), tiny.head, events.append)
        assert not any(isinstance(event, ShardDone) for event in events)
        assert not (config.output / "scores").exists()
        return config.output

    return complete


def change_columns(path: Path, **changes: NDArray[np.generic]) -> None:
    """Replace columns in a file of scores."""
    label, content = read_checksummed(path, {})
    write_checksummed(
        SafeDir(path.parent), path, save({**load(content), **changes}), label.attributes
    )


def test_kept_vectors_are_not_scored_twice(resume, with_vectors, output):
    path = score_files(output)[0]
    scores = load(read_checksummed(path, {})[1])["scores"]
    change_columns(path, scores=1 - scores)
    folder = resume()
    assert tables(folder) != tables(with_vectors)
    names = ("features.h5", "features/index.parquet", "features/parts.json")
    assert all((folder / name).read_bytes() == (with_vectors / name).read_bytes() for name in names)


@pytest.mark.parametrize("harm", ["gone", "truncated", "damaged", "of other vectors"])
def test_kept_vectors_are_read_if_their_scores_are_not_stored(resume, with_vectors, output, harm):
    path = score_files(output)[1]
    match harm:
        case "gone":
            path.unlink()
        case "truncated":
            path.write_bytes(path.read_bytes()[:-9])
        case "damaged":
            flip_bit(path, 200)
        case _:
            checksums = json.dumps([["0" * 64, "xxh3-128:0"]]).encode()
            change_columns(
                path,
                features=np.frombuffer(checksums, np.uint8),
                scores=np.zeros_like(load(read_checksummed(path, {})[1])["scores"]),
            )
    folder = resume()
    assert_same_tables(folder, with_vectors)
    assert invoke("status", folder, "--verify")[0] == 0


def test_damaged_vectors_with_stored_scores_are_made_again(
    make_config, tiny, fasta, resume, with_vectors, output
):
    flip_bit(output / "features/000001.h5", 3000)
    events: list[RunEvent] = []
    config = make_config(fasta, resume=True, **SMALL)
    run_inline(config, tiny.head, events.append)
    assert [event.shard.index for event in events if isinstance(event, ShardDone)] == [1]
    assert_same_tables(output, with_vectors)
    assert (output / "features.h5").read_bytes() == (with_vectors / "features.h5").read_bytes()


@pytest.fixture
def resolved(tiny, fasta, tmp_path) -> Path:
    """Run without vectors, with options that ``recompute`` can resolve. -> the run folder"""
    options = PredictOptions(
        input=(fasta,),
        output_dir=tmp_path / "resolved",
        model=str(tiny.model),
        head=tiny.head_file,
        device="cpu",
        precision="fp32",
        keep_vectors="no",
    )
    execute(options, lambda _: None, lambda _: InlineExecutor())
    return options.output_dir


def test_recompute_gives_the_same_bits(resolved):
    made = recompute(resolved, 10, 0, lambda _: InlineExecutor())
    assert made.faults == []
    assert made.n_same_bits == made.n_shards > 0
    assert made.n_slices == 1


@pytest.mark.parametrize("column", ["scores", "ids"])
def test_recompute_finds_false_scores(resolved, column):
    path = score_files(resolved)[0]
    label, content = read_checksummed(path, {})
    columns = load(content)
    columns[column] = np.roll(columns[column], 1)
    write_checksummed(SafeDir(resolved), path, save(columns), label.attributes)
    made = recompute(resolved, 10, 0, lambda _: InlineExecutor())
    other = "scores than the input gives" if column == "scores" else "frames than the input"
    assert any(f"{path} has other {other}" in fault for fault in made.faults)


def test_resume_with_the_other_choice_is_refused(scored):
    folder = scored()
    with pytest.raises(ResumeError, match="--keep-vectors was no, now yes"):
        scored(resume=True, keep_vectors=True)
    assert len(score_files(folder)) > 3


def test_run_of_a_version_without_the_choice_keeps_its_vectors(predicted, fasta, with_vectors):
    folder = predicted(fasta, **SMALL)
    stored = json.loads((folder / "run.json").read_text())
    assert stored["recipe"].pop("keep_vectors") is True
    write_run_json(folder, stored)
    forget_hashes(folder)
    (folder / "predictions.tsv").unlink()
    manifest = open_run_dir(folder).read_manifest()
    assert manifest is not None
    assert manifest.recipe.keep_vectors
    predicted(fasta, **SMALL, resume=True)
    assert_same_tables(folder, with_vectors)


@pytest.mark.parametrize(
    ("options", "recorded", "has_head", "expected"),
    [
        ({}, None, True, False),
        ({}, None, False, True),
        ({"head": "h", "embed": "viral", "calls": "head", "workers": 2}, None, True, False),
        ({"gpus": "0"}, None, True, True),
        ({"device": "cpu"}, None, True, True),
        ({"store": "bfloat16"}, None, True, True),
        ({"cache": "folder"}, None, True, True),
        ({"gpus": "0", "keep_vectors": "no"}, None, True, False),
        ({"keep_vectors": "yes"}, None, True, True),
        ({"gpus": "0"}, False, True, False),
        ({}, True, True, True),
        ({"keep_vectors": "yes"}, False, True, True),
    ],
)
def test_vectors_are_kept_if_asked_for(options, recorded, has_head, expected):
    made = build_options(PredictOptions, {"input": "i", "output_dir": "o", **options})
    assert made.keeps_vectors(recorded, has_head=has_head) is expected


def test_without_a_head_vectors_are_kept():
    made = build_options(PredictOptions, {"input": "i", "output_dir": "o", "keep_vectors": "no"})
    with pytest.raises(UsageError, match="leaves nothing"):
        made.keeps_vectors(None, has_head=False)
