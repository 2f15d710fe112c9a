"""FASTA in and out. Records stream: memory holds one record, whatever the size of the file.

And a record has its bounds, so that a small packed file cannot fill the memory either.
"""

from __future__ import annotations

import codecs
import io
import lzma
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from virnucpro.ground.config import InputType
from virnucpro.ground.errors import InputError, InputMissingError
from virnucpro.ground.files import OnBlock, ZstdError, open_binary
from virnucpro.ground.log import printable
from virnucpro.ground.records import FastaRecord

SUFFIXES = (".fa", ".fna", ".fasta", ".faa", ".ffn", ".fas", ".fsa")
_SUFFIXES_OF_READS = (".fastq", ".fq", ".sra")
PACKED = (".gz", ".bz2", ".xz", ".zst")

# what public archives and BAM hold of one sequence; a run takes 3 to 4 bytes of memory per letter
MAX_LETTERS = 2**31 - 1
MAX_HEADER = 2**24  # characters
_BLOCK = 2**20  # bytes that are read at once

# IUPAC codes, RNA's U, the mask X, and the stop that some tools write
_NUCLEOTIDES = b"ACGTURYSWKMBDHVNXacgturyswkmbdhvnx*"
_RESIDUES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz*"
_GAPS = "-.~"  # gaps of an alignment
_ONLY_PROTEIN = frozenset("EFIJLOPQZefijlopqz")
_PLAIN_BASES = frozenset("ACGTUNacgtun")
_TELLING = 50  # letters of a record that suffice to tell its type
_SAMPLE = 1_000_000  # letters that are read to tell nucleotides from proteins
_MASKS = "Xx"  # any base, or any residue: they do not tell the type
_INNER_BLANKS = " \t\v\f"  # blanks between letters; str.split() takes control codes too
_BLANK = _INNER_BLANKS + "\r\n"
_WIDTH = 60
_WRITTEN = 4096 * _WIDTH  # letters written at once: a whole record would take thrice its size
_PEEK = 4096
_SHOWN = 100  # characters of a header that a message shows

READS_AS_FASTA = (
    "convert them, for example with `seqkit fq2fa reads.fastq > reads.fa`, or "
    "`fasterq-dump --fasta` for .sra"
)
# the first that fits counts
_WRONG_FORMATS = {
    b"@HD\t": ("SAM", "convert it, for example with `samtools fasta reads.sam > reads.fa`"),
    b"@SQ\t": ("SAM", "convert it, for example with `samtools fasta reads.sam > reads.fa`"),
    b"@": ("FASTQ", "convert it, for example with `seqkit fq2fa reads.fastq > reads.fa`"),
    b"LOCUS ": ("GenBank", "convert it, for example with `any2fasta file.gbk > file.fa`"),
    b"ID   ": ("EMBL", "convert it, for example with `any2fasta file.embl > file.fa`"),
    b"##gff": ("GFF", "give the FASTA file that belongs to it"),
    **{
        f">{code};".encode(): (
            "PIR (NBRF)",
            "convert it, for example with `seqret pir::in.pir fasta::out.fa`; if it is FASTA, give "
            f"it ids that do not begin with {code};",
        )
        for code in ("P1", "F1", "DL", "DC", "RL", "RC", "N1", "N3", "XX")
    },
    b"PK\x03\x04": ("a zip archive", "unpack it first: `unzip`"),
    b"\xff\xfe\0\0": ("UTF-32 text", "convert it: `iconv -f UTF-32 -t UTF-8 in.fa > out.fa`"),
    b"\0\0\xfe\xff": ("UTF-32 text", "convert it: `iconv -f UTF-32 -t UTF-8 in.fa > out.fa`"),
    b"\xff\xfe": ("UTF-16 text", "convert it: `iconv -f UTF-16 -t UTF-8 in.fa > out.fa`"),
    b"\xfe\xff": ("UTF-16 text", "convert it: `iconv -f UTF-16 -t UTF-8 in.fa > out.fa`"),
}
_TAR, _TAR_PLACE = b"ustar", 257  # it stands behind the name of the first file


