"""``virnucpro compare``: two results, ours or the original's, joined by id."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from run_helpers import CONTIGS, forget_hashes, invoke

from virnucpro.core.errors import InputError, InputMissingError
from virnucpro.workflows.compare import TableComparison, compare, report_lines

FRAMES = """Sequence_ID\tPrediction\tscore1\tscore2
a_chunk_1F1\tvirus\t0.12100612\t0.8789939
a_chunk_1R2\tothers\t0.5501341\t0.44986594
b_chunk_1F3\tvirus\t0.0011595711\t0.9988405
"""
CHUNKS = "Modified_ID\tIs_Virus\na_chunk_1\tTrue\nb_chunk_1\tTrue\n"


@pytest.fixture
def result(tmp_path) -> Path:
    """Write a result of the original: two tables, with scores as numpy writes them."""
    return write(tmp_path / "original", FRAMES, CHUNKS)


def write(folder: Path, frames: str, chunks: str) -> Path:
    folder.mkdir()
    (folder / "prediction_results.txt").write_text(frames)
    (folder / "prediction_results_highestscore.csv").write_text(chunks)
    return folder


def only(comparisons: list[TableComparison], table: str) -> TableComparison:
    return next(one for one in comparisons if one.table == table)


def exit_code(*words: object) -> int:
    return invoke("compare", *words)[0]


def test_result_equals_itself_in_any_order(result, tmp_path):
    head, *rows = FRAMES.splitlines(keepends=True)
    other = write(tmp_path / "other", head + "".join(rows[::-1]), CHUNKS)
    for comparison in compare(result, other):
        assert comparison.agrees(0.0)
    assert [(one.table, one.n_both) for one in compare(result, other)] == [
        ("frames", 3),
        ("chunks", 2),
    ]
    assert exit_code(result, other, "--tolerance", "0") == 0


def test_differences_are_reported_by_id(result, tmp_path):
    frames = FRAMES.replace("0.8789939", "0.878984").replace("b_chunk_1F3", "c_chunk_1F3")
    frames = frames.replace("others", "virus").replace("0.44986594", "0.500001")
    other = write(tmp_path / "other", frames, CHUNKS.replace("b_chunk_1\tTrue", "b_chunk_1\tFalse"))
    frame_changes = only(compare(result, other), "frames")
    assert frame_changes.kinds == {
        "only in A": ["b_chunk_1F3"],
        "only in B": ["c_chunk_1F3"],
        "labels differ": ["a_chunk_1R2 (others, virus)"],
    }
    assert sorted(frame_changes.differences) == pytest.approx([9.9e-6, 0.05013506])
    chunk_kinds = only(compare(result, other), "chunks").kinds
    assert chunk_kinds["labels differ"] == ["b_chunk_1 (True, False)"]
    assert list(report_lines(compare(result, other))) == [
        "table        in both      only in A      only in B  labels differ  largest   median",
        "frames             2              1              1              1     0.05    0.025",
        "chunks             2              0              0              1",
        "frames, only in A: b_chunk_1F3",
        "frames, only in B: c_chunk_1F3",
        "frames, labels differ: a_chunk_1R2 (others, virus)",
        "chunks, labels differ: b_chunk_1 (True, False)",
    ]
    assert exit_code(result, other) == 1


@pytest.mark.parametrize(
    ("score", "tolerance", "code"),
    [
        ("0.8789939", None, 0),
        ("0.878984", None, 0),
        ("0.878984", "0.00002", 0),
        ("0.878984", "0.000009", 1),
        ("0.8789949", "0.000001", 0),  # their difference is 1.00000000003e-06
        ("0.8789949", "0.0000009", 1),
    ],
)
def test_scores_pass_within_the_tolerance(result, tmp_path, score, tolerance, code):
    other = write(tmp_path / "other", FRAMES.replace("0.8789939", score), CHUNKS)
    assert exit_code(result, other, *(["--tolerance", tolerance] if tolerance else [])) == code


def test_records_and_viruses_are_compared(tmp_path):
    run = tmp_path / "run"
    other = tmp_path / "other"
    assert invoke("predict", "-i", CONTIGS, "-o", run, "-q")[0] == 0
    assert exit_code(run, run) == 0
    shutil.copytree(run, other)
    table = other / "viruses.tsv"
    rows = table.read_text().splitlines(keepends=True)
    table.write_text("".join(rows[:-1]).replace("RNA+", "phage", 1))
    code, said = invoke("compare", run, other)
    assert code == 65 and "viruses.tsv was changed" in said
    forget_hashes(other)
    records = (other / "predictions.tsv").read_text()
    (other / "predictions.tsv").write_text(records.replace("\tvirus\t", "\tother\t", 1))
    (relabelled,) = only(compare(run, other), "records").kinds["labels differ"]
    assert re.fullmatch(r"contigs: example_virus_\d+ \(virus, other\)", relabelled)
    viruses = only(compare(run, other), "viruses")
    assert viruses.n_both == len(rows) - 2
    assert viruses.kinds["only in A"] == ["contigs: " + rows[-1].split("\t")[0]]
    (relabelled,) = viruses.kinds["labels differ"]
    family = "Coronaviridae"
    assert (
        relabelled == f"contigs: {rows[1].split()[0]} (whole RNA+ {family}, whole phage {family})"
    )
    table = run / "viruses.tsv"
    table.unlink()
    code, said = invoke("compare", run, other)
    assert code == 65 and "viruses.tsv is missing" in said


def test_only_file_may_have_another_name(tmp_path):
    run = tmp_path / "run"
    renamed = tmp_path / "renamed"
    several = tmp_path / "several"
    copy = tmp_path / "copy.fa"
    other = tmp_path / "other.fa"
    shutil.copy(CONTIGS, copy)
    other.write_text(">a\n" + "ACGT" * 100 + "\n")
    for folder, files in (run, [CONTIGS]), (renamed, [copy]), (several, [copy, other]):
        words = [word for file in files for word in ("-i", file)]
        assert invoke("predict", *words, "-o", folder, "-q")[0] == 0
    records = only(compare(run, renamed), "records")
    assert (records.n_both, records.agrees(0.0)) == (16, True)
    assert only(compare(run, renamed), "viruses").agrees(0.0)
    assert exit_code(run, renamed, "--tolerance", "0") == 0
    records = only(compare(run, several), "records")
    assert records.n_both == 0
    assert records.kinds["only in A"][0] == "contigs: example_virus_01"
    assert records.kinds["only in B"][-1] == "other: a"


def test_table_type_is_read_from_its_header(result, tmp_path):
    table = tmp_path / "renamed.txt"
    table.write_bytes(FRAMES.replace("\n", "\r\n").encode())
    assert [one.table for one in compare(table, result)] == ["frames"]


def test_nothing_to_compare_is_reported(result, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputMissingError, match=r"has none of prediction_results\.txt"):
        compare(result, tmp_path / "empty")
    with pytest.raises(InputMissingError, match="no table in common"):
        compare(result / "prediction_results.txt", result / "prediction_results_highestscore.csv")
    with pytest.raises(InputMissingError, match="no such file") as missing:
        compare(result, tmp_path / "nowhere")
    assert "virnucpro predict" in missing.value.hint
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(InputError, match="is not a table of results"):
        compare(result, tmp_path / "notes.txt")


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (FRAMES + FRAMES.splitlines()[1] + "\n", "a_chunk_1F1 occurs twice"),
        (FRAMES + "half a row\n", "line 5 is not of the columns Sequence_ID, Prediction"),
        (FRAMES.replace("0.9988405", "high"), "could not convert"),
        (FRAMES.replace("0.9988405", "nan"), "has the score nan"),
        (FRAMES[:-2], "its end is missing"),
        ("", "its columns have other names"),
    ],
)
def test_damaged_table_is_reported(result, tmp_path, frames, why):
    other = write(tmp_path / "other", frames, CHUNKS)
    with pytest.raises(InputError, match=why):
        compare(result, other)
    code, shown = invoke("compare", result, other)
    assert code == 65 and why in shown.replace("\n", " ")
