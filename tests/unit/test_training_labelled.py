"""Manifests: what users may write, and the messages about impossible ones."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import subprocess
from pathlib import Path

import pytest
from forkserver_runner import virnucpro
from labelled_data_helpers import records_of
from run_helpers import within

from virnucpro.core.atomic_io import hash_file, zstd
from virnucpro.core.errors import InputError, InputMissingError
from virnucpro.training import labelled_data as labelled_records
from virnucpro.training.labelled_data import (
    Labelled,
    LabelledRecord,
    group_digest,
    read_data_manifest,
    read_records,
    record_digest,
    warn_of_mixed_groups,
)
from virnucpro.training.options import ManifestOptions

TWO_FILES = {"viruses.fa": {"v1": "ACGT", "v2": "GGG"}, "cells.fa": {"c1": "AAAA", "c2": "CCCC"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, records in TWO_FILES.items():
        text = "".join(f">{key} of a test\n{bases}\n" for key, bases in records.items())
        (tmp_path / name).write_text(text)
    (tmp_path / "empty.fa").write_text("\n\n")
    (tmp_path / "loop.fa").symlink_to("loop.fa")
    return tmp_path


def write_manifest(folder: Path, *rows: str, columns: str = "path\tid\tlabel\tgroup") -> Path:
    path = folder / "manifest.tsv"
    path.write_text("\n".join((columns, *rows, "")))
    return path


def refusal_of(manifest: Path) -> InputError:
    with pytest.raises((InputError, InputMissingError)) as caught:
        records_of(manifest)
    assert caught.value.hint
    return caught.value


def test_record_has_the_values_of_its_row(folder: Path) -> None:
    manifest = write_manifest(
        folder,
        "phage\t2.5\tv2\tvirus\tMicroviridae\tviruses.fa\tignored",
        "\t\tc1\tother\tEscherichia\tcells.fa\t",
        columns="kingdom\tweight\tid\tlabel\tgroup\tpath\tnote",
    )
    assert records_of(manifest) == [
        LabelledRecord("v2", True, "Microviridae", 2.5, "phage"),
        LabelledRecord("c1", False, "Escherichia", 1.0, ""),
    ]


@pytest.mark.parametrize("columns", ["path\tlabel\tgroup", "path\tlabel\tgroup\tid"])
def test_row_without_id_covers_its_file(folder: Path, columns: str) -> None:
    empty = "\t" if columns.endswith("id") else ""
    rows = [f"cells.fa\tother\tB{empty}", f"viruses.fa\tvirus\tA{empty}"]
    found = records_of(write_manifest(folder, *rows, columns=columns))
    assert [(record.id, record.label, record.group) for record in found] == [
        ("c1", "other", "B"),
        ("c2", "other", "B"),
        ("v1", "virus", "A"),
        ("v2", "virus", "A"),
    ]


def test_packed_manifest_with_crlf_is_read(folder: Path) -> None:
    manifest = folder / "manifest.tsv"
    manifest.write_bytes(gzip.compress(b"path\tlabel\tgroup\r\n\r\nviruses.fa\tvirus\tA\r\n"))
    assert [record.group for record in records_of(manifest)] == ["A", "A"]


def test_groups_with_both_labels_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = write_manifest(folder, "viruses.fa\t\tvirus\tA", "cells.fa\t\tother\tA")
    records = records_of(manifest)
    assert {record.group for record in records} == {"A"}
    warn_of_mixed_groups(records)
    (told,) = caplog.messages
    assert told.startswith("groups with both labels, virus and other: A;")
    warn_of_mixed_groups(record for record in records if record.is_virus)
    assert caplog.messages == [told]
    both = (True, False)
    warn_of_mixed_groups(
        LabelledRecord("", is_virus, f"g{i}") for i in range(8) for is_virus in both
    )
    assert "g0, g1, g2, g3, g4 and 3 more;" in caplog.text


def test_each_file_is_read_once(
    folder: Path,
) -> None:
    manifest = write_manifest(
        folder, "cells.fa\tc2\tother\tB", "viruses.fa\t\tvirus\tA", "cells.fa\tc1\tother\tC"
    )
    found = [
        (labelled.id, labelled.group, record.id, record.sequence)
        for labelled, record in read_records(read_data_manifest(manifest))
    ]
    assert found == [
        ("c1", "C", "c1", "AAAA"),
        ("c2", "B", "c2", "CCCC"),
        ("v1", "A", "v1", "ACGT"),
        ("v2", "A", "v2", "GGG"),
    ]


IDS = "path\tid\tlabel\tgroup"
WEIGHTS = "path\tlabel\tgroup\tweight"


@pytest.mark.parametrize(
    ("columns", "rows", "words"),
    [
        (IDS, ["viruses.fa\t\tviral\tA"], "manifest.tsv:2: the label is 'viral'"),
        (IDS, ["viruses.fa\t\tvirus\t "], "manifest.tsv:2: the group is empty"),
        (IDS, ["\t\tvirus\tA"], "manifest.tsv:2: the path is empty"),
        (IDS, ["nowhere.fa\t\tvirus\tA"], "nowhere.fa: No such file"),
        (IDS, ["loop.fa\t\tvirus\tA"], "loop.fa: Too many levels"),
        (IDS, ["~nosuchuser/a.fa\t\tvirus\tA"], ":2: ~nosuchuser/a.fa: no home folder"),
        (IDS, ["viruses.fa\t\tvirus\tA", "empty.fa\t\tother\tB"], "empty.fa contains no record"),
        (IDS, ["viruses.fa\tvirus\tA"], "manifest.tsv:2: 3 cells for 4 columns"),
        (IDS, ["viruses.fa\tv1\tvirus\tA"] * 2, "manifest.tsv:3: the record v1 of"),
        (IDS, ["viruses.fa\t\tvirus\tA"] * 2, "is named twice (first in line 2)"),
        (IDS, ["viruses.fa\tv1\tvirus\tA", "viruses.fa\t\tvirus\tA"], "twice (first in line 2)"),
        (IDS, ["viruses.fa\t\tvirus\tA", "./viruses.fa\tv1\tvirus\tA"], "twice (first in line 2)"),
        (IDS, ["viruses.fa\tv1\tvirus\tA", "viruses.fa\tv9\tvirus\tA"], "manifest.tsv:3: "),
        (IDS, ["viruses.fa\tv9\tvirus\tA"], "contains no record v9"),
        (
            IDS,
            ["viruses.fa\tv1\tvirus\tA", "cells.fa\tv1\tother\tA"],
            "cells.fa contains no record v1",
        ),
        *(
            (WEIGHTS, [f"viruses.fa\tvirus\tA\t{weight}"], f":2: the weight is {weight!r}")
            for weight in ("0", "-1", "nan", "inf", "1e308", "much")
        ),
        ("label\tgroup", [], "manifest.tsv:1: no column 'path'"),
        ("path\tgroup", [], "manifest.tsv:1: no column 'label'"),
        ("path\tlabel", [], "manifest.tsv:1: no column 'group'"),
    ],
)
def test_impossible_manifest_names_its_line(
    folder: Path, columns: str, rows: list[str], words: str
) -> None:
    told = str(refusal_of(write_manifest(folder, *rows, columns=columns)))
    assert words in told and re.search(r"manifest\.tsv:\d+: ", told)


def test_repeated_id_or_protein_names_its_line(
    folder: Path,
) -> None:
    (folder / "more.fa").write_text(">x\nACGT\n>v1\nACGT\n")
    error = refusal_of(write_manifest(folder, "viruses.fa\t\tvirus\tA", "more.fa\t\tvirus\tB"))
    assert "more.fa:3: the id v1 occurs twice (first in " in str(error)
    assert "viruses.fa)" in str(error)
    (folder / "more.fa").write_text(">x\nACGT\n>p\nMKVLEF\n")
    error = refusal_of(write_manifest(folder, "more.fa\t\tvirus\tA"))
    assert "more.fa:3: the record p cannot be used: 'L' at position 4" in str(error)


def test_binary_manifest_is_refused(folder: Path) -> None:
    (folder / "manifest.tsv").write_bytes(b"\xff\xfe\x00binary")
    assert "not UTF-8 text" in str(refusal_of(folder / "manifest.tsv"))
    whole = gzip.compress(b"path\tlabel\tgroup\n" * 99)
    (folder / "manifest.tsv").write_bytes(whole[: len(whole) // 2])
    assert "cannot be decompressed" in str(refusal_of(folder / "manifest.tsv"))
    assert "No such file" in str(refusal_of(folder / "nowhere.tsv"))
    folder_error = refusal_of(folder)
    assert "is a folder, not a manifest" in str(folder_error)
    assert "virnucpro manifest" in str(folder_error.hint)


PACKERS = {"fa": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("packing", [*PACKERS, "zst"])
def test_file_is_hashed_while_read(folder: Path, packing: str) -> None:
    pack = PACKERS.get(packing, zstd.compress)
    text = b"".join(b">r%d\n%s\n" % (i, b"ACGT" * 9999) for i in range(40))
    packed = folder / f"packed.{packing}"
    packed.write_bytes(pack(text))
    manifest = read_data_manifest(write_manifest(folder, f"{packed.name}\t\tvirus\tA"))
    hashes: list[str] = []
    read: list[int] = []
    pairs = list(read_records(manifest, hashes.append, lambda block: read.append(len(block))))
    assert [record.id for _, record in pairs] == [f"r{i}" for i in range(40)]
    assert hashes == [hash_file(packed)]
    assert sum(read) == packed.stat().st_size
    assert manifest.sha256 == hash_file(folder / "manifest.tsv")


def test_pipe_cannot_be_read_twice(folder: Path) -> None:
    os.mkfifo(folder / "pipe.fa")
    manifest = write_manifest(folder, "pipe.fa\t\tvirus\tg")
    with within(20), pytest.raises(InputMissingError, match=r":2: .*pipe\.fa: it is not a plain"):
        read_data_manifest(manifest)
    os.mkfifo(folder / "pipe.tsv")
    with within(20), pytest.raises(InputMissingError, match=r"pipe\.tsv: it is not a plain file"):
        read_data_manifest(folder / "pipe.tsv")


def test_digest_ignores_case() -> None:
    assert record_digest("acgtn") == record_digest("ACGTN") != record_digest("ACGT")
    assert group_digest("A") != group_digest("a")
    assert 0 <= record_digest("") < 2**64


# ``virnucpro manifest``


def say(*words: object) -> subprocess.CompletedProcess[str]:
    return virnucpro("manifest", *words)


def test_manifest_from_folders(
    tmp_path: Path,
) -> None:
    for name in ("viruses/Microviridae/a.fa", "viruses/b.fa", "rest/E_coli.fna"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f">{path.stem}\nACGT\n")
    out = tmp_path / "data" / "manifest.tsv"
    out.parent.mkdir()
    given = ("--virus", tmp_path / "viruses", "--other", tmp_path / "rest", "-o", out)
    answer = say(*given)
    assert answer.returncode == 0, answer.stderr
    assert "virus: 2 files in 2 groups" in answer.stdout
    records = {one.id: one for one, _ in read_records(read_data_manifest(out))}
    groups = {name: (one.label, one.group) for name, one in records.items()}
    assert groups == {
        "a": ("virus", "Microviridae"),
        "b": ("virus", "b"),
        "E_coli": ("other", "E_coli"),
    }
    assert say(*given).returncode == 73 and say(*given, "--force").returncode == 0


def test_manifest_from_a_table(tmp_path: Path) -> None:
    (tmp_path / "g.fa").write_text(">NC_1.1\nACGT\n>NC_2.1\nACGT\n>NC_9.1\nACGT\n")
    table = tmp_path / "taxonomy.tsv"
    table.write_text(
        "accession\tsuperkingdom\tfamily\tgenus\tkingdom\n"
        "NC_1\tViruses\t\tT4virus\tHeunggongvirae\n"
        "NC_2.1\tBacteria\tEnterobacteriaceae\tEscherichia\t\n"
        "NC_3\tBacteria\tVibrionaceae\tVibrio\t\n"
    )
    out = tmp_path / "manifest.tsv"
    given = ("--table", table, "--fasta", tmp_path / "g.fa", "-o", out)
    answer = say(*given)
    assert answer.returncode == 0, answer.stderr
    assert "not in the table: 1 record of the FASTA files" in answer.stderr
    assert "in no FASTA file: 1 accession of the table, for example NC_3" in answer.stderr
    found = [(one.id, one.label, one.group, one.kingdom) for one, _ in pairs(out)]
    assert found == [
        ("NC_1.1", "virus", "T4virus", "Heunggongvirae"),
        ("NC_2.1", "other", "Enterobacteriaceae", "Bacteria"),
    ]
    assert say(*given, "--force", "--group-by", "genus").returncode == 0
    assert [one.group for one, _ in pairs(out)] == ["T4virus", "Escherichia"]
    refused = say(*given, "--force", "--group-by", "tribe")
    assert refused.returncode == 65 and "taxonomy.tsv:2: there is no group" in refused.stderr


def test_unknown_label_is_no_host(tmp_path: Path) -> None:
    (tmp_path / "g.fa").write_text(">a\nACGT\n>b\nACGT\n")
    table = tmp_path / "taxonomy.tsv"
    out = tmp_path / "manifest.tsv"
    table.write_text("accession\tlabel\tfamily\na\tViral\tA\nb\tother\tB\n")
    asked = ManifestOptions(output=out, table=table, fasta=(tmp_path / "g.fa",))
    with pytest.raises(InputError, match=r"taxonomy\.tsv:2: the label is 'viral'"):
        labelled_records.write_manifest(asked)
    table.write_text(table.read_text().replace("Viral", "Virus"))
    labelled_records.write_manifest(asked)
    assert [one.label for one, _ in pairs(out)] == ["virus", "other"]


def pairs(manifest: Path) -> list[Labelled]:
    return list(read_records(read_data_manifest(manifest)))


EITHER = "a manifest needs folders for the labels, or a table"


@pytest.mark.parametrize(
    ("words", "exit_code", "fault"),
    [
        ("--virus a --table t.tsv", 64, EITHER),
        ("--table t.tsv", 64, EITHER),
        ("--virus a --fasta b", 64, EITHER),
        ("", 64, EITHER),
        ("--virus a --other b --group-by genus", 64, "--group-by: no effect without --table"),
        ("--virus a/a.fa", 65, "no sequence has the label other"),
        ("--virus a --other a", 65, "a/a.fa is named as virus and as other"),
        ("--virus a --other .", 65, "a/a.fa is named as virus and as other"),
        ("--virus a --virus a/a.fa --other b.fa", 65, "a/a.fa is named twice"),
        ("--table t.tsv --fasta a --fasta a/a.fa", 65, "the record v of a/a.fa is named twice"),
    ],
)
def test_manifest_needs_both_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, exit_code: int, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("a/a.fa").write_text(">v\nACGT\n")
    Path("b.fa").write_text(">c\nACGT\n")
    Path("t.tsv").write_text("accession\tlabel\tfamily\nv\tvirus\tA\nc\tother\tB\n")
    answer = say("-o", "manifest.tsv", *words.split())
    assert answer.returncode == exit_code and fault in answer.stderr
    assert not Path("manifest.tsv").exists()
