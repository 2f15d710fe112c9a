"""Parse FASTQ: complete reads, interleaved mates, and errors that name the faulty line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from virnucpro.core.errors import InputError
from virnucpro.core.logging import format_count, printable
from virnucpro.core.numeric import BoolArray
from virnucpro.core.types import Records
from virnucpro.sequences import record_text
from virnucpro.sequences.record_text import (
    LineTable,
    check_length,
    count_byte,
    decode_text,
    endless_header_error,
    find_letters,
    make_records,
)

LINES_PER_READ = 4  # per FASTQ read


def has_mates(chunks: Iterable[bytes]) -> bool:
    """Return True if the first two reads in these chunks are mates."""
    lines = b"".join(chunks).split(b"\n", 2 * LINES_PER_READ)[: 2 * LINES_PER_READ]
    ids = parse_reads(LineTable.of(b"\n".join((*lines, b""))), 0, "", "")[0].ids
    return len(ids) > 1 and ids[0] == ids[1]


def number_mates(blocks: Iterable[Records]) -> Iterator[Records]:
    first_mate = ""
    for records in blocks:
        ids = []
        for name in records.ids:
            is_second = name == first_mate
            first_mate = "" if is_second else name
            ids.append(f"{name}/{2 if is_second else 1}")
        yield records.with_ids(ids)


def cut_reads(
    blocks: Iterable[bytes], label: str, number: int = 0
) -> Iterator[tuple[list[bytes], int, int]]:
    """Yield complete reads, in the format of ``_cut``. The last part is the remainder of the file.

    Blank lines may precede the first read.
    """
    pending: list[bytes] = []
    n_bytes = n_ends = 0  # bytes and line ends in ``pending``; ``number`` lines precede it
    is_before = True  # the first read has not begun
    for block in blocks:
        if is_before:
            text = block.lstrip(b"\n")
            number += len(block) - len(text)
            block = text
            is_before = not text
        pending.append(block)
        n_bytes += len(block)
        n_ends += count_byte(b"\n", block)
        if n_ends >= LINES_PER_READ:
            data = b"".join(pending)
            end = len(data)
            for _ in range(n_ends % LINES_PER_READ + 1):
                end = data.rfind(b"\n", 0, end)
            complete = data[: end + 1]
            unread = data[end + 1 :]
            yield [complete], number, len(unread)
            number += n_ends - n_ends % LINES_PER_READ
            n_ends %= LINES_PER_READ
            pending = [unread]
            n_bytes = len(unread)
        if not n_ends and n_bytes > record_text.MAX_HEADER + 1:
            raise endless_header_error(number + 1, label)
        if n_bytes > 2 * record_text.MAX_LETTERS + record_text.MAX_HEADER:
            header = decode_text(pending[0][1:].partition(b"\n")[0])
            check_length(n_bytes, header, number + 1, label)
    if n_bytes:
        yield [b"".join(pending)], number, 0


def parse_reads(
    lines: LineTable, number: int, label: str, sample: str
) -> tuple[Records, InputError | None]:
    """Parse FASTQ after ``number`` lines. A read has four lines. Four blank lines are skipped.

    Returns:
        The reads before the first fault, and the fault.
    """
    n_lines = len(lines.starts) - len(lines.starts) % LINES_PER_READ
    fault = None
    extra_lines = lines.texts(lines.starts[n_lines:], lines.ends[n_lines:])
    if any(extra_lines):
        fault = _bad_read_error(extra_lines, number + 1 + n_lines, label)
    is_read = _are_reads(lines, n_lines)
    doubtful = np.flatnonzero(~is_read)
    rows = [LINES_PER_READ * doubtful + i for i in range(LINES_PER_READ)]
    columns = [lines.texts(lines.starts[row], lines.ends[row]) for row in rows]
    for index, *read_lines in zip(doubtful.tolist(), *columns, strict=True):
        is_read[index] = _is_read(*read_lines)
        if any(read_lines) and not is_read[index]:
            fault = _bad_read_error(read_lines, number + 1 + LINES_PER_READ * index, label)
            is_read = is_read[:index]
            break
    firsts = LINES_PER_READ * np.flatnonzero(is_read)
    headers = lines.texts(lines.starts[firsts] + 1, lines.ends[firsts])
    sequences = lines.texts(lines.starts[firsts + 1], lines.ends[firsts + 1])
    if find_letters(".", sequences):
        sequences = [letters.replace(".", "N") for letters in sequences]  # an unknown base
    line_numbers = (firsts + number + 1).tolist()
    is_plain = lines.are_plain(lines.starts[firsts])
    records, earlier = make_records(
        headers, sequences, line_numbers, label, sample, is_plain=is_plain
    )
    return records, earlier or fault


def _are_reads(lines: LineTable, n_lines: int) -> BoolArray:
    """Return a mask of the groups of four lines that are certainly reads. Others need a check."""
    header, letters, plus, qualities = (
        slice(i, n_lines, LINES_PER_READ) for i in range(LINES_PER_READ)
    )
    lengths = lines.ends - lines.starts
    is_same = lengths[letters] == lengths[qualities]
    is_plus = lines.begin_with("+", plus) & (lengths[plus] == 1)
    are_reads = lines.begin_with("@", header) & is_plus & is_same
    return are_reads if lines.data.isascii() else np.zeros_like(are_reads)


def _is_read(header: str, letters: str, plus: str, qualities: str) -> bool:
    is_named = plus == "+" or (plus[:1] == "+" and plus[1:] == header[1:])
    return is_named and len(letters) == len(qualities) and header[:1] == "@"


def _bad_read_error(lines: Sequence[str], number: int, label: str) -> InputError:
    """Return the error for the first invalid read, which begins at line ``number``."""
    fields: list[str | None] = [*lines, *[None] * (LINES_PER_READ - len(lines))]
    header, letters, plus, qualities = fields
    shown = [ascii((line or "")[:20].encode(errors="surrogateescape"))[1:] for line in lines]
    name = printable((header or "")[1:].split(maxsplit=1)[0] if (header or "")[1:].split() else "")
    unwrap = "for example with `seqkit seq -w 0`"
    if not (header or "").startswith("@"):
        offset = 0
        problem = f"expected '@', found {shown[0]}"
        hint = (
            "a FASTQ read has four lines, the first such as '@read1'; unwrap wrapped lines, "
            f"{unwrap}"
        )
    elif plus is not None and not plus.startswith("+"):
        offset = 2
        problem = f"expected '+', found {shown[2]}, in the read {name}"
        hint = f"a FASTQ read has four lines; unwrap wrapped lines, {unwrap}"
    elif letters is None or plus is None or qualities is None:
        offset = len(lines) - 1
        problem = f"the file ends within the read {name}"
        hint = "the file is truncated: copy or download it again"
    elif plus not in ("+", f"+{(header or '')[1:]}"):
        offset = 2
        problem = f"the line {shown[2]} names another read than {name}"
        hint = "the file is damaged: copy or download it again"
    else:
        n_letters = format_count(len(letters), "letter")
        n_qualities = format_count(len(qualities), "quality", "qualities")
        offset = 3
        problem = f"the read {name} has {n_letters} and {n_qualities}"
        hint = (
            "the file is truncated or damaged, or its lines are wrapped: copy it again, or unwrap "
            f"it, {unwrap}"
        )
    return InputError(f"{label}:{number + offset}: {problem}", hint=hint)
