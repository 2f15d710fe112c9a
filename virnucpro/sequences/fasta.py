"""FASTA and FASTQ in, FASTA out. Records stream: memory holds one, whatever the size of the file.

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
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, TextIO

from virnucpro.ground.config import InputType
from virnucpro.ground.errors import InputError, InputMissingError
from virnucpro.ground.files import OnBlock, ZstdError, open_binary
from virnucpro.ground.log import counted, printable
from virnucpro.ground.records import FastaRecord

SUFFIXES_OF_READS = (".fastq", ".fq")
SUFFIXES = (".fa", ".fna", ".fasta", ".faa", ".ffn", ".fas", ".fsa", *SUFFIXES_OF_READS)
PACKED = (".gz", ".bz2", ".xz", ".zst")

# what public archives and BAM hold of one sequence; a run takes 3 to 4 bytes of memory per letter
MAX_LETTERS = 2**31 - 1
MAX_HEADER = 2**24  # characters
_BLOCK = 2**20  # bytes that are read at once
_BOM = b"\xef\xbb\xbf"
_LINES = 4  # of a read

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
_MATE_ENDINGS = ("/1", "/2")
_SHOWN = 100  # characters of a header that a message shows

# the first that fits counts
_WRONG_FORMATS = {
    b"@HD\t": ("SAM", "convert it, for example with `samtools fasta reads.sam > reads.fa`"),
    b"@SQ\t": ("SAM", "convert it, for example with `samtools fasta reads.sam > reads.fa`"),
    b"NCBI.sra": ("an SRA archive", "convert it, for example with `fasterq-dump reads.sra`"),
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
    """The files of sequences that ``path`` stands for: itself, or those in a folder, by name.

    Raises:
        InputMissingError: nothing is there, or the folder may not be read or holds none.
    """
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return [path]
        files = [entry for entry in _files_in(path) if _has_suffix(entry.name)]
    except OSError as error:
        raise cannot_open(path, error) from error
    if not files:
        raise InputMissingError(
            f"{printable(path)}: no FASTA or FASTQ file in this folder",
            hint=f"names must end in {', '.join(SUFFIXES)}, or those with .gz, .bz2, .xz, .zst; "
            "sub-folders are not searched",
        )
    return files


def list_others(folder: Path) -> list[str]:
    """The names of the files in a folder that ``list_fasta`` passes over."""
    return [entry.name for entry in _files_in(folder) if not _has_suffix(entry.name)]


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


def _has_suffix(name: str) -> bool:
    return _ends_in(name, SUFFIXES)


def is_name_of_reads(name: str) -> bool:
    """Whether a file has the name of FASTQ, packed or not."""
    return _ends_in(name, SUFFIXES_OF_READS)


def _ends_in(name: str, suffixes: Iterable[str]) -> bool:
    """Whether a name has one of these suffixes, packed or not."""
    return name.lower().endswith(tuple(a + b for a in suffixes for b in ("", *PACKED)))


def stem_of(name: str) -> str:
    """The name of a file without the suffixes of its format and compression.

    >>> stem_of("contigs.fna.gz")
    'contigs'
    """
    endings = sorted((a + b for a in (*SUFFIXES, "") for b in ("", *PACKED)), key=len, reverse=True)
    ending = next(ending for ending in endings if name.lower().endswith(ending))
    return name[: len(name) - len(ending)]


def read_fasta(
    path: Path, name: str = "", on_block: OnBlock | None = None, sample: str = ""
) -> Iterator[FastaRecord]:
    """Yield the records of a FASTA or FASTQ file, plain or packed, in file order, as of a sample.

    Errors call it by its path, or by another ``name``. ``on_block`` is given the bytes of the
    file, as they lie on the disk.

    White space and gaps inside a sequence are dropped, and gaps are counted; bytes that are not
    UTF-8 pass through a header unharmed (``surrogateescape``), but not through an id. The qualities
    of reads are dropped. If the first two reads have the same id, the mates of pairs alternate in
    the file: they get the ids ``id/1`` and ``id/2``.

    Raises:
        InputError: the file is neither FASTA nor FASTQ, or is damaged; names file and line.
        InputMissingError: the file cannot be opened.
    """
    label = name or printable(path)
    with unpacking(path, label), _open(path, label, on_block) as handle:
        if _starts_as_reads(handle):
            yield from _told_apart(_parse_reads(handle, label, sample))
        else:
            yield from _parse(_lines(handle), label, sample)


def is_of_reads(path: Path) -> bool:
    """Whether the content of a file is FASTQ.

    Raises:
        InputError, InputMissingError: as ``read_fasta``.
    """
    label = printable(path)
    with unpacking(path, label), _open(path, label, None) as handle:
        return _starts_as_reads(handle)


def are_mates(path: Path) -> bool:
    """Whether the mates of pairs alternate in a FASTQ file.

    Raises:
        InputError, InputMissingError: as ``read_fasta``.
    """
    label = printable(path)
    with unpacking(path, label), _open(path, label, None) as handle:
        first = list(islice(_parse_reads(handle, label, ""), 2))
        return len(first) > 1 and first[0].id == first[1].id


def of_mate(records: Iterable[FastaRecord], mate: int) -> Iterator[FastaRecord]:
    """The records of the file of a mate, 1 or 2, by ids that end in its number.

    >>> [record.header for record in of_mate([FastaRecord("x", "x 2:N:0", "AC")], 2)]
    ['x/2 2:N:0']
    """
    for record in records:
        has_number = record.id.endswith(_MATE_ENDINGS)
        yield record if has_number else record.with_id(f"{record.id}/{mate}")


def _told_apart(reads: Iterator[FastaRecord]) -> Iterator[FastaRecord]:
    """The reads of a file, those of a pair by an id each."""
    first = list(islice(reads, 2))
    if len(first) < 2 or first[0].id != first[1].id:
        return chain(first, reads)
    return _mates_in_turn(chain(first, reads))


def _mates_in_turn(reads: Iterable[FastaRecord]) -> Iterator[FastaRecord]:
    before = ""
    for read in reads:
        is_second = read.id == before
        before = "" if is_second else read.id
        yield read.with_id(f"{read.id}/{2 if is_second else 1}")


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
        if start.removeprefix(_BOM).lstrip(b"\r\n").startswith(magic):
            handle.close()
            raise InputError(f"{label}: this is {name}, not FASTA or FASTQ", hint=hint)
    if b"\0" in start:
        handle.close()
        if start[_TAR_PLACE:].startswith(_TAR):
            raise InputError(
                f"{label}: this is a tar archive, not FASTA or FASTQ",
                hint="unpack it first: `tar xf`",
            )
        raise InputError(
            f"{label}: this is a binary file, not FASTA or FASTQ",
            hint="give FASTA or FASTQ, plain or packed with gzip, bzip2, xz or zstd",
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


def _starts_as_reads(handle: BinaryIO) -> bool:
    start: bytes = handle.peek(_PEEK)[:_PEEK]  # type: ignore[attr-defined]
    return start.removeprefix(_BOM).lstrip(b"\r\n").startswith(b"@")


def _parse_reads(handle: BinaryIO, label: str, sample: str) -> Iterator[FastaRecord]:
    """The reads of a FASTQ file, of four lines each; blank lines may precede and follow them."""
    number = 0  # lines that were read
    rest: list[str] = []
    for lines, may_hold_nul in _lines_of_reads(handle, label):
        lines[:0] = rest
        if not number:
            number = next((i for i, line in enumerate(lines) if line), len(lines))
            del lines[:number]
        whole = len(lines) - len(lines) % _LINES
        rest = lines[whole:]
        del lines[whole:]
        yield from _whole_reads(lines, number, label, sample, may_hold_nul)
        number += whole
    if any(rest):
        raise _bad_read(rest, number + 1, label)


def _whole_reads(
    lines: Sequence[str], number: int, label: str, sample: str, may_hold_nul: bool
) -> Iterator[FastaRecord]:
    """The reads that these lines are, behind ``number`` other lines."""
    columns = (lines[i::_LINES] for i in range(_LINES))
    for header, letters, plus, qualities in zip(*columns, strict=True):
        title = header[1:]
        is_named = plus == "+" or (plus[1:] == title and plus[:1] == "+")
        if is_named and len(letters) == len(qualities) and header[:1] == "@":
            bases = letters.replace(".", "N")  # a base that is not known
            read = _record(title, number + 1, bases, label, sample)
            if may_hold_nul:
                _check_nul(read, number + 1, label)
            yield read
        elif any((header, letters, plus, qualities)):
            raise _bad_read((header, letters, plus, qualities), number + 1, label)
        number += _LINES


def _lines_of_reads(handle: BinaryIO, label: str) -> Iterator[tuple[list[str], bool]]:
    """The lines in lists of whole reads, the last but for it; and whether NUL is there so far."""
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8-sig")("surrogateescape"), translate=True
    )
    rest: list[str] = []
    n_letters, n_ends, number, has_nul = 0, 0, 1, False
    while block := handle.read(_BLOCK):
        text = decoder.decode(block)
        rest.append(text)
        has_nul |= "\0" in text
        n_letters += len(text)
        n_ends += text.count("\n")
        if n_ends >= _LINES:
            lines = "".join(rest).split("\n")
            n_whole = n_ends - n_ends % _LINES
            rest = ["\n".join(lines[n_whole:])]
            n_letters, n_ends, number = len(rest[0]), n_ends % _LINES, number + n_whole
            del lines[n_whole:]
            yield lines, has_nul
        if not n_ends and n_letters > MAX_HEADER + 1:
            raise _endless_header(number, label)
        if n_letters > 2 * MAX_LETTERS + MAX_HEADER:
            _check_length(rest, rest[0][1:].partition("\n")[0], number, label)
    last = "".join((*rest, decoder.decode(b"", final=True)))
    yield last.removesuffix("\n").split("\n"), has_nul


def _bad_read(lines: Sequence[str], number: int, label: str) -> InputError:
    """The error in the first read that is none; ``number`` is that of its first line."""
    fields: list[str | None] = [*lines, *[None] * (_LINES - len(lines))]
    header, letters, plus, qualities = fields
    shown = [ascii((line or "")[:20].encode(errors="surrogateescape"))[1:] for line in lines]
    name = printable((header or "")[1:].split(maxsplit=1)[0] if (header or "")[1:].split() else "")
    if not (header or "").startswith("@"):
        return InputError(
            f"{label}:{number}: expected '@', found {shown[0]}",
            hint="a read of FASTQ has four lines, the first such as '@read1'; wrapped lines are "
            "not read: unwrap them, for example with `seqkit seq -w 0`",
        )
    if plus is not None and not plus.startswith("+"):
        return InputError(
            f"{label}:{number + 2}: expected '+', found {shown[2]}, in the read {name}",
            hint="a read of FASTQ has four lines; wrapped lines are not read: unwrap them, for "
            "example with `seqkit seq -w 0`",
        )
    if letters is None or plus is None or qualities is None:
        return InputError(
            f"{label}:{number + len(lines) - 1}: the file ends within the read {name}",
            hint="the file is truncated: copy or download it again",
        )
    if plus not in ("+", f"+{(header or '')[1:]}"):
        return InputError(
            f"{label}:{number + 2}: the line {shown[2]} names another read than {name}",
            hint="the file is damaged: write it again",
        )
    return InputError(
        f"{label}:{number + 3}: the read {name} has {counted(len(letters), 'letter')} and "
        f"{counted(len(qualities), 'quality', 'qualities')}",
        hint="the file is truncated or damaged, or its lines are wrapped: copy it again, or "
        "unwrap it, for example with `seqkit seq -w 0`",
    )


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
            f"{label}:{line}: a header without an id", hint="write an id behind the '>' or '@'"
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
