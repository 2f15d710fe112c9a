"""FASTA as it occurs in practice is read, or refused with file, line and remedy."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import lzma
import os
import pickle
import random
import re
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser
from hypothesis import given
from hypothesis import strategies as st

import virnucpro.sequences.fasta
import virnucpro.sequences.record_text
from virnucpro.core.errors import InputError, InputMissingError
from virnucpro.core.types import FastaRecord, Records
from virnucpro.sequences.fasta import (
    StreamCache,
    detect_interleaved,
    find_invalid,
    guess_input_type,
    list_fasta,
    parse_block,
    read_blocks,
    read_fasta,
    write_record,
)
from virnucpro.sequences.record_text import MAX_HEADER
from virnucpro.sequences.spans import find_spans

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

not_as_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")


def pack_zstd(content: bytes) -> bytes:
    """Compress with a checksum, as the zstd program does."""
    return zstd.compress(content, options={zstd.CompressionParameter.checksum_flag: 1})


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda content: gzip.compress(content, mtime=0),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": pack_zstd,
}
every_packing = pytest.mark.parametrize("pack", PACKED.values(), ids=PACKED)
some_bytes = "".join(f">r{i} of {i}\n{'ACGTTGCAAC' * (i + 1)}\n" for i in range(9)).encode()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(content: bytes, name: str = "in.fa") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


def read(path: Path) -> list[tuple[str, str]]:
    return [(record.id, record.sequence) for record in read_fasta(path)]


PACKED_BADLY = "in.fa: cannot be decompressed: "


def refusal_of(path: Path, why: str | None = None) -> InputError:
    """Return the error of reading, which always names the file and has a hint."""
    with pytest.raises(InputError, match=why) as caught:
        list(read_fasta(path))
    assert path.name in str(caught.value)
    assert caught.value.hint
    return caught.value


@contextmanager
def with_size(**sizes: int) -> Iterator[None]:
    """Read with another block size, or with other limits."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(virnucpro.sequences.record_text, name, size)
        yield


# Accepted files


@pytest.mark.parametrize("pack", [bytes, *PACKED.values()], ids=["plain", *PACKED])
@pytest.mark.parametrize("name", ["in.fa", "in.fa.gz", "in.fa.bz2", "in.fa.xz", "in.fa.zst", "in"])
def test_content_decides_the_compression(write, pack, name: str) -> None:
    assert read(write(pack(b">a\nACGT\n>b\nGG\nTT\n"), name)) == [("a", "ACGT"), ("b", "GGTT")]


@every_packing
def test_multi_stream_files_are_read_to_the_end(write, pack) -> None:
    path = write(pack(b">a\nAC") + pack(b"GT\n>b\nGG") + pack(b"TT\n"))
    assert read(path) == [("a", "ACGT"), ("b", "GGTT")]


def test_records_stream(write) -> None:
    """The first records are yielded before a later fault is reached."""
    records = read_fasta(write(b">a\nAC\n>b\nGT\n>\nAC\n"))
    assert [next(records).id, next(records).id] == ["a", "b"]
    with pytest.raises(InputError, match=r"in\.fa:5: the header has no id"):
        next(records)


ids = st.text(
    st.characters(codec="utf-8", exclude_categories=("Zs", "Zl", "Zp", "Cc", "Cs")),
    min_size=1,
    max_size=20,
)
descriptions = st.binary(max_size=30).map(
    lambda text: text.translate(None, b"\0\r\n").decode("utf-8", "surrogateescape")
)
headers = st.tuples(ids, descriptions).map(" ".join)
sequences = st.text("ACGTNacgtnRYKM*XLEFP", max_size=200)


@given(st.lists(st.tuples(headers, sequences), max_size=5))
def test_written_records_are_read_back(tmp_path_factory, entries: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.fa"
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="\n") as out:
        for header, sequence in entries:
            write_record(out, header, sequence)
    assert [(record.header, record.sequence) for record in read_fasta(path)] == entries


