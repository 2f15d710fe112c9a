"""Runs with many files: each is a sample, ids may repeat, and a bad file does not stop the run."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import faulty_workers
import numpy as np
import pytest
import yaml
from conftest import open_dna, random_dna
from open_counter import counted_opens
from run_helpers import (
    assert_same_run,
    assert_same_vectors,
    rows,
    run_inline,
    tables,
    vectors,
    write_fasta,
)
from scorer_run_helpers import predict

from virnucpro.cli.progress import counts_of, line_of
from virnucpro.core.errors import InputError, InputMissingError
from virnucpro.core.events import EmbeddingStarted, ShardDone
from virnucpro.core.safe_dir import SafeDir
from virnucpro.engine.local import InlineExecutor
from virnucpro.engine.progress import ProgressState
from virnucpro.results.counts import RecordCounts
from virnucpro.results.outputs import RunOutput
from virnucpro.results.sample_tables import LAST_LINES, OutputDir
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.input_scan import InputScan
from virnucpro.sequences.inputs import InputFile
from virnucpro.workflows.status import inspect_run, measure_run

POISON = "TGG" * 4 + "TGC" + "TGG" * 4
MENDED = "GCA" * 9
BAD = {
    "truncated.fa.gz": "cannot be decompressed",
    "junk.fa": "this is a binary file",
    "twice.fa": "occurs twice",
    "protein.fa": "contains proteins",
    "gone.fa": "No such file",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four assemblies that each number their contigs from 1."""
    folder = tmp_path / "assemblies"
    folder.mkdir()
    rng = np.random.default_rng(1)
    for name in "abcd":
        contigs = [f">contig_{i} of {name}\n{open_dna(400, rng)}\n" for i in range(1, 6)]
        (folder / f"{name}.fa").write_text("".join(contigs))
    return folder


@pytest.fixture
def bad(folder: Path) -> Path:
    """The same, and files that are unreadable for different reasons."""
    packed = gzip.compress((folder / "a.fa").read_bytes())
    (folder / "truncated.fa.gz").write_bytes(packed[:-100])
    (folder / "junk.fa").write_bytes(b"\x7fELF\0\0" * 100)
    (folder / "twice.fa").write_text(">x\nACGT\n>y\nACGT\n>x\nACGT\n")
    (folder / "protein.fa").write_text(">p\nMKVLEFPQILAAGG\n")
    (folder / "gone.fa").symlink_to("nowhere.fa")
    return folder


def keys(folder: Path) -> list[tuple[str, str]]:
    return [(row["file"], row["record"]) for row in rows(folder / "predictions.tsv")]


def failed_files(folder: Path) -> dict[str, tuple[str, str]]:
    lines = (folder / "failed_files.txt").read_text().splitlines()
    found = [line.split("|", 2) for line in lines]
    assert found == sorted(found)
    return {path: (stage, error) for path, stage, error in found}


# Ids


def test_equal_ids_get_their_file_names(predicted, folder):
    output = predicted(folder)
    assert keys(output) == [(n, f"contig_{i}") for n in "abcd" for i in range(1, 6)]
    ids = {f"{name}:contig_{i}" for name in "abcd" for i in range(1, 6)}
    assert {name.rsplit("_chunk_", 1)[0] for name in vectors(output)} == ids
    frames = rows(output / "prediction_results.txt")
    assert {row["Sequence_ID"].rsplit("_chunk_", 1)[0] for row in frames} == ids
    headers = [record.header for record in read_fasta(output / "viral.fasta")]
    viral = [row for row in rows(output / "predictions.tsv") if row["call"] == "virus"]
    assert headers == [f"{row['file']}:{row['record']} of {row['file']}" for row in viral]
    assert (
        "files share ids: ids of this run begin with their sample"
        in (output / "virnucpro.log").read_text()
    )


def test_each_file_has_its_own_results(predicted, folder, tmp_path):
    together = predicted(folder)
    found = vectors(together)
    for name in "ad":
        alone = predicted(folder / f"{name}.fa", output=tmp_path / name)
        mine = [row for row in rows(together / "predictions.tsv") if row["file"] == name]
        assert mine == rows(alone / "predictions.tsv")
        for frame, vector in vectors(alone).items():
            assert np.array_equal(found[f"{name}:{frame}"], vector)


