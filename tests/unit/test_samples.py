"""Sample names are distinct and safe, whatever the user's text. Ids of a run are unique."""

from __future__ import annotations

import os
import tracemalloc
from array import array
from functools import cache
from pathlib import Path

import pytest

from virnucpro.core.errors import InputError, InputMissingError
from virnucpro.sequences.input_scan import InputScan, find_repeat
from virnucpro.sequences.input_search import find_inputs
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.sample_sheet import read_sheet
from virnucpro.sequences.samples import RunIds, id_digests, name_samples


def names(*paths: str, recorded: tuple[InputFile, ...] = ()) -> list[str]:
    return [source.sample for source in name_samples([InputFile(p) for p in paths], recorded)]


def of(path: Path, **facts: object) -> InputFile:
    (file,) = InputScan(is_strict=True).hash([InputFile(str(path), sample="s")], lambda _: None)
    return InputFile(str(path), file.sha256, file.n_bytes, sample="s", stamp=file.stamp, **facts)


def found_in(folder: Path, *paths: Path) -> list[InputFile]:
    return find_inputs(paths, folder / "run", folder / "run" / "inputs")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# Names


def test_sample_name_drops_the_fasta_suffix() -> None:
    given = ["/d/a.fa", "/d/b.FASTA.GZ", "/d/c.v1.fna.zst", "/d/e.faa", "/d/f.txt", "/d/g.gz"]
    assert names(*given) == ["a", "b", "c.v1", "e", "f.txt", "g"]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["/d/A/contigs.fasta", "/d/B/contigs.fasta"], ["A_contigs", "B_contigs"]),
        (["/A/out/contigs.fa", "/B/out/contigs.fa"], ["A_contigs", "B_contigs"]),
        (["/d/x.fa", "/d/A/c.fa", "/d/B/c.fa"], ["x", "A_c", "B_c"]),
        (["/d/a.fa", "/d/a.fna", "/d/a.fa.gz"], ["d_a", "d_a_2", "d_a_3"]),
        (["/d/a b.fa", "/e/a_b.fa"], ["d_a_b", "e_a_b"]),
        (["/d/Contigs.fa", "/e/contigs.fa"], ["d_Contigs", "e_contigs"]),
        (["/d/a_2.fa", "/d/a.fa", "/d/a.fna"], ["a_2", "d_a", "d_a_2"]),
        (["/d/A/c.fa", "/d/A/c.fna", "/d/B/c.fa"], ["A_c", "A_c_2", "B_c"]),
    ],
)
def test_equal_names_become_distinct(paths, expected) -> None:
    assert names(*paths) == expected


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("/d/a_R1.fq /d/b.fa /d/a_R2.fq", "a/1 a/2 b"),
        ("/d/a_2.fq.gz /d/a_1.fq.gz", "a/1 a/2"),
        ("/A/x_1.fq /A/x_2.fq /B/x_1.fq /B/x_2.fq", "A_x/1 A_x/2 B_x/1 B_x/2"),
        (
            "/d/S_L001_I1_001.fq /d/S_L001_R1_001.fq /d/S_L001_R2_001.fq",
            "S_L001_I1_001 S_L001/1 S_L001/2",
        ),
        ("/d/s.r1.fastq /d/s.r2.fastq", "s/1 s/2"),
        ("/d/s_1.fq /d/s_2.fq /d/s_3.fq", "s_1 s_2 s_3"),  # numbered samples
        ("/d/c_1.fa /d/c_2.fa", "c_1 c_2"),  # contigs have no mates
        ("/d/a_R1.fq /e/a_R2.fq", "a_R1 a_R2"),
    ],
)
def test_mate_numbers_make_one_sample(paths, expected) -> None:
    sources = name_samples([InputFile(path) for path in paths.split()], ())
    found = [f"{one.sample}/{one.mate}" if one.mate else one.sample for one in sources]
    assert found == expected.split()