def list_fasta(path: Path) -> list[Path]:
    """The FASTA files that ``path`` stands for: itself, or those in a folder, sorted by name.

    Raises:
        InputMissingError: nothing is there, or the folder may not be read or holds no FASTA.
    """
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return [path]
        files = [entry for entry in _files_in(path) if _has_fasta_name(entry.name)]
    except OSError as error:
        raise cannot_open(path, error) from error
    if not files and list_reads(path):
        raise InputMissingError(
            f"{printable(path)}: no FASTA file in this folder, but reads in another format",
            hint=READS_AS_FASTA,
        )
    if not files:
        raise InputMissingError(
            f"{printable(path)}: no FASTA file in this folder",
            hint=f"names must end in {', '.join(SUFFIXES)}, or those with .gz, .bz2, .xz, .zst; "
            "sub-folders are not searched",
        )
    return files


def list_others(folder: Path) -> list[str]:
    """The names of the files in a folder that ``list_fasta`` passes over."""
    return [entry.name for entry in _files_in(folder) if not _has_fasta_name(entry.name)]


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder, sorted by name, with dangling links, without hidden files."""
    return sorted(
        entry
        for entry in folder.iterdir()
        if not entry.name.startswith(".") and (entry.is_file() or not entry.exists())
    )


def cannot_open(path: Path, error: OSError, name: str = "") -> InputMissingError:
    where = name or error.filename or path
    return InputMissingError(
        f"{printable(where)}: {error.strerror}", hint="check the path and its permissions"
    )


def list_reads(folder: Path) -> list[str]:
    """The names of the files of reads in a folder, in formats that are not read here."""
    return [name for name in list_others(folder) if _ends_in(name, _SUFFIXES_OF_READS)]


def _has_fasta_name(name: str) -> bool:
    return _ends_in(name, SUFFIXES)


def _ends_in(name: str, suffixes: Sequence[str]) -> bool:
    """Whether a name has one of these suffixes, packed or not."""
    return name.lower().endswith(tuple(a + b for a in suffixes for b in ("", *PACKED)))


def stem_of(name: str) -> str:
    """The name of a file without the suffixes of FASTA and compression.

    >>> stem_of("contigs.fna.gz")
    'contigs'
    """
    endings = sorted((a + b for a in (*SUFFIXES, "") for b in ("", *PACKED)), key=len, reverse=True)
    ending = next(ending for ending in endings if name.lower().endswith(ending))
    return name[: len(name) - len(ending)]


def read_fasta(
    path: Path, name: str = "", on_block: OnBlock | None = None, sample: str = ""
) -> Iterator[FastaRecord]:
    """Yield the records of a plain or compressed FASTA file, in file order, as of a sample.

    Errors call it by its path, or by another ``name``. ``on_block`` is given the bytes of the
    file, as they lie on the disk.

    White space and gaps inside a sequence are dropped, and gaps are counted; bytes that are not
    UTF-8 pass through a header unharmed (``surrogateescape``), but not through an id.

    Raises:
        InputError: the file is not a FASTA file, or is damaged; names file and line.
        InputMissingError: the file cannot be opened.
    """
    label = name or printable(path)
    with unpacking(path, label), _open(path, label, on_block) as handle:
        yield from _parse(_lines(handle), label, sample)


@contextmanager
def unpacking(path: Path, label: str) -> Iterator[None]:
    """Say in our words why a file, plain or compressed, cannot be read in the block.

    Raises:
        InputError: it is damaged.
        InputMissingError: it cannot be opened.
    """
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, ZstdError) as error:
        raise _damaged(label, error) from error
    except OSError as error:
        if error.errno is None:  # gzip and bz2 report damage this way
            raise _damaged(label, error) from error
        raise cannot_open(path, error) from error


def _damaged(label: str, error: Exception) -> InputError:
    return InputError(
        f"{label}: cannot be decompressed: {error}",
        hint="the file is truncated or damaged: copy or download it again",
    )


def _open(path: Path, label: str, on_block: OnBlock | None) -> BinaryIO:
    handle = open_binary(path, on_block)
    start = handle.peek(_PEEK)[:_PEEK]  # type: ignore[attr-defined]
    for magic, (name, hint) in _WRONG_FORMATS.items():
        if start.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n").startswith(magic):
            handle.close()
            raise InputError(f"{label}: this is {name}, not FASTA", hint=hint)
    if b"\0" in start:
        handle.close()
        if start[_TAR_PLACE:].startswith(_TAR):
            raise InputError(
                f"{label}: this is a tar archive, not FASTA", hint="unpack it first: `tar xf`"
            )
        raise InputError(
            f"{label}: this is a binary file, not FASTA",
            hint="give plain FASTA, or FASTA packed with gzip, bzip2, xz or zstd",
        )
    return handle


def _lines(handle: BinaryIO) -> Iterator[str]:
    """The text in pieces, a line end before each line; a piece never ends within a header."""
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8-sig")("surrogateescape"), translate=True
    )
    rest = "\n"
    while block := handle.read(_BLOCK):
        text = rest + decoder.decode(block)
        last = text.rfind("\n")
        is_open = last >= 0 and text[last + 1 : last + 2] in (">", "")
        rest = text[last:] if is_open and len(text) - last <= MAX_HEADER + 2 else ""
        yield text[: len(text) - len(rest)]
    yield rest + decoder.decode(b"", final=True)


def _parse(pieces: Iterable[str], label: str, sample: str) -> Iterator[FastaRecord]:
    header, header_line, number = "", 0, 0
    parts: list[str] = []
    may_hold_nul = False

    def record() -> FastaRecord:
        """The record whose last line was read."""
        sequence = "".join(parts)
        parts.clear()  # while somebody works with a long record, its letters are there once
        found = _record(header, header_line, sequence, label, sample)
        if may_hold_nul:
            _check_nul(found, header_line, label)
        return found

    for piece in pieces:
        may_hold_nul |= "\0" in piece
        rest, *entries = piece.split("\n>")
        blanks = _blanks_in(piece)
        number += rest.count("\n")
        if header_line:
            parts.append(_without(blanks, rest.replace("\n", "")))
            _check_length(parts, header, header_line, label)
        else:
            _check_blank(rest, number, label)
        for entry in entries:
            if header_line:
                yield record()
            header, end, rest = entry.partition("\n")
            number += 1
            header_line = number
            if len(header) > MAX_HEADER:
                raise _endless_header(number, label)
            letters = rest.replace("\n", "")
            number += len(end) + len(rest) - len(letters)
            parts = [_without(blanks, letters)]
    if header_line:
        yield record()


def _blanks_in(piece: str) -> list[str]:
    return [blank for blank in _INNER_BLANKS if blank in piece]


def _without(blanks: Iterable[str], letters: str) -> str:
    for blank in blanks:
        if blank in letters:
            letters = letters.replace(blank, "")
    return letters


def _check_blank(text: str, number: int, label: str) -> None:
    """Raise InputError if anything but white space precedes the first header."""
    rest = text.lstrip(_BLANK)
    if rest:
        line = number - rest.count("\n")
        start = rest[:20].splitlines()[0].encode(errors="surrogateescape")
        raise InputError(
            f"{label}:{line}: expected '>', found {str(start).removeprefix('b')}",
            hint="a FASTA record begins with a line such as '>contig1'",
        )


def _check_nul(record: FastaRecord, line: int, label: str) -> None:
    if "\0" in record.header or "\0" in record.sequence:
        raise InputError(
            f"{label}:{line}: a NUL byte in the record {printable(record.id)}",
            hint="the file is damaged or not text: write it again",
        )


def _check_length(parts: Iterable[str], header: str, line: int, label: str) -> None:
    if sum(map(len, parts)) > MAX_LETTERS:
        name = printable(header[:_SHOWN])
        raise InputError(
            f"{label}:{line}: the record {name} has more than {MAX_LETTERS:,} letters",
            hint="cut it into several, for example with `seqkit sliding`",
        )


def _endless_header(line: int, label: str) -> InputError:
    return InputError(
        f"{label}:{line}: a header of more than {MAX_HEADER:,} characters",
        hint="shorten it, unless the file is damaged and has lost its line ends",
    )


def _record(header: str, line: int, sequence: str, label: str, sample: str) -> FastaRecord:
    words = header.split(maxsplit=1)
    if not words:
        raise InputError(
            f"{label}:{line}: a header without an id", hint="write an id behind the '>'"
        )
    if not (words[0].isascii() or _is_utf8(words[0])):
        raise InputError(
            f"{label}:{line}: the id {printable(words[0])} is not UTF-8",
            hint="convert the file, for example with `iconv -f LATIN1 -t UTF-8`",
        )
    if "-" in sequence or "." in sequence or "~" in sequence:  # a loop would take thrice the time
        letters = _without(_GAPS, sequence)
        return FastaRecord(words[0], header, letters, line, len(sequence) - len(letters), sample)
    return FastaRecord(words[0], header, sequence, line, 0, sample)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def write_record(out: TextIO, header: str, sequence: str) -> None:
    """Write one record, 60 letters a line; ``out`` must be open with ``surrogateescape``."""
    out.write(f">{header}\n")
    for start in range(0, len(sequence), _WRITTEN):
        end = min(start + _WRITTEN, len(sequence))
        lines = (sequence[i : i + _WIDTH] for i in range(start, end, _WIDTH))
        out.write("\n".join((*lines, "")))


def find_invalid(record: FastaRecord, input_type: InputType) -> str:
    """The reason why a record cannot be used, or ""."""
    if not record.sequence:
        return "the record is empty"
    letters_of_type = _NUCLEOTIDES if input_type == "nucleotide" else _RESIDUES
    for start in range(0, len(record.sequence), _BLOCK):
        letters = record.sequence[start : start + _BLOCK].encode("ascii", "replace")
        if letters.translate(None, delete=letters_of_type):  # "?" is allowed nowhere
            break
    else:
        return ""
    first = min(set(record.sequence) - set(letters_of_type.decode()), key=record.sequence.index)
    return f"{first!a} at position {record.sequence.index(first) + 1} is not a {input_type} letter"


def guess_input_type(path: Path, name: str = "") -> InputType | None:
    """Tell nucleotides from proteins by the letters of the first records, but for masks.

    Returns None for a file without any letter.

    Raises:
        InputError: the letters fit neither, or both.
    """
    n_read = total = plain = protein = 0
    stranger = ""  # a record of nucleotides, which would pass for a protein
    for record in read_fasta(path, name):
        sample = record.sequence[:_SAMPLE]
        n_read += len(sample)
        total += len(sample) - sum(map(sample.count, _MASKS))
        plain += sum(map(sample.count, _PLAIN_BASES))
        protein += sum(map(sample.count, _ONLY_PROTEIN))
        if not stranger and _is_of_bases(sample):
            stranger = record.id
        if n_read >= _SAMPLE:
            break
    if not n_read:
        return None
    if protein > 0.05 * total and stranger:
        raise InputError(
            f"{name or printable(path)} holds proteins, but the record {printable(stranger)} is of "
            "nucleotides",
            hint="run them apart, or say what all are with --input-type",
        )
    if protein > 0.05 * total:
        return "protein"
    if plain > 0.8 * total and protein < 0.01 * total:
        return "nucleotide"
    raise InputError(
        f"{name or printable(path)}: cannot tell nucleotides from proteins "
        f"({plain / max(1, total):.0%} ACGTUN, {protein / max(1, total):.1%} letters of proteins "
        "only)",
        hint="say it with --input-type nucleotide or --input-type protein",
    )


def _is_of_bases(sequence: str) -> bool:
    """True for a text of the four bases alone, each in plenty: no protein is like that."""
    counts = Counter(sequence.upper().replace("U", "T"))
    n_rarest = min(counts[base] for base in "ACGT")
    is_plain = counts.keys() <= set("ACGTNX")
    return is_plain and len(sequence) >= _TELLING and n_rarest >= 0.05 * len(sequence)