def test_sequences_are_written_in_lines_of_sixty() -> None:
    out = io.StringIO()
    write_record(out, "a b", "A" * 60 + "C")
    write_record(out, "empty", "")
    assert out.getvalue() == f">a b\n{'A' * 60}\nC\n>empty\n"


# Refused files


FAULTS = {
    "a-table": (b"\n\nid\tlength\n", 3),
    "nul-in-header": (b">" + b"a" * 6000 + b"\n>b x\0y\nAC\n", 2),
    "nul-in-sequence": (b">" + b"a" * 6000 + b"\n>b\nAC\nG\0T\n>c\nAC\n", 2),
    "packed-with-dos-lines": (gzip.compress(b">a\r\nAC\r\n\r\n>\r\nAC\r\n"), 4),
}


@pytest.mark.parametrize(("content", "line"), FAULTS.values(), ids=FAULTS)
def test_faulty_line_is_refused_with_its_number(write, content: bytes, line: int) -> None:
    path = write(content)
    assert f"{path.name}:{line}: " in str(refusal_of(path))


def test_fastq_after_blank_lines_or_a_mark(write) -> None:
    for start in (b"\n\r\n", b"\xef\xbb\xbf", b"\n" * 4096, b"\xef\xbb\xbf" + b"\r\n" * 2**19):
        text = start + b"@read1\nACGT\n+\nIIII\n"
        for content in (text, gzip.compress(text)):
            assert read(write(content)) == [("read1", "ACGT")]
            assert detect_interleaved(write(content))


# Reads


READS = b"@a first\nACGT\n+a first\nII@I\n@b\n\n+b\n\n@c\r\nA.N\r\n+\r\n+@>\r\n"
READS += b"\n\n\n\n@\xc3\xa9\nT\n+\n\xc3\xa9\n"


@pytest.mark.parametrize("pack", [bytes, *PACKED.values()], ids=["plain", *PACKED])
def test_fastq_qualities_do_not_matter(write, pack) -> None:
    records = list(read_fasta(write(pack(READS))))
    found = [(r.id, r.header, r.sequence, r.line) for r in records]
    expected = [("a", "a first", "ACGT", 1), ("b", "b", "", 5), ("c", "c", "ANN", 9)]
    assert found == [*expected, ("\xe9", "\xe9", "T", 17)]


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (
            "@x 1:N:0:ACGT|AC|+|II|@x 2:N:0:ACGT|AC|+|II|@y 1:N|A|+|I|@z 1|A|+|I|@z 2|A|+|I|",
            ["x/1 1:N:0:ACGT", "x/2 2:N:0:ACGT", "y/1 1:N", "z/1 1", "z/2 2"],
        ),
        ("@x|A|+|I|@x||+||", ["x/1", "x/2"]),  # no letters
        ("@x|A|+|I|@x|C|+|I", ["x/1", "x/2"]),  # no end of the last line
        ("@x|ACGT|+|IIII|@x|ACGT|+|IIII|@y|A|+|I|", ["x/1", "x/2", "y/1"]),
        ("@x/1 1:N|A|+|I|@x/2|A|+|I|@y/1|A|+|I|", ["x/1 1:N", "x/2", "y/1"]),
        ("@x|A|+|I|@y|A|+|I|@y|A|+|I|", ["x", "y", "y"]),
        ("@x|A|+|I|", ["x"]),
    ],
)
@pytest.mark.parametrize("n_bytes", [10, 2**19])
def test_mates_in_one_file_get_own_ids(
    write, content: str, headers: list[str], n_bytes: int
) -> None:
    """The first two reads show a pair, even if the first one fills a block."""
    path = write(content.replace("|", "\n").encode())
    is_of_pairs = headers[0].startswith("x/1") and not content.startswith("@x/1")
    with with_size(READ_BYTES=n_bytes):
        assert [record.header for record in read_fasta(path)] == headers
        assert detect_interleaved(path) == ("mates" if is_of_pairs else "single")