def test_changed_names_are_one_message(caplog) -> None:
    caplog.set_level("INFO", "virnucpro")
    given = [("/d/a.fa", "S 1"), ("/d/b.fa", "S_1"), ("/d/c.fa", "S3"), ("/d/d.fa", "")]
    given.append(("/d/d.fa.gz", ""))
    sources = [InputFile(path, sample=sample) for path, sample in given]
    found = [one.sample for one in name_samples(sources, ())]
    assert found == ["S_1", "S_1_2", "S3", "d_d", "d_d_2"]
    (told,) = (record.getMessage() for record in caplog.records)
    names = "S 1 as S_1, S_1 as S_1_2, /d/d.fa as d_d + 1 more"
    assert told == f"samples renamed: {names}"


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "a:b|c",
        "[red]x[/]",
        "-rf",
        "a\tb\nc\x1b[2J",
        "caf\udce9",
        "x" * 300,
        "\u202ename",
        " ",
        "é" * 120,
    ],
)
def test_name_is_never_a_path_or_markup(name: str) -> None:
    (found,) = name_samples([InputFile("/d/in.fa", sample=name)], ())
    assert set(found.sample) <= {*"._-+", *filter(str.isalnum, found.sample)}
    assert found.sample and found.sample[0] not in ".-" and "/" not in found.sample
    assert len(os.fsencode(found.sample)) <= 110


def test_file_keeps_its_name() -> None:
    recorded = InputFile("/d/A/contigs.fa", "", 0, sample="contigs")
    found = names("/d/A/contigs.fa", "/d/B/contigs.fa", recorded=(recorded,))
    assert found == ["contigs", "B_contigs"]


def test_numbered_links_name_the_samples(tmp_path: Path) -> None:
    store = write(tmp_path / "store" / "0001", ">a\nACGT\n")
    (tmp_path / "patient.fa").symlink_to(store)
    sources = found_in(tmp_path, tmp_path / "patient.fa")
    (found,) = name_samples(sources, ())
    assert (found.path, found.sample) == (str(store), "patient")


# Ids


def test_qualified_ids_carry_the_file_name(tmp_path: Path) -> None:
    file = of(write(tmp_path / "in.fa", "> a  of a test\nAC\n>b\nGT\n"))
    found = [(r.id, r.header, r.name, r.sample) for r in RunIds(is_qualified=True).read(file)]
    assert found == [("s:a", "s:a  of a test", "a", "s"), ("s:b", "s:b", "b", "s")]
    plain = [(r.id, r.header, r.name, r.sample) for r in RunIds().read(file)]
    assert plain == [("a", " a  of a test", "a", "s"), ("b", "b", "b", "s")]


def test_repeated_record_keeps_its_id(tmp_path: Path) -> None:
    path = write(tmp_path / "failed_sequences.fa", ">old:a\nAC\n>old:b\nGT\n")
    ids = RunIds(is_qualified=True, replaced=frozenset({"old:a"}))
    assert [r.id for r in ids.read(of(path, generation=1))] == ["old:a", "s:old:b"]
    assert [r.id for r in ids.read(of(path))] == ["s:old:a", "s:old:b"]


def test_only_added_samples_have_replaced_ids() -> None:
    ids = RunIds(is_qualified=True, replaced=frozenset({"old:a"}), added=frozenset({"fixed"}))
    assert ids.from_inputs("fixed", "old:a") == "old:a"
    assert ids.from_inputs("b", "old:a") == "b:old:a"
    assert ids.from_inputs("fixed", "a") == "fixed:a"


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ("a a b b", "a a_2 b b_2"),
        ("a b a b a", "a b a_2 b_2 a_3"),
        ("a a_2 a", "a a_2 a_3"),
        ("a a a_3 a a_2 a_2", "a a_4 a_3 a_5 a_2 a_2_2"),
        ("a b c", "a b c"),
    ],
)
def test_taken_id_gets_a_free_number(tmp_path: Path, ids: str, expected: str) -> None:
    path = write(tmp_path / "in.fa", "".join(f">{name} x\nAC\n" for name in ids.split()))
    survey = InputScan(renames=True)
    (file,) = survey.run([of(path)])
    found = list(RunIds().read(file))
    assert [record.id for record in found] == expected.split()
    assert [record.header for record in found] == [f"{name} x" for name in expected.split()]
    assert file.n_renamed == sum(a != b for a, b in zip(ids.split(), expected.split(), strict=True))
    assert not survey.share_ids([file])


def test_id_digest_depends_only_on_the_id() -> None:
    """Also if an id ends before, at or after the 262,144 letters that are digested at once."""
    ids = ["a", "b", "ab", "ba", "aa", "read.1", "read.2", "\u00e9", "x" * 90_000, "y", "xy" * 70]
    ids += ["x" * 200_000, "z", "x" * 300_000, *(f"read.{n}" for n in range(3, 50_000))]
    digests = id_digests(ids).tolist()
    assert digests == [plain_digest(name) for name in ids]
    assert [id_digests([name]).item() for name in ids[:20]] == digests[:20]
    assert len(set(digests)) == len(ids)
    assert not len(id_digests([]))