def test_resumed_run_keeps_its_ids(predicted, make_config, tiny, folder, tmp_path):
    first = predicted(folder / "a.fa")
    before = tables(first)
    with pytest.raises(InputError, match="contig_1 occurs twice") as caught:
        predicted(folder / "b.fa", resume=True, add=True)
    assert "--force" in caught.value.hint
    assert run_inline(make_config(folder / "a.fa", resume=True, add=True), tiny.head).n_tokens == 0
    assert tables(first) == before

    both = predicted(folder / "a.fa", folder / "b.fa", output=tmp_path / "both")
    rng = np.random.default_rng(9)
    other = tmp_path / "other.fa"
    other.write_text(f">unlike\n{open_dna(400, rng)}\n>contig_1\n{open_dna(400, rng)}\n")
    predicted(other, output=both, resume=True, add=True)
    assert keys(both)[-2:] == [("other", "unlike"), ("other", "contig_1")]
    assert "other:unlike_chunk_1F1" in vectors(both)


def test_interleaved_pairs_get_numbers(predicted, tmp_path):
    rng = np.random.default_rng(2)
    reads = tmp_path / "reads.fa"
    ids = [f"pair{i // 2}" for i in range(10)]
    reads.write_text("".join(f">{name} x\n{open_dna(150, rng)}\n" for name in ids))
    with pytest.raises(InputError, match="occurs twice"):
        predicted(reads)
    output = predicted(reads, rename_duplicates=True)
    found = [row["record"] for row in rows(output / "predictions.tsv")]
    assert found == [name for i in range(5) for name in (f"pair{i}", f"pair{i}_2")]
    assert "numbered 5 records with a repeated id" in (output / "virnucpro.log").read_text()
    before = tables(output)
    shutil.rmtree(output / "features")
    predicted(reads, resume=True)
    assert tables(output) == before


# Files that cannot be read


def test_unreadable_files_are_listed(predicted, make_config, tiny, bad, tmp_path):
    config = make_config(bad)
    summary = run_inline(config, tiny.head)
    assert summary.exit_code == 2
    assert "failed: 5 of 9 files: see " in "\n".join(summary.lines(config.output))
    text = "\n".join(replace(summary, n_refused=1).lines(config.output))
    assert "  fix it or remove it from the command," in text
    figures = measure_run(config.output)
    assert figures["state"] == "partial" and figures["remaining_seconds"] == 0
    assert figures["shards"]["total"] == figures["shards"]["done"] > 0
    assert figures["shards"]["pending"] == 0 < figures["tokens"]["total"]
    assert figures["records"]["scored"] == summary.records.statuses["scored"]
    assert len(figures["unread"]) == len(BAD) and "damaged" not in figures
    listed = failed_files(config.output)
    assert {path: stage for path, (stage, _) in listed.items()} == {
        str(bad / name): "read" for name in BAD
    }
    for name, message in BAD.items():
        assert message in listed[str(bad / name)][1]
    good = predicted(*(bad / f"{name}.fa" for name in "abcd"), output=tmp_path / "good")
    assert tables(config.output) == tables(good)
    assert_same_vectors(vectors(config.output), vectors(good))


def test_failed_file_is_listed_with_a_remedy(predicted, bad):
    (bad / "repeats.fa").write_text(f">a\n{'ACG' * 60}\n>a\n{'ACC' * 60}\n")
    output = predicted(bad, exit_code=2)
    log = (output / "virnucpro.log").read_text().splitlines()
    (warning,) = [line for line in log if "repeats.fa:3: the id a occurs twice" in line]
    assert "skipped an unreadable file" in warning and "add --rename-duplicates" in warning


def test_links_and_empty_files_stop_nothing(predicted, folder):
    (first, *_) = sorted(folder.glob("*.fa"))
    (folder / "0_link.fa").symlink_to(first)
    (folder / "z_link.fa").symlink_to(first)
    (folder / "nothing.fa").touch()
    for name in ("notes.txt", "reads.sra", *(f"{i}.log" for i in range(7))):
        (folder / name).write_text("x")
    (folder / "more").mkdir()
    (folder / "results").mkdir()
    (folder / "results" / "run.json").touch()
    (folder / "locked").mkdir(mode=0)
    output = predicted(folder)
    log = (output / "virnucpro.log").read_text()
    assert log.count("is the same file as") == 2
    assert "nothing.fa has no records" in log
    assert f"{folder}: sub-folders are not searched (locked, more); name each with --input" in log
    (line,) = (line for line in log.splitlines() if "without a FASTA or FASTQ suffix" in line)
    assert "skipped 9 files" in line and f"in {folder}:" in line and "+ 4 more" in line
    inputs = json.loads((output / "run.json").read_text())["inputs"]
    assert len(inputs) == len({os.path.realpath(path) for path in folder.glob("*.fa")})
    assert (inputs[0]["sample"], inputs[0]["name"]) == (first.stem, "")  # not those of the link


