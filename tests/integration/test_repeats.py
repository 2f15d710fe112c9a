"""Identical proteins within a run are embedded once, and every frame has its vectors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import faulty_workers
import h5py
import numpy as np
import pytest
import torch
from conftest import TINY, open_dna
from numpy.typing import NDArray
from run_helpers import (
    assert_same_run,
    assert_same_vectors,
    copies_files,
    exported,
    rows,
    run_inline,
    statuses,
    tables,
    vectors,
    write_run_json,
)

from virnucpro.core.errors import FeatureFileError, ResumeError
from virnucpro.core.events import BatchDone, Progress, ShardDone, ShardFailed
from virnucpro.core.recipe import Alphabet
from virnucpro.core.types import Embeddings, Orf, Shard
from virnucpro.engine.local import InlineExecutor
from virnucpro.models.esm2.loading import load_esm2
from virnucpro.models.packing import PackedBatch
from virnucpro.models.pooling import mean_pool, residues_only
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.orfs import Orfs
from virnucpro.store import plan
from virnucpro.store import shard_files as shards
from virnucpro.store.feature_store import FeatureReader, open_stores
from virnucpro.store.shard_files import SequenceIndex, digests_of
from virnucpro.workflows.status import inspect_run

N_PROTEINS = 30
N_TIMES = 3


def random_proteins(n: int, seed: int = 1) -> list[str]:
    """Return random proteins of 40 to 159 residues."""
    rng = np.random.default_rng(seed)
    letters = list("ACDEFGHIKLMNPQRSTVWY")
    return ["".join(rng.choice(letters, rng.integers(40, 160))) for _ in range(n)]


def write_fasta(path: Path, proteins: dict[str, str]) -> Path:
    path.write_text("".join(f">{name}\n{text}\n" for name, text in proteins.items()))
    return path


@pytest.fixture(scope="module")
def proteins() -> dict[str, str]:
    """Three copies of each protein: all once, all again, and then each next to itself."""
    texts = random_proteins(N_PROTEINS)
    again = [*texts, *texts, *(text for text in random_proteins(20, 2) for _ in range(N_TIMES))]
    again += texts
    return {f"p{i}": text for i, text in enumerate(again)}


@pytest.fixture(scope="module")
def repeated(tmp_path_factory, proteins) -> Path:
    return write_fasta(tmp_path_factory.mktemp("input") / "repeated.faa", proteins)


@pytest.fixture(scope="module")
def alone(tiny, proteins) -> dict[str, np.ndarray]:
    """The vectors of the proteins, each embedded by itself."""
    return vectors_alone(tiny, proteins)


@pytest.fixture(scope="module")
def undisturbed(configure, tiny, repeated, tmp_path_factory) -> Path:
    """A finished run of the repeated proteins. No test changes it."""
    config = configure(repeated, output=tmp_path_factory.mktemp("undisturbed") / "run")
    run_inline(config, tiny.head)
    return config.output


def n_embedded(events: Sequence[object]) -> int:
    return sum(len(event.rows) for event in events if isinstance(event, BatchDone))


def vectors_alone(tiny, proteins: dict[str, str], pool=mean_pool) -> dict[str, np.ndarray]:
    """Embed each protein by itself, whatever was embedded before."""
    model = load_esm2(tiny.model, TINY.n_layers, torch.float32, torch.device("cpu"))
    found = {}
    for name, text in proteins.items():
        batch = PackedBatch.from_sequences([text])
        found[name] = pool(model(batch), batch).numpy()
    return found


def assert_right(folder: Path, expected: dict[str, np.ndarray]) -> None:
    assert_same_vectors(vectors(folder), {name: rows[0] for name, rows in expected.items()})


# Runs


@pytest.mark.parametrize("residues_per_shard", [10**6, 2000], ids=["one shard", "many"])
def test_identical_proteins_are_embedded_once(
    make_config, tiny, repeated, proteins, alone, residues_per_shard
):
    config = make_config(repeated, residues_per_shard=residues_per_shard)
    events = []
    run_inline(config, tiny.head, events.append)
    assert n_embedded(events) == len(set(proteins.values())) < len(proteins)
    assert_right(config.output, alone)
    assert set(statuses(config.output).values()) == {"scored"}
    assert (len(copies_files(config.output)) > 1) == (residues_per_shard == 2000)


def test_reverse_complement_shares_frames(make_config, tiny, tmp_path):
    bases = open_dna(3000, np.random.default_rng(3))[:3000]
    reverse = bases.translate(str.maketrans("ACGT", "TGCA"))[::-1]
    fasta = write_fasta(tmp_path / "strands.fa", {"plus": bases, "minus": reverse})
    config = make_config(fasta, keep_intermediate=True)
    events = []
    summary = run_inline(config, tiny.head, events.append)
    assert summary.records.n_frames == 2 * n_embedded(events) > 0
    found = vectors(config.output)
    for i in range(1, 11):
        forward = f"plus_chunk_{i}F1"
        backward = f"minus_chunk_{11 - i}R1"
        assert np.array_equal(found[forward], found[backward])
    headers = [
        line
        for shard in sorted((config.output / "shards").glob("*.faa"))
        for line in shard.read_text().splitlines()
        if " copy=" in line
    ]
    assert len(headers) == n_embedded(events)


def test_protein_in_two_files_is_embedded_once(make_config, tiny, tmp_path, proteins, alone):
    half = len(proteins) // 2
    one = write_fasta(tmp_path / "one.faa", dict(list(proteins.items())[:half]))
    two = write_fasta(tmp_path / "two.faa", dict(list(proteins.items())[half:]))
    config = make_config(one, two)
    events = []
    run_inline(config, tiny.head, events.append)
    assert n_embedded(events) == len(set(proteins.values()))
    assert_right(config.output, alone)


def test_without_pooling_a_copy_has_a_row_per_residue(make_config, tiny, repeated, proteins):
    config = make_config(repeated, command="extract", pooling="none")
    run_inline(config, None)
    expected = vectors_alone(tiny, proteins, residues_only)
    with h5py.File(config.output / "features.h5") as h5:
        ids = h5["ids"].asstr()[:].tolist()
        lengths = h5["lengths"][:]
        rows = np.split(h5["embeddings"][:], np.cumsum(lengths)[:-1])
    assert sorted(ids) == sorted(proteins)
    assert all(np.array_equal(found, expected[i]) for i, found in zip(ids, rows, strict=True))


@pytest.mark.parametrize("layout", ["npz", "parquet", "pt"])
def test_other_formats_have_the_copies(make_config, repeated, alone, layout):
    config = make_config(repeated, command="extract", format=layout)
    run_inline(config, None)
    found = exported(config.output, layout)
    assert_same_vectors(found, {name: vector[0] for name, vector in alone.items()})


def test_summary_and_run_json_count_copies(make_config, tiny, repeated, proteins):
    config = make_config(repeated)
    summary = run_inline(config, tiny.head)
    unique = set(proteins.values())
    n_all = sum(len(text) + 2 for text in proteins.values())
    n_saved = n_all - sum(len(text) + 2 for text in unique)
    n_copies = len(proteins) - len(unique)
    line = (
        f"copies: {n_copies} proteins with a sequence that occurred before, "
        f"{n_saved:,} tokens not embedded again ({n_saved / n_all:.1%})"
    )
    assert line in summary.lines(config.output)
    assert line in (config.output / "virnucpro.log").read_text()
    counts = json.loads((config.output / "run.json").read_text())["counts"]
    assert (counts["n_copies"], counts["n_tokens_saved"]) == (n_copies, n_saved)
    assert (counts["n_tokens"], counts["n_tokens_in_all"]) == (n_all - n_saved, n_all)


def test_run_without_copies_does_not_mention_them(make_config, tiny, tmp_path):
    texts = dict(zip("abc", random_proteins(3), strict=True))
    config = make_config(write_fasta(tmp_path / "unique.faa", texts))
    summary = run_inline(config, tiny.head)
    assert not any(line.startswith("copies") for line in summary.lines(config.output))
    assert not copies_files(config.output)


def test_shards_end_when_either_file_is_full(predicted, tmp_path):
    (text,) = random_proteins(1)
    fasta = write_fasta(tmp_path / "same.faa", {f"p{i}": text for i in range(200)})
    output = predicted(fasta, residues_per_shard=2000)
    files = copies_files(output)
    assert len(files) == -(-199 // -(-2000 // len(text)))
    for file in files:
        with h5py.File(file) as h5:
            assert h5["lengths"][:-1].sum() < 2000
    assert len(vectors(output)) == 200


def test_status_verifies_copies_and_force_clears_them(predicted, repeated):
    output = predicted(repeated, keep_intermediate=True)
    n_shards = len(list((output / "shards").glob("*.faa")))
    lines, n_damaged = inspect_run(output, verify=True)
    assert f"shards    {n_shards} done, 0 pending" in lines and n_damaged == 0
    n_files = len(list((output / "features").glob("*.h5")))
    assert lines[-1].startswith(f"verified  intact: {n_files} feature files, ")
    copies = copies_files(output)[0]
    copies.write_bytes(copies.read_bytes()[:-1])
    lines, n_damaged = inspect_run(output, verify=True)
    assert n_damaged == 1
    assert any(copies.name in line for line in lines)
    other = write_fasta(copies.parents[1].with_name("other.faa"), {"a": random_proteins(1)[0]})
    predicted(other, force=True)
    left = {path.name for path in (output / "features").iterdir()}
    assert left == {"000000.h5", "index.parquet", "lookup.npy", "parts.json"}


# Failures


@pytest.fixture
def poisoned(tmp_path, proteins) -> Path:
    """A poisonous protein in the first shard, with its copies at the end: good, X, ..., Y, Z."""
    text = faulty_workers.POISON + random_proteins(1, 9)[0]
    return write_fasta(tmp_path / "poisoned.faa", {"X": text, **proteins, "Y": text, "Z": text})


def raising() -> InlineExecutor:
    return InlineExecutor(worker=faulty_workers.RaisingWorker)


def test_copy_fails_and_is_repaired_with_its_original(
    predicted, make_config, tiny, poisoned, alone, tmp_path
):
    whole = predicted(poisoned, output=tmp_path / "whole")
    config = make_config(poisoned)
    summary = run_inline(config, tiny.head, executor=raising())
    assert (summary.exit_code, summary.records.statuses["failed"]) == (2, 3)
    table = rows(config.output / "predictions.tsv")
    notes = {row["note"] for row in table if row["record"] in "XYZ"}
    assert notes == {"1 of 1 frames failed: RuntimeError: a [red]bad[/red] sequence"}
    failed = (config.output / "failed_sequences.fa").read_text()
    assert [line for line in failed.splitlines() if line[0] == ">"] == [">X", ">Y", ">Z"]
    assert (config.output / "failed_files.txt").read_text() == (
        f"{poisoned}|embed|3 frames of 3 records failed; "
        "X: RuntimeError: a [red]bad[/red] sequence\n"
    )
    assert_right(config.output, alone)
    events = []
    predicted(poisoned, resume=True, on_event=events.append)
    assert [e.shard.index for e in events if isinstance(e, ShardDone)] == [0]
    assert_same_run(config.output, whole)


def test_copy_is_repaired_with_only_its_original(
    predicted, make_config, tiny, poisoned, proteins, alone, tmp_path
):
    output = predicted(poisoned, executor=raising(), exit_code=2)
    mended = write_fasta(tmp_path / "mended.faa", {"X": random_proteins(1, 8)[0]})
    resumed = make_config(poisoned, mended, resume=True, add=True)
    summary = run_inline(resumed, tiny.head)
    assert (summary.exit_code, summary.records.statuses["scored"]) == (0, len(proteins) + 3)
    texts = {record.id: record.sequence for record in read_fasta(poisoned)}
    changed = {"X": random_proteins(1, 8)[0], "Y": texts["Y"], "Z": texts["Z"]}
    assert_right(output, alone | vectors_alone(tiny, changed))
    again = run_inline(make_config(poisoned, mended, resume=True, add=True), tiny.head)
    assert again.n_tokens == 0


class LosingExecutor(InlineExecutor):
    """Loses the first shard."""

    def run(self, shards, job, resources):
        yield ShardFailed(self.device, shards[0], "its worker died (a test)")
        yield from super().run(shards[1:], job, resources)


def test_copies_of_a_lost_shard_fail(predicted, repeated, proteins, alone):
    output = predicted(repeated, executor=LosingExecutor(), exit_code=2)
    assert not (output / "features" / "000000.h5").exists()
    found = vectors(output)
    lost = {proteins[name] for name in proteins.keys() - found.keys()}
    assert lost and not lost & {proteins[name] for name in found}
    assert_same_vectors(found, {name: alone[name][0] for name in found})
    bad = {name for name, status in statuses(output).items() if status == "failed"}
    assert bad == {name for name, text in proteins.items() if text in lost}
    predicted(repeated, resume=True)
    assert_right(output, alone)


def test_run_with_all_shards_lost_has_empty_index(predicted, make_config, tiny, tmp_path):
    (text,) = random_proteins(1)
    fasta = write_fasta(tmp_path / "same.faa", {"a": text, "b": text})
    output = predicted(fasta, residues_per_shard=10, executor=LosingExecutor(), exit_code=1)
    assert vectors(output) == {}
    assert run_inline(
        make_config(fasta, resume=True, residues_per_shard=10), tiny.head
    ).records.n_frames


# Resume


def test_interrupted_copying_resumes(make_config, tiny, repeated, undisturbed):
    config = make_config(repeated)

    def interrupt(event):
        if isinstance(event, Progress) and event.stage == "writing tables" and event.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_inline(config, tiny.head, interrupt)
    assert 0 < len(copies_files(config.output)) < len(copies_files(undisturbed))
    assert run_inline(make_config(repeated, resume=True), tiny.head).n_tokens == 0
    assert_same_run(config.output, undisturbed)


def test_damaged_copies_file_is_remade(make_config, tiny, repeated, undisturbed):
    config = make_config(repeated)
    shutil.copytree(undisturbed, config.output)
    gone, short, changed, foreign, *_ = copies_files(config.output)
    gone.unlink()
    short.write_bytes(short.read_bytes()[:-100])
    with h5py.File(changed, "r+") as h5:
        h5["embeddings"][0, 0] += 1
    shutil.copyfile(short.with_name("000000.h5"), foreign)
    untouched = copies_files(config.output)[-1]
    written = untouched.stat().st_mtime_ns
    assert run_inline(make_config(repeated, resume=True), tiny.head).n_tokens == 0
    assert_same_run(config.output, undisturbed)
    for path in (config.output / "features").iterdir():
        assert path.read_bytes() == (undisturbed / "features" / path.name).read_bytes()
    assert untouched.stat().st_mtime_ns == written


def test_copies_file_in_place_of_a_shard_is_refused(predicted, make_config, repeated, undisturbed):
    config = make_config(repeated)
    shutil.copytree(undisturbed, config.output)
    copies = copies_files(config.output)[0]
    shutil.copyfile(copies, copies.with_name(copies.name.replace("_copies", "")))
    events = []
    predicted(repeated, resume=True, on_event=events.append)
    done = [event.shard.name for event in events if isinstance(event, ShardDone)]
    assert done == [copies.name.removesuffix("_copies.h5")]
    assert_same_run(config.output, undisturbed)


def test_run_without_deduplication_is_refused(make_config, tiny, repeated, undisturbed):
    config = make_config(repeated, resume=True)
    shutil.copytree(undisturbed, config.output)
    stored = json.loads((config.output / "run.json").read_text())
    del stored["recipe"]["shard_format"]
    write_run_json(config.output, stored)
    with pytest.raises(ResumeError, match="of an earlier state of virnucpro"):
        run_inline(config, tiny.head)


def test_added_input_copies_nothing_earlier(
    predicted, repeated, undisturbed, proteins, alone, tmp_path
):
    """Records of earlier inputs may fail, and be repaired, by themselves."""
    shutil.copytree(undisturbed, tmp_path / "run")
    more = {f"more{name}": text for name, text in proteins.items()}
    added = write_fasta(tmp_path / "more.faa", more)
    events = []
    predicted(repeated, added, resume=True, add=True, on_event=events.append)
    assert n_embedded(events) == len(set(proteins.values()))
    assert_right(tmp_path / "run", alone | {f"more{name}": alone[name] for name in proteins})
    predicted(repeated, added, output=tmp_path / "both")
    assert tables(tmp_path / "run") == tables(tmp_path / "both")


def test_feature_file_in_other_order_is_refused(make_config, tmp_path):
    recipe = make_config(tmp_path).recipe
    (store,) = open_stores(tmp_path / "features", recipe.encoders, recipe.fingerprint)
    store.make_folder()
    shard = Shard(0, tmp_path / "000000.faa", 2, 2, 200, "0" * 64)
    orfs = make_orfs(random_proteins(2))
    lengths = np.array([len(orf.protein) for orf in reversed(orfs)], dtype=np.int32)
    rows = np.zeros((2, TINY.dim), dtype=np.float32)
    store.write(shard, Embeddings(tuple(orf.id for orf in reversed(orfs)), lengths, rows))
    with pytest.raises(FeatureFileError, match="order"):
        FeatureReader(store, [shard]).read(shard, orfs, {}, 0)


# Detected copies


def test_forgotten_copies_cost_only_time(
    make_config, tiny, repeated, undisturbed, proteins, monkeypatch
):
    monkeypatch.setattr(shards, "SequenceIndex", partial(SequenceIndex, max_remembered=4))
    monkeypatch.setattr(plan, "LETTERS_AT_ONCE", 300)
    config = make_config(repeated)
    events = []
    run_inline(config, tiny.head, events.append)
    assert len(set(proteins.values())) < n_embedded(events) < len(proteins)
    assert tables(config.output) == tables(undisturbed)  # the shards are cut elsewhere
    assert_same_vectors(vectors(config.output), vectors(undisturbed))


def make_orfs(proteins: Sequence[str]) -> list[Orf]:
    return [Orf(f"o{i}", "c", "r", 0, 0, "+", text) for i, text in enumerate(proteins)]


def digests(proteins: Sequence[str]) -> NDArray[np.uint64]:
    ids = [f"o{i}" for i in range(len(proteins))]
    return digests_of(Orfs.from_proteins(ids, proteins), [Alphabet.PROTEIN])


@pytest.mark.parametrize("max_remembered", [1, 8, 2**16])
def test_copy_has_the_protein_of_its_original(max_remembered):
    rng = np.random.default_rng(max_remembered)
    proteins = ["".join(rng.choice(list("AC"), rng.integers(1, 9))) for _ in range(5000)]
    seen = SequenceIndex(max_remembered)
    embedded: list[str] = []
    parts = (seen.find_originals(part) for part in np.split(digests(proteins), [10, 10, 4000]))
    for protein, original in zip(proteins, np.concatenate([*parts]).tolist(), strict=True):
        if original < 0:
            embedded.append(protein)
        else:
            assert embedded[original] == protein
    assert seen.n_embedded == len(embedded)
    assert set(embedded) == set(proteins)
    assert (len(embedded) == len(set(proteins))) == (max_remembered == 2**16)


def test_nearly_equal_proteins_are_not_copies():
    (text,) = random_proteins(1)
    one_off = [text[:i] + "X" + text[i + 1 :] for i in range(len(text))]
    prefixes = [text[:n] for n in range(1, len(text))]
    swapped = [text[:i] + text[i + 1] + text[i] + text[i + 2 :] for i in range(len(text) - 1)]
    different = list({*one_off, *prefixes, *swapped, text, text + "A", text + text})
    seen = SequenceIndex()
    assert (seen.find_originals(digests(different)) == -1).all()
    assert seen.find_originals(digests(different)).tolist() == list(range(len(different)))
