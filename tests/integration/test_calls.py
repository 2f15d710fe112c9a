"""Frames become chunks by VirNucPro's rules, and chunks become records by ours."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from head_helpers import FACTS
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.core.types import FastaRecord, Orf
from virnucpro.results.call_rows import chunk_rows, frame_rows, record_rows
from virnucpro.results.outputs import RunOutput
from virnucpro.results.sorted_lines import SortedLines, sorted_lines
from virnucpro.results.table_readers import parse_call
from virnucpro.results.tsv import (
    EMPTY,
    decimal_texts,
    encode_texts,
    format_fasta,
    format_integers,
    format_rows,
    texts,
)
from virnucpro.sequences.fasta import write_record
from virnucpro.viral.head import HeadInfo
from virnucpro.viral.head_classifiers import call_record
from virnucpro.viral.probability import probabilities, probability
from virnucpro.viral.types import Call, Calls, FrameScores, Prediction

GOLDEN = Path(__file__).parents[1] / "golden" / "consensus"


def frame(name: str, chunk: str, score: float | None, failure: str = "") -> Prediction:
    return Prediction(Orf(name, chunk, "r", 0, 30, "+", "MKVLEFPQIL"), score, failure)


def frames(chunk: str, *scores: float | None) -> list[Prediction]:
    return [frame(f"{chunk}F{i}", chunk, score) for i, score in enumerate(scores)]


def facts(**changes: object) -> HeadInfo:
    usual = {"threshold": 0.5, "frame_rule": "max", "exponent": 1.0}
    return replace(FACTS, **usual | changes)


def call(*predictions: Prediction, n_chunks: int = 3, **changes: object) -> Call:
    record = FastaRecord("r", "r of a test", "A" * 900)
    return call_record(record, n_chunks, predictions, facts(**changes))


def score(*chunks: list[float], **changes: object) -> float:
    return facts(**changes).score(chunks)


# Chunks


def test_chunks_are_called_as_in_the_original(tmp_path: Path) -> None:
    rows = (GOLDEN / "prediction_results.txt").read_text().splitlines()
    assert tuple(rows[0].split("\t")) == RunOutput.FRAME_TABLE.columns
    predictions = [
        frame(name, name[:-2], float(virus))  # the frame is the last two letters
        for name, _, _, virus in (row.split("\t") for row in rows[1:])
    ]
    with SortedLines(tmp_path) as lines:
        lines.add(sorted_lines(chunk_rows(FrameScores.from_predictions([predictions]))))
        table = "\t".join(RunOutput.CHUNK_TABLE.columns).encode() + b"\n" + b"".join(lines.merged())
    expected = GOLDEN / "prediction_results_highestscore.csv"
    assert table == expected.read_bytes()


@pytest.mark.parametrize(
    ("scores", "is_virus"),
    [
        ([0.5], True),
        ([0.499999], False),
        ([0.7, 0.2], False),
        ([0.8, 0.2], True),
        ([0.800001, 0.2], True),
        ([0.1, 0.2, 0.9, 0.4], True),
        ([1.0, 0.0], True),
    ],
    ids=["tie", "less", "others-surer", "tie-of-two", "virus-surer", "one-of-many", "both-sure"],
)
def test_chunk_is_viral_by_its_surest_frame(scores: list[float], is_virus: bool) -> None:
    assert (
        chunk_rows(FrameScores.from_predictions([frames("c", *scores)]))
        == f"c\t{is_virus}\n".encode()
    )


def test_only_scored_frames_and_chunks_have_rows() -> None:
    predictions = [*frames("a", None, None), frame("b0", "b", None, "no memory")]
    scores = FrameScores.from_predictions([[*predictions, *frames("b", 0.75), *frames("c", 0.1)]])
    assert chunk_rows(scores) == b"b\tTrue\nc\tFalse\n"
    assert frame_rows(scores) == (
        b"bF0\tvirus\t0.250000\t0.750000\ncF0\tothers\t0.900000\t0.100000\n"
    )


# Frames


def test_scores_of_many_equal_single_ones_bit_by_bit() -> None:
    rng = np.random.default_rng(8)
    middles = (rng.integers(1, 10**6 - 1, 5_000) + 0.5) / 10**6  # between two scores
    middles = np.log(middles / (1 - middles))
    nearly = [np.nextafter(middles, 99), np.nextafter(middles, -99)]
    odds = np.concatenate([middles, *nearly, rng.normal(0, 5, 5_000), [0.0, 800.0, -800.0]])
    assert probabilities(odds).tolist() == list(map(probability, odds.tolist()))
    assert np.isnan(probabilities(np.array([np.nan]))).all()


@pytest.mark.parametrize("n_decimals", [1, 3, 4, 6])
def test_numbers_are_written_as_python_writes_them(n_decimals: int) -> None:
    rng = np.random.default_rng(n_decimals)
    scale = 10.0**n_decimals
    middles = (rng.integers(0, 1_000 * scale, 5_000) + 0.5) / scale  # between two texts
    ties = rng.integers(0, 2**20, 5_000) / 2 ** (n_decimals + 1)  # half of them are exact
    near = [np.nextafter(each, way) for each in (middles, ties) for way in (-1, 1e9)]
    plain = [np.arange(0, 10**6, 97) / 10**6, [0.0, 1.0, 999_999_999.0, 5e-324, -1e-300]]
    numbers = np.concatenate([middles, ties, *near, *plain])
    numbers = np.concatenate([numbers, -numbers])
    expected = [f"{number:.{n_decimals}f}" for number in numbers]
    assert decimal_texts(numbers, n_decimals) == expected
    assert decimal_texts([None, 0.5, np.nan], n_decimals)[::2] == ["", ""]
    assert decimal_texts([], n_decimals) == []


def test_row_keeps_text_and_whole_numbers() -> None:
    names = ["", "a b", "\u00e9\u6f22", "\udcff", "x" * 10_000, "a\ttab"]
    numbers = [0, -1, 10**18, EMPTY, 7, -(2**63) + 1]
    expected = "".join(
        f"{name}\t{'' if n == EMPTY else n}\n" for name, n in zip(names, numbers, strict=True)
    )
    assert format_rows(texts(names), format_integers(numbers)) == encode_texts(expected)


@given(st.lists(st.integers(0, 200), max_size=5))
def test_fasta_has_sixty_letters_per_line(lengths: list[int]) -> None:
    sequences = [("ACGTN" * 40)[:n] for n in lengths]
    out = StringIO()
    for number, sequence in enumerate(sequences):
        write_record(out, f"r{number} d", sequence)
    assert (
        format_fasta([f"r{i} d" for i in range(len(lengths))], sequences) == out.getvalue().encode()
    )


def test_frame_scores_have_six_decimals() -> None:
    scores = FrameScores.from_predictions([frames("c", 0.5, 0.500001, 0.123456, 1.0, 0.0)])
    assert frame_rows(scores).decode().splitlines(keepends=True) == [
        "cF0\tothers\t0.500000\t0.500000\n",
        "cF1\tvirus\t0.499999\t0.500001\n",
        "cF2\tothers\t0.876544\t0.123456\n",
        "cF3\tvirus\t0.000000\t1.000000\n",
        "cF4\tothers\t1.000000\t0.000000\n",
    ]


# Records


def test_record_score_is_the_mean_of_best_frames() -> None:
    found = call(*frames("c1", 0.2, 0.9), *frames("c2", 0.1), *frames("c3", 0.8, 0.3), n_chunks=5)
    assert found == Call(
        "r",
        900,
        "scored",
        virus_score=0.613512,  # odds of 9 * 1/9 * 4, to the power of 1/3, are 1.587401
        is_virus=True,
        n_chunks=5,
        n_chunks_scored=3,
        n_frames_scored=5,
    )


def test_exponent_weighs_many_chunks() -> None:
    chunks = [[0.8]] * 4  # odds of 4
    assert score(*chunks, exponent=1.0) == 0.8
    assert score(*chunks, exponent=0.5) == round(16 / 17, 6)
    assert score(*chunks, exponent=0.0) == round(256 / 257, 6)
    assert score([0.8], exponent=0.0) == score([0.8], exponent=1.0) == 0.8


def test_chunk_takes_best_or_mean_frame() -> None:
    assert score([0.2, 0.9, 0.5], frame_rule="max") == 0.9
    assert score([0.8, 0.5], frame_rule="mean") == round(2 / 3, 6)  # odds of sqrt(4 * 1)
    assert score([0.3], frame_rule="mean") == score([0.3], frame_rule="max") == 0.3


def test_one_sure_chunk_does_not_silence_others() -> None:
    assert score([1.0], [0.0], exponent=1.0) == 0.5
    assert score([1.0], exponent=1.0) == 0.999999
    assert score([0.0], exponent=1.0) == 0.000001
    assert score([1.0], [0.5], exponent=1.0) == 0.999001  # odds of sqrt(999999)
    assert score(*[[0.0]] * 5, exponent=0.0) == 0.0


@pytest.mark.parametrize(
    ("score", "threshold", "is_virus"),
    [(0.7, 0.7, True), (0.699999, 0.7, False), (0.0, 0.0, True), (1.0, 0.999999, True)],
)
def test_record_is_viral_from_the_threshold_on(score, threshold, is_virus) -> None:
    assert call(*frames("c", score), threshold=threshold).is_virus is is_virus


FAILED = frame("x", "c2", None, "no memory")
ONE = "1 of {} frames failed: no memory"
BOTH = "2 of 2 frames failed: no memory"


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [
        ([], ("no_orf", "", None, False, 0, 0)),
        ([*frames("c1", 0.99, 0.9), FAILED], ("scored", ONE.format(3), 0.99, True, 1, 2)),
        ([FAILED, FAILED], ("failed", BOTH, None, False, 0, 0)),
    ],
    ids=["no frame", "one failed", "all failed"],
)
def test_record_without_a_score_has_a_note(predictions, expected) -> None:
    record = FastaRecord("r", "r of a test", "A" * 900)
    found = call_record(record, 3, predictions, facts())
    answer = found.status, found.note, found.virus_score, found.is_virus
    assert (*answer, found.n_chunks_scored, found.n_frames_scored) == expected


@pytest.mark.parametrize(
    ("found", "row"),
    [
        (call(*frames("c", 0.75)), "r\t\t900\tscored\tvirus\t0.750000\t\t3\t1\t1\t\t\t\t\t\n"),
        (call(*frames("c", 0.25)), "r\t\t900\tscored\tother\t0.250000\t\t3\t1\t1\t\t\t\t\t\n"),
        (
            replace(call(*frames("c", 0.75)), base_score=0.75, false_discovery_rate=0.03125),
            "r\t\t900\tscored\tvirus\t0.750000\t0.0312\t3\t1\t1\t0.750000\t\t\t\t\n",
        ),
        (
            replace(call(*frames("c", 0.75)), evidence="both", known_family="A", n_known_kmers=12),
            "r\t\t900\tscored\tvirus\t0.750000\t\t3\t1\t1\t\t\tboth\tA\t12\n",
        ),
        (call(), "r\t\t900\tno_orf\t\t\t\t3\t0\t0\t\t\t\t\t\n"),
        (
            Call("r", 9, "invalid", note="is odd"),
            "r\t\t9\tinvalid\t\t\t\t0\t0\t0\t\tis odd\t\t\t\n",
        ),
    ],
    ids=["virus", "other", "virus of the scorer", "known virus", "no_orf", "invalid"],
)
def test_record_without_a_call_is_one_row(found: Call, row: str) -> None:
    assert record_rows(Calls.from_calls([found])) == row.encode()
    assert len(row.split("\t")) == len(RunOutput.RECORD_TABLE.columns)
    rate = found.false_discovery_rate
    again = replace(found, false_discovery_rate=None if rate is None else round(rate, 4))
    head = "\t".join(RunOutput.RECORD_TABLE.columns) + "\n"
    assert list(map(parse_call, RunOutput.RECORD_TABLE.values_in(StringIO(head + row)))) == [again]
    for place, word in ((3, "scores"), (4, "viral")):
        fields = row.split("\t")
        fields[place] = word
        with pytest.raises(ValueError, match="and the call"):
            list(
                map(
                    parse_call, RunOutput.RECORD_TABLE.values_in(StringIO(head + "\t".join(fields)))
                )
            )


def test_tables_without_evidence_are_read() -> None:
    columns = RunOutput.RECORD_TABLE.columns[:-3]
    assert columns[-1] == "note"
    found = [call(*frames("c", 0.75)), replace(call(), note="a note")]
    lines = record_rows(Calls.from_calls(found)).decode().splitlines()
    table = "\n".join(("\t".join(columns), *(line[:-3] for line in lines), ""))
    assert list(map(parse_call, RunOutput.RECORD_TABLE.values_in(StringIO(table)))) == found


def test_unknown_evidence_is_damage() -> None:
    row = record_rows(
        Calls.from_calls([replace(call(*frames("c", 0.75)), evidence="guess")])
    ).decode()
    table = "\t".join(RunOutput.RECORD_TABLE.columns) + "\n" + row
    with pytest.raises(ValueError, match="the evidence guess"):
        list(map(parse_call, RunOutput.RECORD_TABLE.values_in(StringIO(table))))


def test_failed_records_are_read_from_the_table() -> None:
    calls = [
        call(*frames("c", 0.75)),
        call(),
        replace(call(*frames("c", 0.75), frame("x", "c", None, "a\ttab")), record_id="one frame"),
        replace(call(frame("x", "c", None, "NaN")), record_id="all frames"),
        Call("odd", 9, "invalid", "file", note="is odd"),
    ]
    table = (
        "\t".join(RunOutput.RECORD_TABLE.columns)
        + "\n"
        + record_rows(Calls.from_calls(calls)).decode()
    )
    found = [
        one
        for one in map(parse_call, RunOutput.RECORD_TABLE.values_in(StringIO(table, newline="\n")))
        if one.is_mendable
    ]
    assert [one.record_id for one in found] == ["one frame", "all frames", "odd"]


# Sorting


@pytest.mark.parametrize(
    ("n_lines", "longest"), [(0, 1), (1, 1), (200, 1), (200, 600_000)], ids=str
)
def test_rows_are_sorted_by_id_in_little_memory(tmp_path: Path, n_lines: int, longest: int) -> None:
    """The last case has 60 MB of lines. 16 MB stay in memory, and 0.25 MB are read at once."""
    rng = np.random.default_rng(n_lines)
    odd = ["\u00e9", "\U0001f9a0", "\x01", "\x85", " ", "_chunk_", *"Z~#", "\udcff", "10", "9"]
    ids = [
        "".join(rng.choice(odd, 4)) + "x" * rng.integers(longest) + f"_{i}" for i in range(n_lines)
    ]
    lines = [f"{name}\t{i % 2 == 0}\n" for i, name in enumerate(ids)]
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    with SortedLines(tmp_path) as sorted_texts:
        for first in range(0, n_lines, 7):
            text = "".join(lines[first : first + 7]).encode("utf-8", "surrogateescape")
            sorted_texts.add(sorted_lines(text))
            assert len(list(Path("/proc/self/fd").iterdir())) <= n_open + 1
        found = b"".join(sorted_texts.merged())
    in_bytes = [line.encode("utf-8", "surrogateescape") for line in lines]
    assert found == b"".join(sorted(in_bytes, key=lambda line: line.split(b"\t")[0]))
    assert not any(tmp_path.iterdir())