def test_strict_run_ends_at_first_bad_file(make_config, tiny, bad):
    config = make_config(bad, strict=True)
    with pytest.raises(InputMissingError, match=r"gone\.fa: No such file"):
        run_inline(config, tiny.head)
    assert not (config.output / "run.json").exists()


def test_run_without_readable_input_ends(predicted, bad):
    with pytest.raises(InputError, match=r"junk\.fa"):
        predicted(bad / "junk.fa", bad / "twice.fa")


def test_path_with_a_bar_in_failed_files(predicted, folder):
    (folder / "x|read|y.fa").write_text("no FASTA")
    output = predicted(folder, exit_code=2)
    ((path, (stage, error)),) = failed_files(output).items()
    assert (path, stage) == (str(folder / r"x\x7cread\x7cy.fa"), "read")
    assert "x|read|y.fa:1: expected '>'" in error


def test_repaired_files_are_taken_on_resume(predicted, make_config, tiny, bad, tmp_path):
    output = predicted(bad, exit_code=2)
    before = tables(output), failed_files(output)
    again = run_inline(make_config(bad / "a.fa", resume=True), tiny.head)
    assert (again.exit_code, again.n_tokens) == (2, 0)
    assert (tables(output), failed_files(output)) == before

    mended = (bad / "a.fa").read_bytes() + b"\n"  # the same bytes would not be added
    (bad / "truncated.fa.gz").write_bytes(gzip.compress(mended))
    for name in ("twice.fa", "gone.fa"):
        (bad / name).unlink()
    predicted(bad, resume=True, exit_code=2)
    log = (output / "virnucpro.log").read_text()
    for name in ("twice.fa", "gone.fa"):
        assert f"WARNING {bad / name} no longer exists; dropped from this run" in log
    assert f"WARNING added to this run: {bad / 'truncated.fa.gz'}" in log
    assert f"resuming the run in {output}; finished work is kept" in log
    assert set(failed_files(output)) == {str(bad / "junk.fa"), str(bad / "protein.fa")}
    assert keys(output)[-5:] == [("truncated", f"contig_{i}") for i in range(1, 6)]
    for name in ("junk.fa", "protein.fa"):
        (bad / name).unlink()
    predicted(bad, resume=True)
    assert not (output / "failed_files.txt").exists()
    whole = predicted(
        *(bad / f"{name}.fa" for name in "abcd"), bad / "truncated.fa.gz", output=tmp_path / "whole"
    )
    assert tables(output) == tables(whole)
    assert_same_vectors(vectors(output), vectors(whole))


def test_unreadable_file_may_be_left_out(predicted, make_config, tiny, bad):
    good = [bad / f"{name}.fa" for name in "abcd"]
    output = predicted(*good, bad / next(iter(BAD)), exit_code=2)
    before = tables(output)
    fewer = run_inline(make_config(*good[:2], resume=True), tiny.head)
    assert fewer.exit_code == 2 and failed_files(output)
    log = (output / "virnucpro.log").read_text()
    assert f"{good[2]} and 1 other file stay in this run although not named again" in log
    left_out = f"WARNING {bad / next(iter(BAD))} was not named again; dropped from this run"
    assert left_out not in log
    predicted(*good, resume=True)
    assert left_out in (output / "virnucpro.log").read_text()
    assert not (output / "failed_files.txt").exists() and tables(output) == before


def test_repaired_link_target_is_enough(predicted, make_config, tiny, bad):
    link = bad.parent / "sample.fa"
    link.symlink_to(bad / "junk.fa")
    files = bad / "a.fa", link
    predicted(*files, exit_code=2)
    link.unlink()
    link.symlink_to(bad / "b.fa")
    config = make_config(*files, resume=True)
    (bad / "b.fa").write_text((bad / "b.fa").read_text().replace(">contig", ">other"))
    assert run_inline(config, tiny.head).exit_code == 0
    assert not (config.output / "failed_files.txt").exists()


