"""Arguments from Python are recognised as paths or sequences, and never guessed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from Bio.Seq import Seq
from Bio.SeqRecord import SeqRecord

from virnucpro.core.errors import InputError
from virnucpro.sequences.python_input import NamedSequence, split_input


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with a file and a folder whose names could be sequences."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MKT").write_text(">a\nMKT\n")
    (tmp_path / "genomes").mkdir()
    return tmp_path


def sequences_in(given: object) -> list[tuple[str, str]]:
    paths, records = split_input(given)
    assert paths == []
    found = list(records)
    assert not any(record.fault for record in found)
    return [(record.id, record.letters) for record in found]


@pytest.mark.parametrize(
    "path",
    [
        *("MKT", "genomes", "in.fa", "nowhere.fa", "~/in.fa", "a/b", "contigs_1", "-", "a\0b"),
        *(Path("MKVLA"), Path("contigs")),
    ],
)
def test_path_is_a_path(path):
    assert split_input(path)[0] == [path]
    assert split_input([path, Path("other.fa")])[0] == [path, Path("other.fa")]


@pytest.mark.parametrize("text", ["MKVLAAGIT", "MKV*", "ACGTN", "acgtn", "M" * 400])
def test_letters_alone_are_a_sequence(text):
    assert sequences_in(text) == [("sequence_1", text)]
    assert sequences_in([text, "MSTNP"]) == [("sequence_1", text), ("sequence_2", "MSTNP")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"p1": "MKV", "p2": ""}, [("p1", "MKV"), ("p2", "")]),
        ({"p1": SeqRecord(Seq("MKV"), id="other")}, [("p1", "MKV")]),
        ({"p1": Seq("MKV")}, [("p1", "MKV")]),
        ([("p1", "MKV"), ["p2", "MST"]], [("p1", "MKV"), ("p2", "MST")]),
        ([SeqRecord(Seq("MKV"), id="p1")], [("p1", "MKV")]),
        (np.array(["MKV", "MST"]), [("sequence_1", "MKV"), ("sequence_2", "MST")]),
        (iter(["MKV", "MST"]), [("sequence_1", "MKV"), ("sequence_2", "MST")]),
        (["MKV", "", "mst", "M-K", "M1"], None),
        ([], []),
        ({}, []),
    ],
)
def test_sequences_come_with_their_ids(given, expected):
    letters = ["MKV", "", "mst", "M-K", "M1"]
    numbered = [(f"sequence_{number}", text) for number, text in enumerate(letters, 1)]
    assert sequences_in(given) == (numbered if expected is None else expected)


@pytest.mark.parametrize(
    "text",
    ["contigs", "Contigs", "mkvla", "MKV LA", "M-KV", "ACG1", 100 * "ACG1", ">a\nMKV\n"],
)
def test_ambiguous_text_is_refused(text):
    for given in (text, [text], [text, "MKVLA"]):
        with pytest.raises(InputError, match=r"neither a file nor a sequence|text of a FASTA"):
            split_input(given)


@pytest.mark.parametrize(
    "given",
    [
        ["MKVLA", "MKT"],
        ["MKVLA", Path("a.fa")],
        ["MKVLA", "missing.fa"],
        [Path("a.fa"), "MKVLA"],
        [("a", "MKVLA"), "MKVLA"],
        ["MKVLA", ("a", "MKVLA")],
        ["MKVLA", None],
    ],
)
def test_items_of_two_kinds_are_refused(given):
    with pytest.raises(InputError, match="unlike the first one") as caught:
        paths, records = split_input(given)
        list(paths or records)
    assert caught.value.hint


@pytest.mark.parametrize("given", ["", None, 3, b"MKV", [b"MKV"], [("a",)], [(1, "MKV")]])
def test_other_values_are_refused(given):
    with pytest.raises(InputError) as caught:
        list(split_input(given)[1])
    assert caught.value.hint


@pytest.mark.parametrize("sequence", ["MK V", "MK\nV", ">MK", " MK", None, float("nan"), 3])
def test_sequence_that_fasta_cannot_hold_is_named(sequence):
    records = list(split_input([("good", "MKV"), ("bad", sequence)])[1])
    assert records[0] == NamedSequence("good", "MKV")
    assert records[1].id == "bad" and records[1].letters == "" and records[1].fault


def test_long_generator_is_read_one_by_one():
    n_read = 0

    def sequences():
        nonlocal n_read
        for _ in range(1_000):
            n_read += 1
            yield "MKV"

    _, records = split_input(sequences())
    assert n_read == 1
    assert next(records).id == "sequence_1" and n_read <= 2