def test_endless_line_of_reads_is_refused(write) -> None:
    with with_size(MAX_LETTERS=2_000_000, MAX_HEADER=1_000_000):
        for content, why in (
            (b"@a\n" + 9_000_000 * b"A", "has more than 2,000,000 letters"),
            (b"@a" + 4_000_000 * b"A", ":1: the header is longer than"),
            (b"@a\nA\n+\nI\n@b" + 4_000_000 * b"A", ":5: the header is longer than"),
        ):
            refusal_of(write(content), why)


@every_packing
def test_flipped_bit_is_refused_or_harmless(write, pack) -> None:
    """Bits of a time stamp or a block size, for example, are harmless."""
    content = pack(some_bytes)
    expected = read(write(content))
    n_refused = 0
    for i in range(len(content)):
        damaged = bytearray(content)
        damaged[i] ^= 1 << i % 8
        path = write(damaged)
        try:
            found = read(path)
        except InputError:
            refusal_of(path)
            n_refused += 1
        else:
            assert found == expected
    assert n_refused > 0.8 * len(content)


@every_packing
def test_garbage_after_compressed_data_is_refused(write, pack) -> None:
    for garbage in (b"garbage", b"\0\1", pack(some_bytes)[1:]):
        refusal_of(write(pack(some_bytes) + garbage), PACKED_BADLY)
        refusal_of(write(2 * pack(some_bytes) + garbage), PACKED_BADLY)


@every_packing
def test_truncated_second_stream_is_refused(write, pack) -> None:
    first = pack(b">a\nAC\n")
    second = pack(some_bytes)
    for length in range(2, len(first + second)):
        path = write((first + second)[:length])
        if length == len(first):
            assert read(path) == [("a", "AC")]  # as if it were complete
        else:
            refusal_of(path)


@every_packing
def test_damaged_later_stream_is_refused(write, pack) -> None:
    first = pack(b">a\nAC\n")
    second = pack(some_bytes)
    refusal_of(write(first + b"X" + second[1:]), PACKED_BADLY)
    middle = len(second) // 2
    flipped = second[:middle] + bytes([second[middle] ^ 1]) + second[middle + 1 :]
    refusal_of(write(first + flipped), PACKED_BADLY)


@pytest.mark.parametrize("n_zeros", [4, 12, 2**16 - 4, 2**16, 2**17 + 4])
def test_xz_padding_is_skipped(write, n_zeros: int) -> None:
    first = lzma.compress(b">a\nAC\n")
    second = lzma.compress(b">b\nGG\n")
    path = write(first + bytes(n_zeros) + second + bytes(n_zeros))
    assert read(path) == [("a", "AC"), ("b", "GG")]
    for n_odd in (1, 2, 3):
        refusal_of(write(first + bytes(n_zeros + n_odd) + second), PACKED_BADLY)
        refusal_of(write(first + bytes(n_zeros + n_odd)), PACKED_BADLY)