def test_new_file_with_equal_content_is_reported(predicted, folder):
    output = predicted(folder / "a.fa")
    shutil.copy(folder / "a.fa", folder / "copy.fa")
    predicted(folder / "a.fa", folder / "copy.fa", resume=True)
    log = (output / "virnucpro.log").read_text()
    assert f"{folder / 'copy.fa'} has the same content as an input of this run" in log


def test_files_with_equal_content_are_named(predicted, folder):
    shutil.copy(folder / "a.fa", folder / "copy.fa")
    log = (predicted(folder) / "virnucpro.log").read_text()
    both = f"{folder / 'a.fa'} and {folder / 'copy.fa'} have the same content"
    assert log.count("have the same content") == log.count(both) == 1


def test_copies_of_a_file_are_counted_once(predicted, folder):
    for name in "copy.fa", "copy2.fa":
        shutil.copy(folder / "a.fa", folder / name)
    for name in "empty.fa", "empty2.fa":
        (folder / name).touch()
    log = (predicted(folder) / "virnucpro.log").read_text()
    copies = f"{folder / 'a.fa'} and {folder / 'copy.fa'} + 1 more have the same content"
    assert f"{copies}: each record counts 3 times" in log
    assert log.count("have the same content") == 1


def test_ids_of_a_truncated_file_count(predicted, folder):
    for name in "bcd":
        (folder / f"{name}.fa").unlink()
    long = folder / "long.fa.gz"
    bases = random_dna(1_200_000, np.random.default_rng(5))  # more than is read at once
    packed = gzip.compress(f">contig_1\n{'ACGT' * 100}\n>contig_2\n{bases}\n".encode())
    long.write_bytes(packed[:-100])
    output = predicted(folder, chunk_size=10_000, exit_code=2)
    long.write_bytes(gzip.compress((folder / "a.fa").read_bytes() + b"\n"))
    predicted(folder, chunk_size=10_000, resume=True)
    assert {file for file, _ in keys(output)} == {"a", "long"}


def test_results_of_other_runs_are_skipped(predicted, folder):
    before = predicted(folder)
    (folder / "viral.fasta").write_bytes((before / "viral.fasta").read_bytes())
    (folder / "run.json").write_bytes((before / "run.json").read_bytes())
    output = predicted(folder, output=folder.parent / "second")
    assert keys(output) == keys(before)


# Tables of each file


def sample_files(folder: Path) -> dict[str, bytes]:
    samples = folder / "samples"
    return {
        path.relative_to(samples).as_posix(): path.read_bytes() for path in samples.rglob("*.*")
    }


def test_each_file_has_its_tables_in_a_folder(predicted, folder):
    (folder / "empty.fa").write_text("")
    output = predicted(folder, per_file=True)
    found = sample_files(output)
    files = {*tables(output), "miuvig.tsv"}
    gene_files = {"genes.tsv", "genes.gff3", "proteins.faa"}  # only where there is a virus
    expected = {f"{name}/{file}" for name in (*"abcd", "empty") for file in files}
    assert set(found) == expected | {f"{name}/{file}" for name in "abcd" for file in gene_files}
    for table, whole in tables(output).items():
        parts = [found[f"{name}/{table}"] for name in (*"abcd", "empty")]
        n_header = 0 if table.endswith(".fasta") else 1
        lines = [line for part in parts for line in part.splitlines()[n_header:]]
        # in the run the ids have the name of the file before them
        own = [re.sub(rb"^(>?)[a-d]:", rb"\1", line) for line in whole.splitlines()[n_header:]]
        assert lines == own
        assert all(part.splitlines()[:n_header] == whole.splitlines()[:n_header] for part in parts)


def test_tables_per_file_follow_resume_and_force(predicted, folder):
    output = predicted(folder, per_file=True)
    before = sample_files(output)
    (output / "samples" / "a" / "viral.fasta").write_text("damaged")
    (output / "samples" / "a" / "notes.md").write_text("mine")
    predicted(folder, resume=True)
    assert sample_files(output) == {**before, "a/notes.md": b"mine"}
    predicted(folder, force=True)
    assert sample_files(output) == {"a/notes.md": b"mine"}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="it lists open files")
