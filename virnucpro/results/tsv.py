"""Write rows as text to files that appear when they are complete, and sort lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from gzip import GzipFile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call
from virnucpro.core.numeric import FloatArray, IntArray
from virnucpro.core.safe_dir import SafeDir
from virnucpro.results.names import tsv_field


@contextmanager
def open_table(
    tree: SafeDir, path: Path, columns: Sequence[str] = (), *, is_packed: bool = False
) -> Iterator[Callable[[], BinaryIO]]:
    """Yield a function that opens a text file at its first call.

    The file appears when it is complete. If it was not opened, an old file is deleted. A gzip
    header contains no name or time, so that equal tables have equal bytes.
    """
    with ExitStack() as stack:

        @cache
        def open_once() -> BinaryIO:
            out = stack.enter_context(tree.atomic_write(path))
            if is_packed:
                packed = stack.enter_context(GzipFile("", "wb", 4, out, mtime=0))
                out = cast("BinaryIO", packed)
            if columns:
                out.write("\t".join(columns).encode() + b"\n")
            return out

        yield open_once
    if not open_once.cache_info().currsize:
        tree.delete(path)


# Rows

EMPTY = np.iinfo(np.int64).min  # written as an empty field
# Column kinds. A positive kind counts decimals.
_LETTERS = -2
_TEXTS = -1


class Column(NamedTuple):
    """A column's fields, as the library reads them."""

    n_rows: int
    kind: int
    content: NDArray[Any]
    n_bytes: int  # maximum size of its text


def texts(values: Sequence[str]) -> Column:
    """Make a text column, written unchanged."""
    content = np.frombuffer(encode_texts("\0".join((*values, ""))), np.uint8)
    return Column(len(values), _TEXTS, content, len(content))


def quoted_texts(values: Sequence[str]) -> Column:
    """Make a text column as table fields, quoted where necessary."""
    return texts(values if '"' not in "".join(values) else list(map(tsv_field, values)))


def letters(sequences: Sequence[str]) -> Column:
    """Make a sequence column, with a line end before every 60 letters."""
    width = 60
    n_rows, _, content, n_bytes = texts(sequences)
    return Column(n_rows, _LETTERS, content, n_bytes + n_bytes // width + n_rows)


def format_integers(values: Sequence[int] | IntArray) -> Column:
    """Make an integer column. ``EMPTY`` gives an empty field."""
    whole = 0
    content = np.array(values, dtype=np.int64)
    return Column(len(values), whole, content, 20 * len(values))


def format_decimals(values: Sequence[float | None] | FloatArray, n_decimals: int) -> Column:
    """Make a number column below 1e9, rounded to decimals as in Python. NaN, None: empty."""
    largest = 1e9  # upper bound for numbers with decimals
    content = np.array(values, dtype=np.float64)
    assert not (np.abs(content) >= largest).any(), "its digits would not be exact"
    return Column(len(values), n_decimals, content, (12 + n_decimals) * len(values))


def format_rows(*columns: Column) -> bytes:
    """Format a line per row, with tabs between the fields."""
    return _format_row_bytes(columns, ("", *("\t",) * (len(columns) - 1))).tobytes()


def format_fields(*fields: tuple[str, Column]) -> bytes:
    """Format a line per row. Each column comes with the text before its fields."""
    before, columns = zip(*fields, strict=True)
    return _format_row_bytes(columns, before).tobytes()


def _format_row_bytes(columns: Sequence[Column], before: Sequence[str]) -> NDArray[np.uint8]:
    """Format a line per row. ``before`` is the text before each column's fields."""
    [n_rows] = {column.n_rows for column in columns}
    for column in columns:
        is_text = column.kind in (_TEXTS, _LETTERS)
        assert not is_text or np.count_nonzero(column.content == 0) == n_rows, "no text has a NUL"
    between = np.frombuffer(encode_texts("\0".join((*before, ""))), np.uint8)
    n_bytes = sum(column.n_bytes for column in columns) + n_rows * len(between)
    out = np.empty(n_bytes, dtype=np.uint8)
    n_written = np.empty(1, dtype=np.int64)
    addresses = np.array([column.content.ctypes.data for column in columns], dtype=np.uintp)
    kinds = np.array([column.kind for column in columns], dtype=np.int64)
    call("write_rows", n_rows, len(columns), kinds, addresses, between, out, n_written)
    return out[: n_written[0]]


def encode_texts(text: str) -> bytes:
    """Encode a text. Headers may contain bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def decimal_texts(values: Sequence[float | None] | FloatArray, n_decimals: int) -> list[str]:
    """Return each number as text, empty for NaN and None."""
    return format_rows(format_decimals(values, n_decimals)).decode("ascii").split("\n")[:-1]


def format_fasta(headers: Sequence[str], sequences: Sequence[str]) -> bytes:
    """FASTA records with 60 letters per line."""
    return _fasta(headers, sequences).tobytes()


def _fasta(headers: Sequence[str], sequences: Sequence[str]) -> NDArray[np.uint8]:
    """Run ``format_fasta``, and release intermediate arrays here: a record may be very long."""
    return _format_row_bytes((texts(headers), letters(sequences)), (">", ""))