def test_message_names_a_deeply_nested_file(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / ("path" * 30)
    folder.mkdir(parents=True)
    (folder / "bad.fa").write_text("no FASTA")
    assert "bad.fa:1: " in str(refusal_of(folder / "bad.fa"))


# Files and folders


def test_folder_stands_for_its_fasta_files(write, tmp_path: Path) -> None:
    """Subfolders are not read. A single file is read whatever its name."""
    wanted = [*("B.FASTA", "a.fna.gz", "b.fa", "c.faa.zst"), "d.fas.xz", "e.fsa.bz2", "f.ffn"]
    wanted.append("x.fastq")
    (tmp_path / "assembly.fa").mkdir()
    for name in [*reversed(wanted), ".hidden.fa", "notes.txt", "y.gz", "z.fa.tmp"]:
        write(b"", name)
    assert list_fasta(tmp_path) == [tmp_path / name for name in wanted]
    assert list_fasta(tmp_path / "notes.txt") == [tmp_path / "notes.txt"]


@pytest.mark.parametrize(
    ("look", "name", "why", "remedy"),
    [
        (read_fasta, "missing.fa", "No such file or directory", "check the path"),
        (read_fasta, "a.fa,b.fa", "No such file or directory", "--input A --input B"),
        (read_fasta, "folder", "Is a directory", "check the path"),
        (list_fasta, "missing/in.fa", "No such file or directory", "check the path"),
        (list_fasta, "file.fa/in.fa", "Not a directory", "check the path"),
        (list_fasta, "folder", "no FASTA or FASTQ file in this folder", ".fa, .fna, .fasta"),
    ],
)
def test_path_without_input_is_named(
    write, tmp_path: Path, look: Callable[[Path], Any], name: str, why: str, remedy: str
) -> None:
    write(b"", "file.fa")
    (tmp_path / "folder").mkdir()
    write(b"", "folder/notes.txt")
    with pytest.raises(InputMissingError, match=re.escape(f"{tmp_path / name}: {why}")) as caught:
        list(look(tmp_path / name))
    assert remedy in caught.value.hint


def test_accession_in_place_of_a_file_is_recognised() -> None:
    with pytest.raises(InputMissingError) as caught:
        list_fasta(Path("NC_001416.1"))
    assert "download its sequence first" in caught.value.hint


@not_as_root
def test_unreadable_folder_is_refused(write, tmp_path: Path) -> None:
    write(b">a\nAC\n")
    tmp_path.chmod(0)
    try:
        with pytest.raises(InputMissingError, match="Permission denied"):
            list_fasta(tmp_path)
    finally:
        tmp_path.chmod(0o700)


# Letters


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b">a\nACGTNNACGTAC\n", "nucleotide"),
        (b">a\nacguacguaaacc\n", "nucleotide"),
        (b">a\nACGTACGTACGTACGTACGTRYKM\n", "nucleotide"),
        (b">a\n" + b"ACGT" * 100 + b"\n>odd\nACGL\n", "nucleotide"),
        (b">a\n" + b"N" * 500 + b"\n", "nucleotide"),
        (b">a\nMKVLEFPQILAAGG\n", "protein"),
        (b">a\nmkvlefpqilaagg*\n", "protein"),
        (b">short\n\n>a\nMKVLEFPQIL\n", "protein"),
        (b">a\n" + b"-" * 900 + b"ACGT" * 20 + b"." * 900 + b"~\n", "nucleotide"),
        (b">a\n" + b"-" * 900 + b"MKVLEFPQIL" + b"-" * 900 + b"\n", "protein"),
        (b">a\n" + b"ACGT" * 20 + b"X" * 900 + b"x\n", "nucleotide"),
        (b">a\n" + b"MKVLEFPQIL" + b"X" * 900 + b"\n", "protein"),
        (b">a\n--..\n", None),
        (b"", None),
        (b">a\n>b\n\n", None),
    ],
)
def test_letters_distinguish_nucleotides_and_proteins(write, content: bytes, expected) -> None:
    assert guess_input_type(write(content)) == expected


def test_masked_nucleotides_among_proteins(write) -> None:
    path = write(b">p\nMKVLEFPQILAAGGEFPQIL\n>n\n" + b"ACGT" * 20 + b"X" * 20 + b"\n")
    with pytest.raises(InputError, match="the record n contains nucleotides"):
        guess_input_type(path)


def test_alignment_gaps_are_removed_and_counted(write) -> None:
    path = write(b">a-1.2~ of-a.test~\n--AC.G\n~T--\n>b\nAC GT\n>c\n---\n")
    found = [(record.header, record.sequence, record.n_gaps) for record in read_fasta(path)]
    assert found == [("a-1.2~ of-a.test~", "ACGT", 6), ("b", "ACGT", 0), ("c", "", 3)]


@pytest.mark.parametrize(
    "letters", [b"GAGAGRYKMSWRYKM", b"ACGTACGTACGTACGTACGTACGTACGTACGTL", b"XXXX"]
)
def test_ambiguous_letters_are_refused(write, letters: bytes) -> None:
    path = write(b">a\n" + letters + b"\n")
    with pytest.raises(InputError, match=r"in\.fa: cannot tell nucleotides") as caught:
        guess_input_type(path)
    assert "--input-type" in caught.value.hint


