"""No name of a chunk, frame, piece or region is the id of a record in the run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import open_dna, random_dna
from hypothesis import example, given
from hypothesis import strategies as st
from region_helpers import host_dna, phage_dna
from run_helpers import again, execute, rows, run_inline, tables, vectors, write_run_json
from scorer_run_helpers import in_blocks, outputs, predict, write

from virnucpro.core.types import FastaRecord, Records
from virnucpro.engine.local import InlineExecutor
from virnucpro.engine.work_options import WorkOptions
from virnucpro.sequences.derived_names import (
    FRAME_ENDINGS,
    DerivedNameScan,
    original_name,
    without_number,
)
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.taken_names import find_taken_names
from virnucpro.training.frame_dataset import FrameStore, link_vectors, read_ids, write_frames
from virnucpro.training.labelled_data import LabelledRecord
from virnucpro.workflows.find_proviruses import find_regions
from virnucpro.workflows.predict_options import PredictOptions, RegionsOptions
from virnucpro.workflows.work_share import work

SUFFIXES = ["_chunk_1", "_chunk_2", "_piece_1", "|provirus_1_9", "|whole_3_9", "_2", "F1", "_3"]
composed = st.lists(st.sampled_from(["a", "b", *SUFFIXES]), min_size=1).map("".join)


def records_of(ids: Sequence[str], own_ids: Sequence[str] = ()) -> Records:
    own = own_ids or [""] * len(ids)
    each = zip(ids, own, strict=True)
    return Records.from_records(
        FastaRecord(name, name, "ACGT", own_id=file_id) for name, file_id in each
    )


# Rules


@given(st.sets(composed, min_size=1, max_size=40))
@example({"a", "a_chunk_1", "a_chunk_1F1", "a_chunk_1_2", "a_chunk_1_2R3", "a_chunk_1_chunk_1"})
@example({"a", "a|provirus_1_9", "a|provirus_1_9_2", "a|provirus_1_9|provirus_1_9"})
def test_derived_names_are_unique_and_no_ids(ids: set[str]) -> None:
    taken = find_taken_names([records_of(sorted(ids))])
    derived = list[str]()
    for name in ids:
        for suffix in ("_piece_1", "|provirus_1_9", "|whole_3_9"):
            derived.append(name + taken.free_suffix([name], suffix))
        for suffix in ("_chunk_1", "_chunk_2"):
            chunk = name + taken.free_suffix([name], suffix, FRAME_ENDINGS)
            derived += [chunk + ending for ending in FRAME_ENDINGS]
    assert len(set(derived)) == len(derived)
    assert not ids.intersection(derived)
    assert all(original_name(name) in ids for name in derived)


@given(st.sets(composed, min_size=1, max_size=40))
def test_names_are_numbered_only_if_an_id_has_them(ids: set[str]) -> None:
    taken = find_taken_names([records_of(sorted(ids))])
    assert bool(taken) == any(original_name(name) in ids for name in ids)
    for name in ids:
        suffix = taken.free_suffix([name], "_piece_1")
        assert (suffix == "_piece_1") == (f"{name}_piece_1" not in ids)
        if suffix != "_piece_1":
            assert taken.concern([name]).all()


@given(st.sets(composed, min_size=2, max_size=20))
def test_taken_names_depend_on_ids_alone(ids: set[str]) -> None:
    ordered = sorted(ids)
    whole = find_taken_names([records_of(ordered)])
    parts = find_taken_names([records_of(ordered[1:][::-1]), records_of(ordered[:1])])
    assert whole.names.tolist() == parts.names.tolist()
    assert whole.key == parts.key


def test_ids_in_files_take_names_too() -> None:
    taken = find_taken_names([records_of(["f:a", "g:b"], ["a", "a_piece_1"])])
    assert taken.free_suffix(["f:a", "a"], "_piece_1") == "_piece_1_2"


@given(composed)
def test_number_of_a_derived_name_can_be_removed(name: str) -> None:
    for suffix in ("_chunk_1", "_piece_7", "|whole_3_9"):
        assert without_number(f"{name}{suffix}_12") == f"{name}{suffix}"
        assert without_number(f"{name}{suffix}") == f"{name}{suffix}"
    assert without_number(f"{name}_chunk_1_2R3") == f"{name}_chunk_1R3"


@given(st.text("_|chunkpieovrwls1\n>A", max_size=60), st.lists(st.integers(0, 60), max_size=6))
@example("A" * 20 + "|provirus_1_9", [24])
def test_scan_finds_words_across_blocks(text: str, cuts: list[int]) -> None:
    data = text.encode()
    bounds = [0, *sorted(cuts), 60]
    scan = DerivedNameScan()
    for first, end in pairwise(bounds):
        scan.scan(data[first:end])
    words = (b"_chunk_", b"_piece_", b"|provirus_", b"|whole_")
    assert scan.has_found == any(word in data for word in words)


@pytest.mark.parametrize("word", ["_chunk_", "_piece_", "|provirus_", "|whole_"])
def test_scan_finds_a_word_among_many_like_it(word: str) -> None:
    others = (word[:-1] + "X") * 300
    for text, is_there in ((others, False), (others + word, True), (others + word[:-1], False)):
        scan = DerivedNameScan()
        scan.scan(text.encode())
        assert scan.has_found == is_there


# Runs of the scorer


REGION = "|provirus_"


@pytest.fixture(scope="module")
def genomes() -> dict[str, str]:
    rng = np.random.default_rng(11)
    host = host_dna(120_000, rng)
    return {
        "ctg": host[:60_000] + phage_dna(30_000, rng) + host[60_000:],
        "small": random_dna(700, rng),
    }


@pytest.fixture(scope="module")
def takers(genomes, tmp_path_factory) -> dict[str, str]:
    """Make records whose ids are the names of a region and of pieces of ``genomes``."""
    folder = tmp_path_factory.mktemp("plain")
    predict(write(folder / "in.fa", **genomes), to=folder / "run", report=False)
    (row,) = rows(folder / "run/viruses.tsv")
    assert row["virus"].startswith(f"ctg{REGION}")
    pieces = {row["Sequence_ID"] for row in rows(folder / "run/prediction_results.txt")}
    assert {"small_piece_1", "ctg_piece_1"} <= pieces
    rng = np.random.default_rng(5)
    ids = [row["virus"], f"{row['virus']}_2", "small_piece_1", "ctg_piece_1"]
    return {name: phage_dna(11_000 + i, rng) for i, name in enumerate(ids)}


def derived_names(run: Path) -> list[list[str]]:
    """Return the names in each file of a run. They must be unique in their file."""
    found = [
        [row["virus"] for row in rows(run / "viruses.tsv")],
        [record.id for record in read_fasta(run / "viruses.fasta")],
        [row["region"] for row in rows(run / "regions.tsv")],
        [record.id for record in read_fasta(run / "regions.fasta")],
        [line.split("\t")[3] for line in (run / "regions.bed").read_text().splitlines()],
        [row["Sequence_ID"] for row in rows(run / "prediction_results.txt")],
        [row["Modified_ID"] for row in rows(run / "prediction_results_highestscore.csv")],
    ]
    for names in found:
        assert len(set(names)) == len(names)
    assert found[0] == found[1]
    assert found[2] == found[3] == found[4]
    return found


def assert_unique(run: Path, ids: set[str]) -> None:
    """Check that no derived name is the id of another record."""
    viruses, _, *others = derived_names(run)
    made = [
        row["virus"]
        for row in rows(run / "viruses.tsv")
        if not row["virus"].endswith(row["record"])
    ]
    assert made, "the run has a provirus"
    assert set(made) <= set(viruses)
    assert ids.isdisjoint(made)
    assert ids.isdisjoint(chain.from_iterable(others))


def test_ids_before_and_behind_take_the_same_names(tmp_path, genomes, takers) -> None:
    behind = write(tmp_path / "behind.fa", **genomes, **takers)
    before = write(tmp_path / "before.fa", **takers, **genomes)
    runs = [tmp_path / "behind", tmp_path / "before"]
    for fasta, run in zip((behind, before), runs, strict=True):
        predict(fasta, to=run)
        assert_unique(run, {*genomes, *takers})
    names = [{*chain.from_iterable(derived_names(run))} for run in runs]
    assert names[0] == names[1]
    region = next(iter(takers))
    assert region.startswith(f"ctg{REGION}")
    assert f"{region}_3" in names[0], "the number 2 is taken as well"
    assert {"small_piece_1_2", "small_piece_2", "ctg_piece_1_2", "ctg_piece_2"} <= names[0]


def test_names_of_other_runs_are_unchanged(tmp_path, genomes) -> None:
    others = {"x|provirus_1_9": "ACGT" * 50, "ctg_piece_01": "ACGT" * 50}
    predict(write(tmp_path / "in.fa", **genomes, **others), to=tmp_path / "run")
    names = {*chain.from_iterable(derived_names(tmp_path / "run"))}
    assert {"ctg_piece_1", "small_piece_1"} <= names
    assert without_number(min(names)) == min(names)


def test_helpers_and_kept_scores_derive_the_same_names(
    tmp_path, monkeypatch, genomes, takers
) -> None:
    fasta = write(tmp_path / "in.fa", **genomes, **takers)
    predict(fasta, to=tmp_path / "expected")
    in_blocks(monkeypatch, 20_000)
    predict(fasta, to=tmp_path / "run", workers=2)
    assert outputs(tmp_path / "run") == outputs(tmp_path / "expected")
    predict(fasta, to=tmp_path / "run", resume=True)
    assert outputs(tmp_path / "run") == outputs(tmp_path / "expected")


def test_added_file_takes_names(tmp_path, genomes, takers) -> None:
    first = write(tmp_path / "a.fa", **genomes)
    second = write(tmp_path / "b.fa", **takers)
    predict(first, second, to=tmp_path / "expected", per_file=True)
    assert_unique(tmp_path / "expected", {*genomes, *takers})
    predict(first, to=tmp_path / "run", per_file=True)
    region = next(iter(takers))
    assert region in derived_names(tmp_path / "run")[0]
    predict(first, second, to=tmp_path / "run", per_file=True, resume=True, add=True)
    for folder in ("", "samples/a", "samples/b"):
        expected = tmp_path / "expected" / folder
        assert outputs(tmp_path / "run" / folder) == outputs(expected)


def test_names_with_file_are_unique_for_each_file(tmp_path, genomes, takers) -> None:
    """Both files have all ids, and a third one has ids such as ``a:ctg``."""
    files = [write(tmp_path / f"{name}.fa", **genomes, **takers) for name in "ab"]
    third = write(tmp_path / "c.fa", **{f"a:{name}": bases for name, bases in takers.items()})
    predict(*files, third, to=tmp_path / "run", per_file=True)
    own = {*genomes, *takers, *(f"a:{name}" for name in takers)}
    ids = {f"{sample}:{name}" for sample in "ab" for name in (*genomes, *takers)}
    ids |= {f"c:a:{name}" for name in takers}
    assert_unique(tmp_path / "run", ids | own)
    for sample in "ab":
        assert_unique(tmp_path / f"run/samples/{sample}", own)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_shares_of_work_derive_the_same_names(tmp_path, genomes, takers, pack) -> None:
    text = write(tmp_path / "text.fa", **genomes, **takers).read_bytes()
    fasta = tmp_path / "in.fa"
    fasta.write_bytes(pack(text))
    predict(fasta, to=tmp_path / "expected")
    predict(fasta, to=tmp_path / "run", plan_only=True)
    for part in ("2/2", "1/2"):
        work(WorkOptions(folder=tmp_path / "run", part=part), lambda _: None)
    assert list((tmp_path / "run/rows").glob("*.rows"))
    predict(fasta, to=tmp_path / "run", resume=True)
    assert outputs(tmp_path / "run") == outputs(tmp_path / "expected")


def test_regions_command_derives_the_same_names(tmp_path, genomes, takers) -> None:
    fasta = write(tmp_path / "in.fa", **genomes, **takers)
    predict(fasta, to=tmp_path / "expected")
    predict(fasta, to=tmp_path / "run", regions=False)
    find_regions(RegionsOptions(folder=tmp_path / "run", argv=()), lambda _: None)
    assert outputs(tmp_path / "run") == outputs(tmp_path / "expected")


def test_cut_without_the_input_derives_the_same_names(tmp_path, genomes, takers) -> None:
    fasta = write(tmp_path / "in.fa", **genomes, **takers)
    predict(fasta, to=tmp_path / "run", preset="sensitive")
    predict(fasta, to=tmp_path / "expected", preset="default")
    fasta.unlink()
    predict(fasta, to=tmp_path / "run", preset="default", resume=True)
    assert outputs(tmp_path / "run") == outputs(tmp_path / "expected")
    assert_unique(tmp_path / "run", {*genomes, *takers})


def test_run_of_an_earlier_version_gets_unique_names(tmp_path, genomes, takers) -> None:
    """Its ``run.json`` does not say whether ids look like derived names."""
    fasta = write(tmp_path / "in.fa", **genomes, **takers)
    predict(fasta, to=tmp_path / "run")
    expected = outputs(tmp_path / "run")
    stored = json.loads((tmp_path / "run/run.json").read_text())
    del stored["inputs"][0]["may_have_derived_names"]
    write_run_json(tmp_path / "run", stored)
    away = fasta.rename(tmp_path / "away.fa")
    predict(fasta, to=tmp_path / "run", resume=True)
    assert outputs(tmp_path / "run") == expected
    away.rename(fasta)
    predict(fasta, to=tmp_path / "run", resume=True)
    assert outputs(tmp_path / "run") == expected


def test_numbered_repeats_take_names(tmp_path, genomes) -> None:
    """The second of two records ``small_piece`` becomes ``small_piece_2``."""
    lines = [f">{name}\n{bases}\n" for name, bases in genomes.items()]
    lines += [f">small_piece\n{'ACGT' * 50}\n" for _ in range(2)]
    (tmp_path / "in.fa").write_text("".join(lines))
    predict(tmp_path / "in.fa", to=tmp_path / "run", rename_duplicates=True)
    assert [row["record"] for row in rows(tmp_path / "run/predictions.tsv")][-1] == "small_piece_2"
    assert_unique(tmp_path / "run", {*genomes, "small_piece", "small_piece_2"})


# Runs with a model


@pytest.fixture
def contigs() -> dict[str, str]:
    rng = np.random.default_rng(2)
    return {f"c{i}": open_dna(700, rng) for i in range(6)}


@pytest.fixture
def clashing() -> dict[str, str]:
    rng = np.random.default_rng(3)
    ids = ["c1_chunk_1", "c2_chunk_2F1", "c2_chunk_2_2R3", "c3_piece_1"]
    return {name: open_dna(650, rng) for name in ids}


def test_frames_and_vectors_have_unique_names(tmp_path, make_config, tiny, contigs, clashing):
    fasta = write(tmp_path / "in.fa", **contigs, **clashing)
    config = make_config(fasta, keep_intermediate=True)
    run_inline(config, tiny.head)
    ids = {*contigs, *clashing}
    frames = [row["Sequence_ID"] for row in rows(config.output / "prediction_results.txt")]
    vector_ids = vectors(config.output)
    chunks = [record.id for record in read_fasta(config.output / "chunks.fa")]
    assert {*frames} == {*vector_ids}
    assert len({*frames, *chunks}) == len(frames) + len(chunks)
    assert ids.isdisjoint([*frames, *chunks])
    assert {"c1_chunk_1_2", "c2_chunk_2_3", "c1_chunk_2", "c3_chunk_1"} <= {*chunks}
    assert all(original_name(name) in ids for name in frames)


def test_added_file_embeds_only_taken_names(tmp_path, make_config, tiny, contigs, clashing):
    first = write(tmp_path / "a.fa", **contigs)
    second = write(tmp_path / "b.fa", **clashing)
    whole = make_config(first, second, output=tmp_path / "whole")
    n_whole = run_inline(whole, tiny.head).n_tokens
    config = make_config(first, residues_per_shard=500)
    n_first = run_inline(config, tiny.head).n_tokens
    resumed = again(config, input=(first, second), resume=True, add=True)
    n_second = run_inline(resumed, tiny.head).n_tokens
    assert n_whole - n_first < n_second < n_whole
    assert tables(config.output) == tables(whole.output)
    assert vectors(config.output).keys() == vectors(whole.output).keys()


def test_parts_derive_the_same_names(tmp_path, make_config, tiny, contigs, clashing):
    fasta = write(tmp_path / "in.fa", **contigs, **clashing)
    options = {"model": str(tiny.model), "head": tiny.head_file, "device": "cpu"}
    common = {"precision": "fp32", "report": False, **options}

    def run(to: Path, **changes: object) -> None:
        made = PredictOptions(input=(fasta,), output_dir=to, **common, **changes)
        execute(made, lambda _: None, lambda _: InlineExecutor())

    run(tmp_path / "expected")
    run(tmp_path / "run", plan_only=True)
    for part in ("2/2", "1/2"):
        share = WorkOptions(folder=tmp_path / "run", part=part, device="cpu", workers=1)
        work(share, lambda _: None, lambda _: InlineExecutor())
    run(tmp_path / "run", resume=True)
    assert tables(tmp_path / "run") == tables(tmp_path / "expected")
    assert vectors(tmp_path / "run").keys() == vectors(tmp_path / "expected").keys()


def test_training_finds_vectors_under_numbered_names(
    tmp_path, make_config, contigs, clashing
) -> None:
    records = {**contigs, **clashing}
    fasta = write(tmp_path / "in.fa", **records)
    config = make_config(fasta, command="extract")
    run_inline(config, None)
    labelled = [
        (LabelledRecord(name, is_virus=True, group="g"), FastaRecord(name, name, bases))
        for name, bases in records.items()
    ]
    write_frames(tmp_path / "frames", labelled, [300])
    link_vectors(tmp_path / "frames", config.output)
    ids = read_ids(tmp_path / "frames")
    by_frame = {without_number(name): row for name, row in vectors(config.output).items()}
    assert "c1_chunk_1F1" in ids
    assert "c1_chunk_1_2F1" in vectors(config.output)
    found = FrameStore.open(tmp_path / "frames").all.vectors(np.arange(len(ids)))
    assert found.tolist() == [by_frame[name].tolist() for name in ids]