def test_long_id_is_digested_in_bounded_memory() -> None:
    name = 4_000_000 * "x"
    tracemalloc.start()
    id_digests([name])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(name)  # two copies, a byte for each letter, and 10 MB of others


def plain_digest(record_id: str) -> int:
    letters = [*record_id.encode(), 0]
    return sum((letter + 1) * split_mix(i + 1) for i, letter in enumerate(letters)) % 2**64


@cache
def split_mix(number: int) -> int:
    """The generator as published: doi:10.1145/2660193.2660195."""
    z = number * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_repeated_id_names_both_lines(tmp_path: Path) -> None:
    names = [f"r{i}" for i in range(2500)]
    names[2400] = "r3"
    path = write(tmp_path / "in.fa", "".join(f">{name}\nAC\n" for name in names))
    file = of(path)
    digests = array("q", id_digests(names).tobytes())
    repeat = find_repeat(((file, record) for record in file.read()), digests)
    assert repeat is not None
    assert "in.fa:4801: the id r3 occurs twice (first at" in str(repeat.error(""))
    assert "in.fa:7)" in str(repeat.error(""))


# Sample sheets


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.tsv", "sample\tpath\none\ta.fa\ntwo\tsub/b.fa\n"),
        ("s.csv", '\ufeffPath,notes,SAMPLE\r\na.fa,x,one\r\n\r\n"sub/b.fa","y,z",two\r\n'),
        ("s.CSV", "sample,path\none,{folder}/a.fa\n two , sub/b.fa \n"),
    ],
)
def test_sample_sheet_paths_are_relative_to_it(tmp_path: Path, name, text) -> None:
    files = [write(tmp_path / "a.fa", ">a\nAC\n"), write(tmp_path / "sub" / "b.fa", ">a\nGT\n")]
    sheet = write(tmp_path / name, text.format(folder=tmp_path))
    found = found_in(tmp_path, sheet)
    assert found == [InputFile(str(files[0]), sample="one"), InputFile(str(files[1]), sample="two")]


def test_manifest_names_each_file_once(tmp_path: Path) -> None:
    files = [write(tmp_path / name, ">a\nAC\n") for name in ("a.fa", "b.fa")]
    rows = "a.fa\tr1\tvirus\nb.fa\t\tother\na.fa\tr2\tvirus\n"
    manifest = write(tmp_path / "m.tsv", f"path\tid\tlabel\n{rows}")
    found = found_in(tmp_path, manifest)
    assert found == [InputFile(str(files[0])), InputFile(str(files[1]))]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("sample,path\none,a.fa\ntwo\n", InputError, "s.csv:3: no path in this line"),
        ("sample,path\n,a.fa\n", InputError, "s.csv:2: no sample in this line"),
        ("name,path\none,a.fa\n", InputError, "s.csv:1: expected '>' or the columns"),
        ("sample;path\none;a.fa\n", InputError, "s.csv:1: expected '>' or the columns"),
        (
            "sample,path\none,a.fa\none,b.fa\n",
            InputError,
            "s.csv:3: the sample 'one' is named twice",
        ),
        ("sample,path\none,gone.fa\n", InputMissingError, "s.csv:2: "),
        ("sample,path\none,s3://b/a.fa\n", InputMissingError, "s.csv:2: s3://b/a.fa is a URL"),
        ("sample,path\n", InputError, "names no file"),
        ('sample,path\n"one,a.fa\n', InputError, "is not a sample sheet"),
        ("sample,path,path\none,a.fa,b.fa\n", InputError, "two columns path"),
        ("", InputError, "s.csv:1: expected '>' or the columns"),
    ],
)
def test_faulty_sample_sheet_is_refused_with_its_line(tmp_path, text, error, message) -> None:
    for name in ("a.fa", "b.fa"):
        write(tmp_path / name, ">a\nAC\n")
    with pytest.raises(error) as caught:
        read_sheet(write(tmp_path / "s.csv", text))
    assert message in str(caught.value) and caught.value.hint
    assert "expected '>'" not in message or "separated by commas" in caught.value.hint


def test_fasta_named_like_a_table_is_fasta(tmp_path: Path) -> None:
    path = write(tmp_path / "contigs.csv", ">a\nAC\n")
    found = found_in(tmp_path, path)
    assert found == [InputFile(str(path))]