@pytest.mark.parametrize(
    ("sequence", "input_type", "note"),
    [
        ("ACGTUNRYSWKMBDHVX*acgtu", "nucleotide", ""),
        ("ACDEFGHIKLMNPQRSTVWYXBZUOJ*mk", "protein", ""),
        ("", "nucleotide", "the record is empty"),
        ("", "protein", "the record is empty"),
        ("ACGTE", "nucleotide", "'E' at position 5 is not a nucleotide letter"),
        ("AC1GT2", "nucleotide", "'1' at position 3 is not a nucleotide letter"),
        ("MKV>", "protein", "'>' at position 4 is not a protein letter"),
        ("ACGT" * 2**18 + "1", "nucleotide", "'1' at position 1048577 is not a nucleotide letter"),
        ("ACGT" * 2**18, "nucleotide", ""),
        ("AC\u00e9", "nucleotide", r"'\xe9' at position 3 is not a nucleotide letter"),
        ("AC\udce9", "protein", r"'\udce9' at position 3 is not a protein letter"),
    ],
    ids=lambda text: text[-50:],
)
def test_first_invalid_letter_is_named(sequence, input_type, note) -> None:
    assert find_invalid(FastaRecord("a", "a", sequence), input_type) == note


# Limits

ENDLESS = {
    "one line": b"ACGT" * 2**18,
    "lines of one letter": b"A\n" * 2**19,
    "lines of spaces and letters": b" \tAC  \n" * 2**17,
    "letters of four bytes": "\U0001f9a0".encode() * 2**18,
}


@pytest.mark.parametrize("content", ENDLESS.values(), ids=ENDLESS)
def test_endless_record_takes_bounded_memory(write, content: bytes) -> None:
    """Python stores 4 bytes per letter in the last case, and needs as many to join them."""
    start = gzip.compress(b">a\nAC\n\n>bomb [red]\n")
    path = write(start + 64 * gzip.compress(content))
    with with_size(MAX_LETTERS=2**22):
        error, peak = traced(lambda: refusal_of(path))
    assert f"{path.name}:4: the record bomb [red] has more than 4,194,304 letters" in str(error)
    assert peak < 8 * 2**22 + 16 * 2**20  # and the blocks that are read


def test_long_record_is_in_memory_once(write) -> None:
    path = write(b">a\n" + b"ACGT" * 2**21 + b"\n>b\nAC\n")
    tracemalloc.start()
    records = read_fasta(path)
    first = next(records)
    n_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(first.sequence) == 2**23
    assert n_bytes < 2**23 + 4 * 2**20  # and the blocks that are read
    assert next(records).sequence == "AC"


@pytest.mark.parametrize("block", [7, 64, 2**19])
def test_records_do_not_depend_on_the_process(write, block: int) -> None:
    long = ">\u00e9 long\n" + "AC \u00e9GT\n" * 40 + "\n>b\tx\r\nAC-GT\r\n>c\n>d\nacgu"
    path = write(long.encode())
    with with_size(READ_BYTES=block):
        messages = [pickle.dumps(each) for each in read_blocks(path, sample="s")]
        sent = list(map(pickle.loads, messages))
        here = list(read_fasta(path, sample="s"))
        assert [
            record for records in parse_block(sent) for record in records.iter_records()
        ] == here
    assert [(record.id, record.line, record.n_gaps) for record in here] == [
        ("\u00e9", 1, 0),
        ("b", 43, 1),
        ("c", 45, 0),
        ("d", 46, 0),
    ]


def test_endless_header_takes_bounded_memory(write) -> None:
    path = write(gzip.compress(b">a\nAC\n>") + 64 * gzip.compress(b"x" * 2**20))
    error, peak = traced(lambda: refusal_of(path))
    assert f"{path.name}:3: the header is longer than 16,777,216 characters" in str(error)
    assert peak < 6 * MAX_HEADER


def test_endless_blank_lines_take_no_memory(write) -> None:
    blank = gzip.compress(b"\n" * 2**19 + b"\r\n" * 2**18 + b" " * 2**20)
    path = write(16 * blank + gzip.compress(b"\n>a\n") + 16 * blank)
    found, peak = traced(lambda: read(path))
    assert found == [("a", "")]
    assert peak < 16 * 2**20


