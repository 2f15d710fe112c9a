"""Split a file at record boundaries, so that several processes can read it."""

from __future__ import annotations

from functools import partial
from itertools import takewhile
from pathlib import Path

from virnucpro.core.atomic_io import open_binary
from virnucpro.core.logging import printable
from virnucpro.sequences import record_text
from virnucpro.sequences.fasta import (
    WHOLE,
    Span,
    detect_interleaved,
    next_header,
    open_fasta,
    open_sequences,
)
from virnucpro.sequences.fastq import (
    LINES_PER_READ,
)
from virnucpro.sequences.record_text import (
    BOM,
    count_byte,
)


def find_spans(path: Path, name: str, min_bytes: int) -> tuple[list[Span], int]:
    """Split a file into spans of complete records, each at least ``min_bytes`` bytes long.

    Sizes are in uncompressed bytes. An interleaved file is not split, because its ids depend on
    earlier records. Nor is a file with old Mac line ends (CR), because the splitter counts line
    feeds.

    Returns:
        The spans, and the size of the file.

    Raises:
        InputError, InputMissingError: as ``read_fasta``, except faults found while parsing.
    """
    label = name or printable(path)
    kind = detect_interleaved(path, name)
    n_blank = _count_blank(path) if kind else 0
    spans = [WHOLE]
    is_cut = kind != "mates"
    start = n_lines = 0  # position of the data, which begins with the previous block's last byte
    last = b""
    with open_fasta(path, label), open_sequences(path, label) as handle:
        while block := handle.read(record_text.READ_BYTES):
            data = last + block
            while offset := _find_record(
                data, spans[-1].start + min_bytes - start, n_lines - n_blank if kind else None
            ):
                spans[-1] = spans[-1]._replace(end=start + offset)
                spans.append(Span(start + offset, None, n_lines + data.count(b"\n", 0, offset)))
            is_cut &= b"\r" not in data or data.count(b"\r", 0, -1) == data.count(b"\r\n")
            start += len(data) - 1
            last = data[-1:]
            n_lines += count_byte(b"\n", data) - last.count(b"\n")
    return spans if is_cut else [WHOLE], start + len(last)


def _find_record(data: bytes, first: int, n_lines: int | None) -> int:
    """Return the start of the first record at ``first`` or later, but after 0, or else 0.

    In FASTQ, ``n_lines`` lines of reads precede the data.
    """
    before_first = max(0, first - 1)
    start = (
        next_header(data, before_first) if n_lines is None else data.find(b"\n", before_first) + 1
    )
    if n_lines is not None:
        n_lines += data.count(b"\n", 0, start)
        while start and n_lines % LINES_PER_READ:
            start = data.find(b"\n", start) + 1
            n_lines += 1
    return start if start < len(data) else 0


def _count_blank(path: Path) -> int:
    """Count the blank lines before the first read."""
    with open_binary(path) as handle:
        lines = iter(partial(handle.readline, record_text.READ_BYTES), b"")
        blank = takewhile(lambda line: not line.removeprefix(BOM).strip(b"\r\n"), lines)
        return sum(1 for _ in blank)
