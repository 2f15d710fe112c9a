"""Turn the bytes of FASTA and FASTQ files into checked records."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import AnyStr, BinaryIO

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import InputError
from virnucpro.core.logging import printable
from virnucpro.core.numeric import BoolArray, IntArray
from virnucpro.core.types import Records

# the limit in public archives and BAM; a run needs 3 to 4 bytes of memory per letter
MAX_LETTERS = 2**31 - 1
MAX_HEADER = 2**24  # characters
PEEK_BYTES = 4096  # enough to recognise every format
READ_BYTES = 2**19  # bytes per read call
BOM = b"\xef\xbb\xbf"
INNER_BLANKS = " \t\v\f"  # blanks between letters; str.split() also splits at control codes
BLANKS = INNER_BLANKS + "\r\n"
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # ``surrogateescape`` decodes invalid bytes to these


@dataclass(slots=True, eq=False)
class LineReader:
    """Text in blocks, without a byte order mark, with a line feed at every line end."""

    handle: BinaryIO
    n_left: int = sys.maxsize  # bytes still to read
    n_bytes: int = 0  # in the blocks so far
    is_as_in_file: bool = True  # False: the blocks differ from the bytes in the file

    def __iter__(self) -> Iterator[bytes]:
        handle = self.handle
        if handle.peek(len(BOM)).startswith(BOM):  # type: ignore[attr-defined]
            self.n_left -= len(handle.read(len(BOM)))
            self.is_as_in_file = False
        pending = b""  # a CR that may be the first half of a line end
        while block := handle.read(min(self.n_left, READ_BYTES)):
            self.n_left -= len(block)
            block = pending + block
            pending = b"\r" if block.endswith(b"\r") else b""
            block = block[: len(block) - len(pending)]
            if pending or b"\r" in block:
                block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
                self.is_as_in_file = False
            if block:
                self.n_bytes += len(block)
                yield block
        if pending:
            yield b"\n"


def count_byte(letter: bytes, data: bytes) -> int:
    """Count a letter, fast even in long texts."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord(letter)))


def decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True, eq=False)
class LineTable:
    """A text and the byte positions of its lines."""

    data: bytes
    letters: NDArray[np.uint8]  # ``data`` as an array
    starts: IntArray  # (n_lines,)
    ends: IntArray  # (n_lines,) positions of the line feeds

    @classmethod
    def of(cls, data: bytes) -> LineTable:
        data = data if data.endswith(b"\n") else data + b"\n"
        letters = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(letters == ord("\n"))
        starts = np.zeros_like(ends)
        starts[1:] = ends[:-1] + 1
        return cls(data, letters, starts, ends)

    def begin_with(self, letter: str, lines: slice = slice(None)) -> BoolArray:
        """Return a mask of the lines that begin with an ASCII letter."""
        return np.asarray(self.letters[self.starts[lines]] == ord(letter))

    def texts(self, starts: IntArray, ends: IntArray) -> list[str]:
        """Return the texts between these byte positions."""
        pairs = zip(starts.tolist(), ends.tolist(), strict=True)
        if not self.data.isascii():
            return [decode_text(self.data[start:end]) for start, end in pairs]
        text = self.data.decode("ascii")
        return [text[start:end] for start, end in pairs]

    def are_plain(self, headers: IntArray) -> bool:
        """Return True if the records at these header positions are valid without further checks."""
        is_short = len(self.data) <= MAX_HEADER or int((self.ends - self.starts).max()) < MAX_HEADER
        is_text = self.data.isascii() and b"\0" not in self.data
        return is_text and is_short and bool((self.letters[headers + 1] > ord(" ")).all())


def make_records(
    headers: list[str],
    sequences: list[str],
    lines: list[int],
    label: str,
    sample: str,
    *,
    is_plain: bool,
) -> tuple[Records, InputError | None]:
    """Return the records before the first fault, and the fault. Plain records need no check."""
    fault = None
    if not is_plain:
        n_good = 0
        try:
            for record in zip(headers, sequences, lines, strict=True):
                _check_record(*record, label)
                n_good += 1
        except InputError as error:
            fault = error
            headers = headers[:n_good]
            sequences = sequences[:n_good]
            lines = lines[:n_good]
    n_gaps = [0] * len(headers)
    if gaps := find_letters("-.~", sequences):  # of alignments
        letters = [strip_letters(gaps, sequence) for sequence in sequences]
        n_gaps = [len(a) - len(b) for a, b in zip(sequences, letters, strict=True)]
        sequences = letters
    ids = [header.split(None, 1)[0] for header in headers]
    samples = [sample] * len(ids)
    own_ids = [""] * len(ids)
    return Records(ids, headers, sequences, lines, n_gaps, samples, own_ids), fault


def find_letters(letters: str, sequences: Sequence[str]) -> list[str]:
    """Return the letters that occur in any of the sequences."""
    joined = "".join(sequences)
    return [letter for letter in letters if letter in joined]


def strip_letters(blanks: Iterable[AnyStr], letters: AnyStr) -> AnyStr:
    for blank in blanks:  # faster than ``translate``, which checks each letter
        if blank in letters:
            letters = letters.replace(blank, letters[:0])
    return letters


def _check_record(header: str, sequence: str, line: int, label: str) -> None:
    """Check a record's header and letters.

    Raises:
        InputError: the header is too long or has no valid id, or the record has a NUL byte.
    """
    if len(header) > MAX_HEADER:
        raise endless_header_error(line, label)
    words = header.split(maxsplit=1)
    if not words:
        raise InputError(
            f"{label}:{line}: the header has no id", hint="write an id after the '>' or '@'"
        )
    if _NOT_UTF8.search(words[0]):
        raise InputError(
            f"{label}:{line}: the id {printable(words[0])} is not UTF-8",
            hint="convert the file, for example with `iconv -f LATIN1 -t UTF-8`",
        )
    if "\0" in header or "\0" in sequence:
        raise InputError(
            f"{label}:{line}: the record {printable(words[0])} has a NUL byte",
            hint="the file is damaged, or is not text",
        )


def check_length(n_letters: int, header: str, line: int, label: str) -> None:
    shown = 100  # header characters in a message
    if n_letters > MAX_LETTERS:
        name = printable(header[:shown])
        raise InputError(
            f"{label}:{line}: the record {name} has more than {MAX_LETTERS:,} letters",
            hint="cut it into several, for example with `seqkit sliding`",
        )


def endless_header_error(line: int, label: str) -> InputError:
    return InputError(
        f"{label}:{line}: the header is longer than {MAX_HEADER:,} characters",
        hint="shorten it; if the file has lost its line ends, copy or download it again",
    )