def test_many_files_need_few_open_ones(make_config, tiny, tmp_path):
    folder = tmp_path / "many"
    rng = np.random.default_rng(4)
    folder.mkdir()
    for i in range(100):
        (folder / f"s{i:03d}.fa").write_text(f">contig_1\n{open_dna(60, rng)}\n")
    config = make_config(folder, per_file=True, residues_per_shard=200)
    n_open: list[int] = []

    def count(_: object) -> None:
        n_open.append(sum(1 for _ in Path("/proc/self/fd").iterdir()))

    count(None)
    run_inline(config, tiny.head, count)
    files = {*tables(config.output), "miuvig.tsv"}
    expected = {f"s{i:03d}/{file}" for i in range(100) for file in files}
    assert sample_files(config.output).keys() == expected
    assert max(n_open) - n_open[0] < 60


# Sequences that fail


def poisoned(folder: Path) -> Path:
    for name in "bc":
        path = folder / f"{name}.fa"
        first, bases, *rest = path.read_text().split("\n")
        path.write_text("\n".join([first, f"{POISON}{bases}", *rest]))
    return folder


def test_repaired_sequences_come_last(predicted, make_config, tiny, folder, tmp_path):
    config = make_config(poisoned(folder), per_file=True)
    executor = InlineExecutor(worker=faulty_workers.RaisingWorker)
    assert run_inline(config, tiny.head, executor=executor).exit_code == 2
    listed = failed_files(config.output)
    assert set(listed) == {str(folder / "b.fa"), str(folder / "c.fa")}
    assert all(stage == "embed" for stage, _ in listed.values())
    failed = config.output / "failed_sequences.fa"
    assert [r.id for r in read_fasta(failed)] == ["b:contig_1", "c:contig_1"]
    failed.write_text(failed.read_text().replace(POISON, MENDED))
    summary = run_inline(make_config(failed, resume=True, add=True), tiny.head, executor=executor)
    assert summary.exit_code == 0
    for name in "bc":
        path = folder / f"{name}.fa"
        path.write_text(path.read_text().replace(POISON, MENDED))
    whole = predicted(folder, output=tmp_path / "whole", per_file=True)
    mended = by_id(config.output)
    expected = by_id(whole)
    assert mended == expected and len(mended) == len(rows(config.output / "predictions.tsv"))
    assert list(mended)[-2:] == ["b:contig_1", "c:contig_1"]
    assert_same_vectors(vectors(config.output), vectors(whole))
    own = rows(config.output / "samples/failed_sequences/predictions.tsv")
    assert [row["record"] for row in own] == ["b:contig_1", "c:contig_1"]


def by_id(folder: Path) -> dict[str, tuple[str, str]]:
    """Return status and score of each record, by its id in a run of several files."""
    return {
        row["record"] if ":" in row["record"] else f"{row['file']}:{row['record']}": (
            row["status"],
            row["virus_score"],
        )
        for row in rows(folder / "predictions.tsv")
    }


def test_called_record_with_failed_frame_is_repaired(make_config, tiny, folder, tmp_path):
    a = folder / "a.fa"
    first, bases, *rest = a.read_text().split("\n")
    a.write_text("\n".join([first, f"{POISON}{bases * 3}", *rest]))
    config = make_config(a)
    executor = InlineExecutor(worker=faulty_workers.RaisingWorker)
    summary = run_inline(config, tiny.head, executor=executor)
    assert summary.exit_code == 2 and not summary.records.statuses["failed"]
    row = rows(config.output / "predictions.tsv")[0]
    assert row["status"] == "scored" and row["call"]
    assert row["note"].startswith("1 of ") and "frames failed" in row["note"]
    failed = config.output / "failed_sequences.fa"
    assert [record.id for record in read_fasta(failed)] == ["contig_1"]
    failed.write_text(failed.read_text().replace(POISON, MENDED))
    mended = run_inline(make_config(failed, resume=True, add=True), tiny.head, executor=executor)
    assert mended.exit_code == 0
    assert rows(config.output / "predictions.tsv")[0]["note"] == ""


# What a user sees


def test_files_are_counted_as_their_shards_are_done(predicted, folder):
    figures = ProgressState()
    counts = []

    def hear(event: object) -> None:
        if isinstance(event, (EmbeddingStarted, ShardDone)):
            figures.update(event)
            counts.append(int(counts_of(figures)[-1].removesuffix("/4 files")))

    predicted(folder, on_event=hear)
    assert counts[0] == 0 and counts[-1] == 4
    assert counts == sorted(counts) and len(set(counts)) > 2
    assert "4/4 files" in line_of(figures)