def test_record_and_header_at_their_limits_are_read(write) -> None:
    header = "a " + "x" * (MAX_HEADER - 2)
    bases = "ACGT" * 2**19
    path = write(f">{header}\n{bases}\n>b\nAC\n".encode())
    with with_size(MAX_LETTERS=2**21):
        found = [(record.header, record.sequence) for record in read_fasta(path)]
        assert found == [(header, bases), ("b", "AC")]
        refusal_of(write(f">{header}x\nACGT\n".encode()), "the header is longer than")
        refusal_of(write(f">a\n{bases}A\n".encode()), "has more than 2,097,152 letters")


def test_long_record_is_written_in_place() -> None:
    bases = "ACGTTGCAAC" * 1_000_000
    with Path(os.devnull).open("w") as out:
        _, peak = traced(lambda: write_record(out, "a", bases))
    assert peak < 0.2 * len(bases)


def traced(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a call, and the peak of Python's memory in it."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Random bytes


@pytest.fixture(scope="module")
def anything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("anything") / "in.fa"


texts = [">", "\n", "\r\n", "\r", "\n>", " ", "\t", "\f", "a", "ACGT", "MKV*", ";", "\0", "\x1b[2J"]
texts += ["\ufeff", "caf\xe9", "\x85", "\U0001f9a0", "\udce9"]  # the last is no UTF-8
pieces = st.sampled_from([text.encode("utf-8", "surrogateescape") for text in texts])
like_fasta = st.lists(pieces, max_size=25).map(b"".join)
starts = st.sampled_from([b"", b"\x1f\x8b\x08\x00", b"BZh9", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"])
blocks = st.sampled_from([1, 2, 3, 7, 2**20])
packings = st.sampled_from([bytes, *PACKED.values()])


@given(starts, st.binary(max_size=300) | like_fasta, blocks)
def test_any_bytes_are_read_or_refused_with_a_hint(anything, start, content, block) -> None:
    anything.write_bytes(start + content)
    with with_size(READ_BYTES=block):
        try:
            found = read(anything)
        except InputError as error:
            assert error.hint and str(error).isprintable()
        else:
            assert all(name and not set(name) & set("\0 \t\r\n") for name, _ in found)
            assert not any(set(letters) & set("\0 \t\r\n") for _, letters in found)


@given(like_fasta, blocks, packings)
def test_records_equal_those_of_biopython(anything, content: bytes, block: int, pack) -> None:
    anything.write_bytes(pack(content))
    text = content.decode("utf-8-sig", "surrogateescape")
    lines = re.split("\r\n|\r|\n", text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of text before the first header, which it drops
        theirs = list(SimpleFastaParser(io.StringIO(text, newline=None)))
    with with_size(READ_BYTES=block):
        try:
            ours = list(read_fasta(anything))
        except InputError as error:
            first = next((line for line in lines if line.strip(" \t\f")), "")
            is_damaged = "\0" in text or re.search("[\udc80-\udcff]", text)
            has_no_id = any(line[:1] == ">" and not line[1:].strip() for line in lines)
            assert first[:1] != ">" or is_damaged or has_no_id, error
            return
    assert [record.header.rstrip() for record in ours] == [title for title, _ in theirs]
    assert [record.id for record in ours] == [title.split(None, 1)[0] for title, _ in theirs]
    assert [without_blanks(record.sequence) for record in ours] == [
        without_blanks(letters) for _, letters in theirs
    ]
    for record in ours:
        assert lines[record.line - 1] == f">{record.header}"


def without_blanks(letters: str) -> str:
    """Remove Unicode white space at the ends of lines, as Biopython does."""
    return "".join(letters.split())


written_lines = st.lists(st.text("ACGTNacgt*-.~", min_size=1, max_size=9), max_size=5)
spaces = st.sampled_from(["", "", "", " ", "\t", "  "])
fillings = st.lists(spaces, max_size=3)  # blank lines


@given(st.data(), blocks, packings)
def test_line_ends_and_compression_change_nothing(
    anything, data: st.DataObject, block: int, pack
) -> None:
    entries = data.draw(st.lists(st.tuples(headers, written_lines, fillings), max_size=5))
    is_faulty = data.draw(st.booleans())
    written = data.draw(fillings)
    expected = []
    for header, lines, blank in entries:
        letters = re.sub("[-.~]", "", "".join(lines))
        expected.append((header, letters, len(written) + 1, len("".join(lines)) - len(letters)))
        padded = [data.draw(spaces) + line + data.draw(spaces) for line in lines]
        written += [f">{header}", *padded, *blank]
    if is_faulty:
        written.append(f">{data.draw(spaces)}")
    ends = data.draw(st.sampled_from([["\n", "\r\n"], ["\r"]]))  # "\r" and "\n" are not two
    text = "".join(line + data.draw(st.sampled_from(ends)) for line in written)
    anything.write_bytes(pack(text.encode("utf-8", "surrogateescape")))
    with with_size(READ_BYTES=block):
        if is_faulty:
            assert f"{anything.name}:{len(written)}: the header has no id" in str(
                refusal_of(anything)
            )
        else:
            found = [
                (record.header, record.sequence, record.line, record.n_gaps)
                for record in read_fasta(anything)
            ]
            assert found == expected


@pytest.mark.parametrize("suffix", ["fa", "fa.gz", "fq", "fq.gz"])
@pytest.mark.parametrize(
    ("line_end", "lead"), [("\n", "\n\n"), ("\r\n", "\n\n\n"), ("\n", "\ufeff" + "\n" * 2501)]
)
def test_spans_cover_every_record_once(tmp_path, suffix, line_end, lead):
    """Blocks end within records, and qualities look like headers."""
    rng = random.Random(1)
    text = lead
    expected = []
    for i in range(80):
        bases = "".join(rng.choices("ACGT", k=rng.choice([3, 150, 999, 5000])))
        expected.append((f"r{i}", bases))
        quality = "".join(rng.choices("@+>!AB", k=len(bases)))
        fastq = f"@r{i}\n{bases}\n+\n{quality}\n"
        text += fastq if "fq" in suffix else f">r{i}\n{bases[:90]}\n{bases[90:]}\n"
    content = text.replace("\n", line_end).encode()
    path = tmp_path / f"in.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with with_size(READ_BYTES=1000):
        assert read(path) == expected
        assert_spans_are_whole(path, len(content), is_cut=lead == "\n\n")


def assert_spans_are_whole(path: Path, n_bytes: int, *, is_cut: bool) -> None:
    """Check the spans. A compressed file is deleted when its first span is open."""
    records = list(read_fasta(path))
    whole = path.read_bytes()
    is_packed = path.suffix == ".gz"
    for block in read_blocks(path):
        assert (block.span is not None) == (is_cut and not is_packed)
        again = read_blocks(path, span=block.span) if block.span else [block]
        [expected] = parse_block([replace(block, chunks=[*block.chunks])])
        assert Records.concatenate(list(parse_block(again))) == expected
    for least in (1, 700, 50_000, 10**9):
        spans, n_found = find_spans(path, "", least)
        assert n_found == n_bytes
        assert all(span.end - span.start >= least for span in spans[:-1])
        streams = StreamCache()
        blocks = (b for span in spans for b in read_blocks(path, span=span, streams=streams))
        first = next(blocks)
        if is_packed:
            path.unlink()
        found = parse_block(itertools.chain([first], blocks))
        assert [record for each in found for record in each.iter_records()] == records
        path.write_bytes(whole)


@given(st.text(">\n\t <ACGTx1\0-\r", max_size=200))
def test_small_text_is_split_as_a_large_one(text: str) -> None:
    text = f">{text}"
    lines = virnucpro.sequences.record_text.LineTable.of(text.encode())
    split = virnucpro.sequences.fasta._split(lines, 7)
    assert virnucpro.sequences.fasta._split_small(text, 7) == split
