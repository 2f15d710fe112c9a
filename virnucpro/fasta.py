"""FASTA in and out. Records stream: memory holds one record, whatever the size of the file."""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO

from virnucpro.errors import InputError, InputMissingError
from virnucpro.files import ZstdError, open_binary
from virnucpro.log import printable
from virnucpro.records import FastaRecord

InputType = Literal["nucleotide", "protein"]

SUFFIXES = (".fa", ".fna", ".fasta", ".faa", ".ffn", ".fas", ".fsa")
COMPRESSED = ("", ".gz", ".bz2", ".xz", ".zst")

# IUPAC codes, RNA's U, the mask X, gaps, and the stop that some tools write
_NUCLEOTIDES = b"ACGTURYSWKMBDHVNXacgturyswkmbdhvnx-.*~"
_RESIDUES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-.*"
_ONLY_PROTEIN = frozenset("EFIJLOPQZefijlopqz")
_PLAIN_BASES = frozenset("ACGTUNacgtun")
_SAMPLE = 1_000_000  # letters that are read to tell nucleotides from proteins
_BLANK = " \t\r\n\v\f"  # what may stand between letters; str.strip() knows control codes too
_WIDTH = 60
_PEEK = 4096

_WRONG_FORMATS = {
    b"@": ("FASTQ", "convert it, for example with `seqkit fq2fa reads.fastq > reads.fa`"),
    b"LOCUS ": ("GenBank", "convert it, for example with `any2fasta file.gbk > file.fa`"),
    b"ID   ": ("EMBL", "convert it, for example with `any2fasta file.embl > file.fa`"),
    b"##gff": ("GFF", "give the FASTA file that belongs to it"),
    b"PK\x03\x04": ("a zip archive", "unpack it first: `unzip`"),
    b"\xff\xfe": ("UTF-16 text", "convert it: `iconv -f UTF-16 -t UTF-8 in.fa > out.fa`"),
    b"\xfe\xff": ("UTF-16 text", "convert it: `iconv -f UTF-16 -t UTF-8 in.fa > out.fa`"),
}


def list_fasta(path: Path) -> list[Path]:
    """The FASTA files that ``path`` stands for: itself, or those in a folder, sorted by name.

    Raises:
        InputMissingError: nothing is there, it may not be read, or the folder holds no FASTA.
    """
    try:
        if not path.is_dir():
            _check_readable(path)
            return [path]
        found = sorted(
            entry
            for entry in path.iterdir()
            if _has_fasta_name(entry.name) and (entry.is_file() or not entry.exists())
        )
        for entry in found:
            _check_readable(entry)
    except OSError as error:
        raise cannot_open(path, error) from error
    if not found:
        raise InputMissingError(
            f"{printable(path)}: no FASTA file in this folder",
            hint=f"names must end in {', '.join(SUFFIXES)}, or those with .gz, .bz2, .xz, .zst",
        )
    return found


def cannot_open(path: Path, error: OSError) -> InputMissingError:
    where = error.filename or path
    return InputMissingError(
        f"{printable(where)}: {error.strerror}", hint="check the path and its permissions"
    )


def _check_readable(path: Path) -> None:
    if path.is_file() or not path.exists():  # a pipe can be opened only once
        path.open("rb").close()


def _has_fasta_name(name: str) -> bool:
    endings = tuple(suffix + packed for suffix in SUFFIXES for packed in COMPRESSED)
    return not name.startswith(".") and name.lower().endswith(endings)


def read_fasta(path: Path, name: str = "") -> Iterator[FastaRecord]:
    """Yield the records of a plain or compressed FASTA file, in file order.

    Errors call it by its path, or by another ``name``.

    White space inside a sequence is dropped; bytes that are not UTF-8 pass through a header
    unharmed (``surrogateescape``), but not through an id.

    Raises:
        InputError: the file is no FASTA, or is damaged; names file and line.
        InputMissingError: the file cannot be opened.
    """
    shown = name or printable(path)
    with unpacking(path, shown), _open_text(path, shown) as lines:
        yield from _parse(lines, shown)


@contextmanager
def unpacking(path: Path, shown: str) -> Iterator[None]:
    """Say in our words why a file, plain or compressed, cannot be read in the block.

    Raises:
        InputError: it is damaged.
        InputMissingError: it cannot be opened.
    """
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, ZstdError) as error:
        raise _damaged(shown, error) from error
    except OSError as error:
        if error.errno is None:  # gzip and bz2 report damage this way
            raise _damaged(shown, error) from error
        raise cannot_open(path, error) from error