def test_status_of_a_thousand_files_fits_a_screen(predicted, bad):
    for i in range(300):
        (bad / f"s{i}.fa").write_text(">contig_1\nACGT\n")
    output = predicted(bad, exit_code=2)
    lines = inspect_run(output, verify=False)[0]
    assert len(lines) < 24
    assert any("+ 296 more" in line for line in lines)
    assert lines[-1] == f"failed    see {output / 'failed_files.txt'}"
    assert sum(line.startswith("unread") for line in lines) == 5
    stored = json.loads((output / "run.json").read_text())
    assert stored["counts"]["n_files"] == 309 and stored["counts"]["n_refused"] == 5


# Inputs that change


@pytest.fixture
def slow_clock(monkeypatch) -> None:
    """Set the clock of this machine an hour behind that of the file server."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 3_600 * 10**9)


def at_first_shard(act: Callable[[], None]) -> Callable[[object], None]:
    def hear(event: object) -> None:
        if isinstance(event, ShardDone) and event.shard.index == 0:
            act()

    return hear


@pytest.mark.usefixtures("slow_clock")
def test_rewritten_input_is_noticed_despite_the_clock(make_config, tiny, contigs):
    changed = contigs.read_text().translate(str.maketrans("AC", "CA"))
    rewrite = at_first_shard(lambda: contigs.write_text(changed))
    config = make_config(contigs)
    with pytest.raises(InputError, match="changed during"):
        run_inline(config, tiny.head, rewrite)
    assert not (config.output / "viral.fasta").exists()


def test_input_swapped_by_folder_rename_is_noticed(make_config, tiny, folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        text = path.read_text().translate(str.maketrans("AC", "CA"))
        (other / path.name).write_text(text.replace(">Contig", ">contig"))

    def swap() -> None:
        folder.rename(tmp_path / "aside")
        other.rename(folder)

    config = make_config(folder)
    with pytest.raises(InputError, match="changed during"):
        run_inline(config, tiny.head, at_first_shard(swap))
    assert not (config.output / "viral.fasta").exists()


def test_touched_input_has_not_changed(predicted, folder, tmp_path):
    undisturbed = predicted(folder, output=tmp_path / "undisturbed")

    def touch() -> None:
        (folder / "a.fa").touch()
        shutil.copyfile(folder / "b.fa", tmp_path / "copy")
        (tmp_path / "copy").replace(folder / "b.fa")

    output = predicted(folder, on_event=at_first_shard(touch))
    assert_same_run(output, undisturbed)


def test_input_swapped_before_planning_is_noticed(predicted, folder):
    def swap(event: object) -> None:
        if getattr(event, "stage", "") == "hashing the input" and event.done == event.total:
            (folder / "b.fa").replace(folder / "a.fa")

    with pytest.raises(InputError, match=r"a\.fa changed while"):
        predicted(folder / "a.fa", on_event=swap)


# Reads


def as_fastq(path, mate: int = 0) -> str:
    """Return the records of a file as FASTQ reads. Mates have Casava headers."""
    reads = list(read_fasta(path))
    words = f" {mate}:N:0:ACGT" if mate else ""
    return "".join(f"@{r.id}{words}\n{r.sequence}\n+\n{len(r.sequence) * '@'}\n" for r in reads)


@pytest.fixture
def pairs(folder: Path, tmp_path: Path) -> Path:
    """Two samples of read pairs, each in two files, compressed and plain."""
    reads = tmp_path / "reads"
    reads.mkdir()
    for number, mate in ((1, "ab"), (2, "cd")):
        for sample, source in zip(("one", "two"), mate, strict=True):
            text = as_fastq(folder / f"{source}.fa", number).encode()
            (reads / f"{sample}_R{number}.fastq.gz").write_bytes(gzip.compress(text))
    return reads


def test_fastq_has_the_tables_of_fasta(make_config, tiny, folder, tmp_path):
    (tmp_path / "fastq").mkdir()
    for name in "abcd":
        (tmp_path / "fastq" / f"{name}.fq").write_text(as_fastq(folder / f"{name}.fa"))
    fasta = make_config(folder, output=tmp_path / "of_fasta", per_file=True)
    fastq = make_config(tmp_path / "fastq", output=tmp_path / "of_fastq", per_file=True)
    for config in (fasta, fastq):
        assert run_inline(config, tiny.head).exit_code == 0
    for name in ("predictions.tsv", "prediction_results.txt", "samples/c/predictions.tsv"):
        assert (fastq.output / name).read_bytes() == (fasta.output / name).read_bytes()
    assert vectors(fastq.output).keys() == vectors(fasta.output).keys()
    told = (fastq.output / "virnucpro.log").read_text()
    assert told.count("4 FASTQ files: qualities are ignored") == 1
    assert "qualities" not in (fasta.output / "virnucpro.log").read_text()


def test_read_pairs_are_one_sample(predicted, pairs):
    output = predicted(pairs, per_file=True)
    ids = [f"contig_{i}/{mate}" for mate in (1, 2) for i in range(1, 6)]
    assert keys(output) == [(name, own) for name in ("one", "two") for own in ids]
    assert {path.name for path in (output / "samples").iterdir()} == {"one", "two"}
    text = rows(output / "samples" / "one" / "predictions.tsv")
    assert [row["record"] for row in text] == ids
    samples = rows(output / "samples.tsv")
    assert [(row["file"], row["n_records"]) for row in samples] == [("one", "10"), ("two", "10")]
    assert all(len(row["path"].split("; ")) == 2 for row in samples)
    told = (output / "virnucpro.log").read_text()
    assert told.count("2 samples with read pairs in two files: one, two; ids end in /1 and /2") == 1
    before = tables(output)
    (output / "predictions.tsv").unlink()
    predicted(pairs, resume=True)
    assert tables(output) == before


def test_multiqc_counts_every_file(predicted, pairs):
    (pairs / "first.fq").touch()
    output = predicted(pairs, per_file=True)
    (pairs / "late.fq").write_text("\n")
    predicted(pairs, resume=True, add=True)
    lines = (output / "virnucpro_mqc.tsv").read_text().splitlines()
    facts = yaml.safe_load("\n".join(line[2:] for line in lines if line.startswith("# ")))
    names, *values = (line.split("\t") for line in lines if not line.startswith("#"))
    assert facts["plot_type"] == "generalstats" and list(facts["headers"]) == names[1:]
    samples = rows(output / "samples.tsv")
    assert values == [[row["file"], *(row[name] for name in names[1:])] for row in samples]
    expected = {"first": "empty", "one": "complete", "two": "complete", "late": "empty"}
    assert [(row["file"], row["status"]) for row in samples] == [*expected.items()]
    assert {path.name for path in (output / "samples").iterdir()} == expected.keys()


def test_multiqc_shows_families(tmp_path):
    names = [f"Family{number:02}viridae" for number in range(22)]
    counts = RecordCounts(families=Counter({name: 30 - n for n, name in enumerate(names)}))
    files = [InputFile(path=f"{name}.fa", sha256="", n_bytes=0, sample=name) for name in "ab"]
    output_dir = OutputDir(tmp_path, SafeDir(tmp_path), tmp_path, files)
    text = LAST_LINES[RunOutput.MULTIQC_FAMILIES](output_dir, {"a": counts, "b": RecordCounts()})
    lines = text.splitlines()
    facts = yaml.safe_load("\n".join(line[2:] for line in lines if line.startswith("# ")))
    assert (facts["plot_type"], facts["id"]) == ("bargraph", "virnucpro_families")
    header, *rows = (line.split("\t") for line in lines if not line.startswith("#"))
    assert header == ["Sample", *names[:20], "others"]
    assert rows == [["a", *(str(30 - n) for n in range(20)), "19"], ["b", *["0"] * 21]]
    assert not LAST_LINES[RunOutput.MULTIQC_FAMILIES](output_dir, {"a": RecordCounts()})


def test_unreadable_mate_makes_a_partial_sample(predicted, pairs):
    second = pairs / "one_R2.fastq.gz"
    second.write_bytes(second.read_bytes()[:-20])
    output = predicted(pairs, exit_code=2)
    names = ("file", "status", "n_records", "n_scored", "n_virus")
    found = [[row[name] for name in names] for row in rows(output / "samples.tsv")]
    assert [row[:3] for row in found[:2]] == [["one", "partial", "5"], ["two", "complete", "10"]]
    assert found[2:] == [["one", "unreadable", "0", "0", "0"]]


@pytest.mark.parametrize("cut", ["one_R1.fastq.gz", "one_R2.fastq.gz"])
@pytest.mark.parametrize("named", ["", "{cut}", "two_R1.fastq.gz"])
def test_repaired_mate_joins_its_sample(predicted, make_config, tiny, pairs, tmp_path, cut, named):
    whole = predicted(pairs, output=tmp_path / "whole", per_file=True)
    content = (pairs / cut).read_bytes()
    (pairs / cut).write_bytes(content[:-20])
    config = make_config(pairs, per_file=True)
    assert run_inline(config, tiny.head).exit_code == 2
    assert list(failed_files(config.output)) == [str(pairs / cut)]
    (pairs / cut).write_bytes(content)
    predicted(pairs / named.format(cut=cut), resume=True)
    for name in ("samples.tsv", "virnucpro_mqc.tsv"):
        assert (config.output / name).read_bytes() == (whole / name).read_bytes()
    for find in (tables, sample_files):
        found, expected = (
            {name: sorted(text.splitlines()) for name, text in find(output).items()}
            for output in (config.output, whole)
        )
        assert found == expected


def test_repaired_pair_has_the_bytes_of_a_fresh_run(predicted, pairs, tmp_path):
    first = pairs / "one_R1.fastq.gz"
    second = pairs / "one_R2.fastq.gz"
    packed = second.read_bytes()
    whole = predicted(first, second, output=tmp_path / "whole")
    second.write_bytes(packed[:-20])
    output = predicted(first, second, exit_code=2)
    second.unlink()
    second.with_suffix("").write_bytes(gzip.decompress(packed))
    predicted(first, second.with_suffix(""), resume=True, add=True)
    assert tables(output) == tables(whole)


def test_sheet_names_both_files_of_a_sample(predicted, pairs, tmp_path):
    for columns in ("sample,path,path_2", "sample,fastq_1,fastq_2"):
        sheet = tmp_path / "sheet.csv"
        places = [f"{pairs}/{name}.fastq.gz" for name in ("two_R1", "one_R2", "one_R1")]
        sheet.write_text(f"{columns}\ns1,{places[0]},{places[1]}\ns2,{places[2]},\n")
        output = predicted(sheet, force=True)
        ids = [("s1", f"contig_{i}/{mate}") for mate in (1, 2) for i in range(1, 6)]
        assert keys(output) == ids + [("s2", f"contig_{i}") for i in range(1, 6)]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(("n_bases", "n_opens"), [(600, 1), (70_000, 3)])
def test_run_opens_small_inputs_once(tmp_path, suffix, n_bases, n_opens):
    """A small input is hashed and kept. A larger one is opened to plan it and to write its rows."""
    folder = tmp_path / "in"
    folder.mkdir()
    rng = np.random.default_rng(5)
    for number in range(12):
        text = f">r{number}\n{open_dna(n_bases, rng)}\n".encode()
        path = folder / f"{number}.fa{suffix}"
        path.write_bytes(gzip.compress(text) if suffix else text)
    with counted_opens() as opens:
        predict(folder, to=tmp_path / "run")
    assert {opens[str(path)] for path in folder.iterdir()} == {n_opens}
    with counted_opens() as opens:
        predict(folder, to=tmp_path / "run", resume=True, preset="sensitive")
    n_unpacked = 1 if suffix else 0  # to detect reads
    assert max(opens[str(path)] for path in folder.iterdir()) <= 3 + n_unpacked


def test_kept_records_are_those_of_the_file(tmp_path):
    """A small input whose records were kept is read again after a change, and rejected."""
    path = write_fasta(tmp_path / "a.fa", {"one": "ACGT", "two": "AC-GT"})
    scan = InputScan()
    (kept,) = scan.hash(InputFile.complete(path), lambda _: None, reads_records=True)
    (read,) = InputScan(n_free_bytes=0).hash(
        InputFile.complete(path), lambda _: None, reads_records=True
    )
    assert kept.parsed is not None
    assert read.parsed is None
    assert pickle.loads(pickle.dumps(kept)).parsed is None  # noqa: S301 - our own bytes
    with counted_opens() as opens:
        records = list(kept.read())
    assert not opens[str(path)]
    assert records == list(read.read())
    path.write_text(">three\nACGT\n")
    with pytest.raises(InputError, match=r"a\.fa changed during the run"):
        list(kept.read())
