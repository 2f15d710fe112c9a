"""Inputs are kept in order, copied if they cannot be read twice, and checked for changes."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from run_helpers import within

from virnucpro.core.errors import InputError, InputMissingError, ResumeError
from virnucpro.sequences import inputs
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.input_scan import InputScan
from virnucpro.sequences.input_search import find_inputs
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.recorded_inputs import check_recorded, join_inputs

A = b">a\nAC\n"
B = b">b\nGT\n"
C = b">c\nTT\n"
D = b">d\nGG\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def copies(run: Path) -> Path:
    return run / "inputs"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, content: bytes = A) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return write


def hashed(*paths: Path) -> list[InputFile]:
    return InputScan(is_strict=True).hash([InputFile(str(path)) for path in paths], lambda _: None)


def hashed_pipes(run: Path, copies: Path, *contents: bytes) -> list[InputFile]:
    """Return the inputs of a run that had to copy them, here files inside its folder."""
    paths = []
    for i, content in enumerate(contents):
        paths.append(run / f"{i}.fa")
        paths[-1].write_bytes(content)
    return InputScan(is_strict=True).hash(find_inputs(paths, run, copies), lambda _: None)


# Finding


def test_inputs_keep_the_given_order(write, run, copies):
    z = write("z.fa")
    folder = write("folder/b.fa").parent
    write("folder/a.fa.gz")
    write("folder/notes.txt")
    y = write("y.fa")
    expected = [z, folder / "a.fa.gz", folder / "b.fa", y]
    assert find_inputs([z, folder, y], run, copies) == [InputFile(str(path)) for path in expected]
    assert not copies.exists()


def test_paths_are_absolute_and_links_resolved(write, run, copies, tmp_path, monkeypatch):
    path = write("real.fa")
    (tmp_path / "link.fa").symlink_to("real.fa")
    monkeypatch.chdir(tmp_path)
    link = str(tmp_path / "link.fa")
    assert find_inputs([Path("link.fa")], run, copies) == [
        InputFile(str(path.resolve()), name=link)
    ]


def test_named_pipes_are_copied_completely(run, copies, tmp_path: Path) -> None:
    paths = [tmp_path / f"pipe{i}" for i in range(30)]
    contents = [b">%d\n" % i + b"ACGT" * 20_000 * (i % 3) + b"\n" for i in range(30)]
    for path, content in zip(paths, contents, strict=True):
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=(content,), daemon=True).start()
    with within(20):
        found = find_inputs(paths, run, copies)
    assert [Path(file.path).read_bytes() for file in found] == contents


def test_standard_input_may_be_compressed(run, copies, monkeypatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(gzip.compress(A)))
    monkeypatch.setattr(sys, "stdin", stdin)
    [file] = find_inputs([Path("-")], run, copies)
    copy = Path(file.path)
    assert (copy.parent, file.name) == (copies, "standard input")
    assert [(record.id, record.sequence) for record in read_fasta(copy)] == [("a", "AC")]


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress])
def test_other_formats_are_not_copied_completely(compress, run, copies, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = compress(b"BAM\1" + random.Random(1).randbytes(1_000_000))

    def write() -> None:
        with suppress(BrokenPipeError):
            path.write_bytes(content)

    threading.Thread(target=write, daemon=True).start()
    with within(20):
        [file] = find_inputs([path], run, copies)
    is_recognised = compress is not bz2.compress  # its blocks are larger than the first bytes
    assert (Path(file.path).stat().st_size < 10_000) is is_recognised
    with pytest.raises(InputError, match="this is BAM, not FASTA or FASTQ"):
        list(read_fasta(file.path))


# Hashing


def test_hashing_reports_its_progress(write) -> None:
    told: list[int] = []
    paths = [write("a.fa"), write("b.fa", b""), write("c.fa", b"x" * 10)]
    inputs = InputScan(is_strict=True).hash((InputFile(str(path)) for path in paths), told.append)
    assert [known.n_bytes for known in inputs] == [6, 0, 10]
    assert inputs[1].sha256.startswith("e3b0c44298fc1c14")  # SHA-256 of nothing
    assert len({known.sha256 for known in inputs}) == 3
    assert told == [6, 16]


def test_input_that_became_a_pipe_is_refused(write) -> None:
    (known,) = InputScan(is_strict=True).hash([InputFile(str(write("a.fa")))], lambda _: None)
    Path(known.path).unlink()
    os.mkfifo(known.path)
    for read in (known.check_unchanged, known.with_stamp):
        with within(5), pytest.raises(InputMissingError, match="it is not a plain file"):
            read()


def test_touched_input_is_hashed_once_more(write) -> None:
    (known,) = InputScan(is_strict=True).hash([InputFile(str(write("a.fa")))], lambda _: None)
    content = Path(known.path).read_bytes()
    os.utime(known.path, (1, 1))
    known.check_unchanged()
    with Path(known.path).open("r+b") as handle:  # content that a second hash would read
        handle.write(content.swapcase())
        os.utime(handle.fileno(), (1, 1))
    with pytest.raises(InputError, match="changed during"):
        known.check_unchanged()
    n_hashed = inputs._hash_path.cache_info().misses
    for _ in range(3):
        with pytest.raises(InputError, match="changed during"):
            known.check_unchanged()
    assert inputs._hash_path.cache_info().misses == n_hashed


# Resuming


def test_swapped_inputs_are_known_by_content(write, copies) -> None:
    recorded = hashed(write("a.fa", A), write("b.fa", B))
    joined = join_inputs(recorded, hashed(write("a.fa", B), write("b.fa", A)))
    assert [Path(known.path).read_bytes() for known in joined] == [A, B]


def test_added_inputs_are_the_next_generation(write, copies) -> None:
    first = hashed(write("a.fa", A))
    second = join_inputs(first, hashed(write("a.fa", A), write("b.fa", B)))
    third = join_inputs(second, hashed(write("d.fa", D), write("c.fa", C)))
    assert [(Path(known.path).name, known.generation) for known in third] == [
        ("a.fa", 0),
        ("b.fa", 1),
        ("d.fa", 2),
        ("c.fa", 2),
    ]


def test_needed_copies_are_never_overwritten(run, copies) -> None:
    inputs: list[InputFile] = []
    for contents in ([A, B], [A, B, C], [A, B, C, D]):
        inputs = join_inputs(inputs, hashed_pipes(run, copies, *contents))
        assert [Path(known.path).read_bytes() for known in inputs] == contents
        check_recorded(inputs)


def test_inputs_not_repeated_must_be_unchanged(write) -> None:
    hashed_before = hashed(write("a.fa", A), write("b.fa", B))
    inputs = [replace(file, stamp=None) for file in hashed_before]  # as run.json has them
    assert check_recorded(inputs) == hashed_before
    write("b.fa", C)
    with pytest.raises(ResumeError, match=r"b\.fa") as caught:
        check_recorded(inputs)
    assert "the command of this run with --resume" in caught.value.hint
    Path(inputs[0].path).unlink()
    with pytest.raises(ResumeError, match=r"a\.fa"):
        check_recorded(inputs)


# Content


def kinds_of(*inputs: InputFile) -> tuple[str, list[InputFile], list[str]]:
    """Return the common type of inputs, the ones that are kept, and the reasons for the others."""
    survey = InputScan()
    agreed, kept = survey.decide_type(inputs)
    return agreed, kept, [str(error) for _, error in survey.refused]


def test_inputs_of_one_kind_agree_on_it(write) -> None:
    dna = [write("a.fa", b">a\nACGTACGT\n"), write("b.fa", b">b\nacgu\n")]
    proteins = [write("c.fa", b">c\nMKVLEFPQIL\n")]
    empty = write("empty.fa", b"")
    for agreed, paths in (
        ("nucleotide", [*dna, empty]),
        ("protein", [empty, *proteins]),
        ("nucleotide", [empty]),
    ):
        inputs = hashed(*paths)
        assert kinds_of(*inputs) == (agreed, inputs, [])


def test_unexpected_alphabet_is_one_warning(write, caplog) -> None:
    caplog.set_level("WARNING", "virnucpro")
    dna, protein = hashed(write("a.fa", b">a\nACGTACGT\n"), write("b.fa", b">b\nMKVLEFPQIL\n"))
    InputScan().warn_of_type([dna], "nucleotide")
    assert not caplog.records
    InputScan().warn_of_type([dna, dna, protein], "protein")
    (record,) = caplog.records
    assert (
        "a.fa and 1 other file: read as proteins, but the letters do not look like proteins"
        in record.getMessage()
    )


def test_equal_numbers_of_both_alphabets_are_refused(write) -> None:
    dna = write("dna.fa", b">a\nACGTACGT\n")
    protein = write("protein.fa", b">c\nMKVLEFPQIL\n")
    with pytest.raises(
        InputError, match=r"dna\.fa contains nucleotides.*protein\.fa proteins"
    ) as e:
        kinds_of(*hashed(protein, dna))
    assert "--input-type" in e.value.hint


def test_compressed_size_does_not_count_letters():
    plain, packed = (InputFile(f"/data/{name}", "", 7) for name in ("a.fa", "B.FA.GZ"))
    assert (InputFile.total_letters([plain, plain]), InputFile.total_letters([plain, packed])) == (
        14,
        0,
    )
    reads = InputFile("/data/a.fq", "", 14)  # half of it is qualities
    assert InputFile.total_letters([plain, reads]) == 14