def _damaged(shown: str, error: Exception) -> InputError:
    return InputError(
        f"{shown}: cannot be decompressed: {error}",
        hint="the file is truncated or damaged: copy or download it again",
    )


def _open_text(path: Path, shown: str) -> TextIO:
    handle = open_binary(path)
    start = handle.peek(_PEEK)[:_PEEK]  # type: ignore[attr-defined]
    for magic, (name, hint) in _WRONG_FORMATS.items():
        if start.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n").startswith(magic):
            handle.close()
            raise InputError(f"{shown}: this is {name}, not FASTA", hint=hint)
    if b"\0" in start:
        handle.close()
        raise InputError(
            f"{shown}: this is a binary file, not FASTA",
            hint="give plain FASTA, or FASTA packed with gzip, bzip2, xz or zstd",
        )
    return io.TextIOWrapper(handle, encoding="utf-8-sig", errors="surrogateescape")


def _parse(lines: Iterable[str], shown: str) -> Iterator[FastaRecord]:
    header, header_line = "", 0
    parts: list[str] = []
    for number, line in enumerate(lines, start=1):
        if line.startswith(">"):
            if header_line:
                yield _record(header, header_line, parts, shown)
            header, header_line, parts = line[1:].rstrip("\r\n"), number, []
        elif header_line:
            parts.append(line.strip(_BLANK))
        elif line.strip(_BLANK):
            raise InputError(
                f"{shown}:{number}: expected '>', found {line.strip()[:20]!r}",
                hint="a FASTA record begins with a line such as '>contig1'",
            )
    if header_line:
        yield _record(header, header_line, parts, shown)


def _record(header: str, line: int, parts: list[str], shown: str) -> FastaRecord:
    sequence = "".join(parts)
    if " " in sequence or "\t" in sequence:
        sequence = sequence.replace(" ", "").replace("\t", "")
    words = header.split(maxsplit=1)
    if not words:
        raise InputError(
            f"{shown}:{line}: a header without an id", hint="write an id behind the '>'"
        )
    if "\0" in header or "\0" in sequence:
        raise InputError(
            f"{shown}:{line}: a NUL byte in the record {printable(words[0])}",
            hint="the file is damaged or not text: write it again",
        )
    if not _is_utf8(words[0]):
        raise InputError(
            f"{shown}:{line}: the id {printable(words[0])} is not UTF-8",
            hint="convert the file, for example with `iconv -f LATIN1 -t UTF-8`",
        )
    return FastaRecord(words[0], header, sequence, line)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def write_record(out: TextIO, header: str, sequence: str) -> None:
    """Write one record, 60 letters a line; ``out`` must be open with ``surrogateescape``."""
    lines = (sequence[i : i + _WIDTH] for i in range(0, len(sequence), _WIDTH))
    out.write("\n".join((f">{header}", *lines, "")))


def find_invalid(record: FastaRecord, input_type: InputType) -> str:
    """Why this record cannot be used, or nothing."""
    if not record.sequence:
        return "the record is empty"
    allowed = _NUCLEOTIDES if input_type == "nucleotide" else _RESIDUES
    letters = record.sequence.encode("ascii", "replace")  # "?" is allowed nowhere
    if not letters.translate(None, delete=allowed):
        return ""
    first = min(set(record.sequence) - set(allowed.decode()), key=record.sequence.index)
    return f"{first!a} at position {record.sequence.index(first) + 1} is no {input_type} letter"


def guess_input_type(path: Path, name: str = "") -> InputType | None:
    """Tell nucleotides from proteins by the letters of the first records.

    Returns nothing for a file without any letter.

    Raises:
        InputError: the letters fit neither, or both.
    """
    total = plain = protein = 0
    for record in read_fasta(path, name):
        sample = record.sequence[:_SAMPLE]
        total += len(sample)
        plain += sum(map(sample.count, _PLAIN_BASES))
        protein += sum(map(sample.count, _ONLY_PROTEIN))
        if total >= _SAMPLE:
            break
    if not total:
        return None
    if protein > 0.05 * total:
        return "protein"
    if plain > 0.8 * total and protein < 0.01 * total:
        return "nucleotide"
    raise InputError(
        f"{name or printable(path)}: cannot tell nucleotides from proteins "
        f"({plain / total:.0%} ACGTUN, {protein / total:.1%} letters of proteins only)",
        hint="say it with --input-type nucleotide or --input-type protein",
    )
