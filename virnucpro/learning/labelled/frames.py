"""The frames of labelled records, in columns, and what each frame weighs in a training.

Columns lie in files: they are written as they grow, and mapped by every process that reads them.
A file is a plain array of numpy. What is sent to another process is its path, never its content,
so that all processes of a machine share one copy of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from virnucpro.ground.config import Store
from virnucpro.ground.numeric import from_bfloat16
from virnucpro.ground.tree import Tree
from virnucpro.sequences.composition import N_CODONS

Values = NDArray[Any]
Rows = NDArray[np.int64]
_MOST_WEIGHT = 10.0  # largest weight of a frame, where the mean is 1
BASES_POWER = 0.25  # of what a group has, in how much it counts
GC_EDGES = np.linspace(0.25, 0.7, 10)  # of the bins in which both labels weigh the same
HEAVIEST = 4.0  # times as much as without bins
_MOST_MAPS = 256  # feature files of one process: each holds a file open, of usually 1,024


class Mapped:
    """An array in a file, of which memory holds what is looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: Values = np.load(path, mmap_mode="r", allow_pickle=False)

    def __reduce__(self) -> tuple[type[Mapped], tuple[Path]]:
        return Mapped, (self.path,)

    def __getitem__(self, key: Any) -> Values:  # noqa: ANN401 - all that numpy takes
        return np.asarray(self._values[key])

    def __len__(self) -> int:
        return len(self._values)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape


class FeatureRows:
    """The vectors of feature files, one file behind the other, mapped as they are looked at.

    Trainings, seeds and ranks that read the same files share the pages of one copy.
    """

    def __init__(
        self, files: Sequence[tuple[str, int, int]], dim: int, store: Store = "float32"
    ) -> None:
        """A file is its path, the byte at which its vectors begin, and their number."""
        self.files, self.dim, self.store = files, dim, store
        self._firsts = np.cumsum([0, *(n for _, _, n in files)], dtype=np.int64)
        self._maps: OrderedDict[int, Values] = OrderedDict()  # by use, the last used at the end

    def __reduce__(self) -> tuple[type[FeatureRows], tuple[object, ...]]:
        return FeatureRows, (self.files, self.dim, self.store)

    def __getitem__(self, rows: Rows) -> Values:
        """(k,) -> (k, dim)"""
        of_file = np.searchsorted(self._firsts, rows, side="right") - 1
        values = np.empty((len(rows), self.dim), dtype=np.float32)
        for number in np.unique(of_file).tolist():
            inside = of_file == number
            stored = self._map(number)[rows[inside] - self._firsts[number]]
            values[inside] = from_bfloat16(stored) if self.store == "bfloat16" else stored
        return values

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), self.dim

    def _map(self, number: int) -> Values:
        if number not in self._maps:
            path, begin, n = self.files[number]
            kind = "<u2" if self.store == "bfloat16" else "<f4"
            self._maps[number] = np.memmap(path, kind, "r", begin, (n, self.dim))
            if len(self._maps) > _MOST_MAPS:
                self._maps.popitem(last=False)
        self._maps.move_to_end(number)
        return self._maps[number]


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRows:
    """Some rows of an array. They are read when they are asked for."""

    column: Values | Mapped | FeatureRows  # (n_all, width)
    rows: Rows  # (n,)

    @classmethod
    def of(cls, values: Values) -> ArrayRows:
        return cls(values, np.arange(len(values)))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        return int(self.column.shape[1])

    def __getitem__(self, rows: Rows | slice) -> Values:
        """(k,) -> (k, width)"""
        values: Values = self.column[self.rows[rows]]
        return values

    def blocks(self, n_rows: int = 8192) -> Iterator[Values]:
        """Blocks of rows, in order."""
        for first in range(0, len(self), n_rows):
            yield self[first : first + n_rows]

    def take(self, rows: Rows) -> ArrayRows:
        return ArrayRows(self.column, self.rows[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Texts(Sequence[str]):
    """Some of the words in a row of letters. They are read when they are asked for."""

    letters: Values | Mapped  # uint8, UTF-8
    ends: Values | Mapped  # (n_all + 1,): word i is ``letters[ends[i]:ends[i + 1]]``
    rows: Rows  # (n,)

    @classmethod
    def of(cls, words: Sequence[str]) -> Texts:
        encoded = [word.encode() for word in words]
        return cls(_letters(encoded), _ends(encoded), np.arange(len(words)))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> list[str]: ...

    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        row = self.rows[place]
        begin, end = self.ends[row : row + 2]
        word: bytes = self.letters[begin:end].tobytes()
        return word.decode()

    @property
    def lengths(self) -> Rows:
        """The lengths of the words in bytes. (n,)"""
        lengths: Rows = self.ends[self.rows + 1] - self.ends[self.rows]
        return lengths

    def take(self, rows: Rows) -> Texts:
        return Texts(self.letters, self.ends, self.rows[rows])


def _letters(words: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(words), dtype=np.uint8)


def _ends(words: Sequence[bytes]) -> Rows:
    """The ends of the words among the letters of all, behind a 0. (n + 1,)"""
    return np.cumsum([0, *map(len, words)], dtype=np.int64)


@contextmanager
def growing(path: Path, dtype: str, width: int | None = None) -> Iterator[Callable[[Values], None]]:
    """A function that adds rows to an array, which appears in ``path`` at the end of the block.

    A row is one value, or ``width`` of them.

    Raises:
        OutputError, StorageError: as ``files.writing``.
    """
    row_shape = () if width is None else (width,)
    n_rows = 0
    with Tree(path.parents[1]).replacing(path) as out:
        _write_header(out, dtype, (n_rows, *row_shape))

        def add(values: Values) -> None:
            nonlocal n_rows
            assert values.shape[1:] == row_shape
            out.write(np.ascontiguousarray(values, dtype=dtype).tobytes())
            n_rows += len(values)

        yield add
        out.seek(0)
        _write_header(out, dtype, (n_rows, *row_shape))


@contextmanager
def growing_texts(letters_file: Path, ends_file: Path) -> Iterator[Callable[[Sequence[str]], None]]:
    """A function that adds words to what ``Texts`` reads, as ``growing`` adds rows."""
    n_letters = 0
    with growing(letters_file, "|u1") as add_letters, growing(ends_file, "<i8") as add_ends:
        add_ends(np.zeros(1, dtype=np.int64))

        def add(words: Sequence[str]) -> None:
            nonlocal n_letters
            encoded = [word.encode() for word in words]
            letters, ends = _letters(encoded), _ends(encoded)
            add_letters(letters)
            add_ends(n_letters + ends[1:])
            n_letters += len(letters)

        yield add


def _write_header(out: BinaryIO, dtype: str, shape: tuple[int, ...]) -> None:
    """Write numpy's header, which leaves room for any number of rows."""
    facts = {"descr": dtype, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(out, facts)


@dataclass(frozen=True, slots=True, eq=False)
class LabelledFrames:
    """Stop-free frames with their labels and features; all rows are in step.

    A frame has its record's label. ``chunk`` and ``record`` number the chunks and the records.
    Ids are unique where there is one size of chunks. Groups are numbered in the order of their
    names.
    """

    ids: Texts
    proteins: Texts
    composition: ArrayRows  # (n, N_FEATURES)
    chunk: Rows
    record: Rows
    is_virus: NDArray[np.bool_]
    weight: NDArray[np.float32]
    group: Rows
    vectors: ArrayRows  # (n, dim) if they were made before, else (n, 0)

    def __len__(self) -> int:
        return len(self.chunk)

    @property
    def lengths(self) -> Rows:
        return self.proteins.lengths

    def take(self, rows: Rows) -> LabelledFrames:
        return LabelledFrames(
            self.ids.take(rows),
            self.proteins.take(rows),
            self.composition.take(rows),
            self.chunk[rows],
            self.record[rows],
            self.is_virus[rows],
            self.weight[rows],
            self.group[rows],
            self.vectors.take(rows),
        )


def given_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """The weights of the manifest. (n,)"""
    return frames.weight


def balanced_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """Weights that give a group the square root of its frames, and both classes the same.

    (n,) with mean 1. A few large genomes would otherwise stand for all of their
    class. None is over ``_MOST_WEIGHT`` by much: a group of one frame says little.
    """
    _, group, size = np.unique(frames.group, return_inverse=True, return_counts=True)
    weight = frames.weight / np.sqrt(size[group])
    for is_virus in (False, True):
        rows = frames.is_virus == is_virus
        if rows.any():
            weight[rows] = np.minimum(weight[rows] / weight[rows].mean(), _MOST_WEIGHT)
            weight[rows] *= len(frames) / 2 / weight[rows].sum()
    return weight.astype(np.float32)


def recipe_weights(frames: LabelledFrames) -> NDArray[np.float32]:
    """Weights of frames that stand for drawing them by the scorer's recipe. (n,) with mean 1

    A group has a low power of its number of frames, times the manifest's weights; both labels have
    the same say, over all and in each bin of GC, as far as ``HEAVIEST`` allows.
    """
    side = 2 * frames.group + frames.is_virus
    _, group, size = np.unique(side, return_inverse=True, return_counts=True)
    weights = frames.weight * size[group] ** (BASES_POWER - 1)
    bins = np.digitize(_gc_of(frames), GC_EDGES)
    for label in (False, True):
        rows = frames.is_virus == label
        if rows.any():
            weights[rows] = np.minimum(weights[rows] / weights[rows].mean(), _MOST_WEIGHT)
            weights[rows] /= weights[rows].sum()
    for number in range(len(GC_EDGES) + 1):
        inside = bins == number
        total = weights[inside].sum()
        for label in (False, True):
            rows = inside & (frames.is_virus == label)
            if rows.any():
                weights[rows] *= min(HEAVIEST, total / 2 / weights[rows].sum())
    even: NDArray[np.float32] = (weights / weights.mean()).astype(np.float32)
    return even


def _gc_of(frames: LabelledFrames) -> Values:
    """The share of G and C in the codons of each frame. (n,)"""
    codons = np.arange(N_CODONS)
    n_gc = sum(np.isin(codons // 4**place % 4, (1, 2)).astype(np.float64) for place in range(3))
    blocks = [block[:, :N_CODONS] @ n_gc / 3 for block in frames.composition.blocks()]
    return np.concatenate(blocks) if blocks else np.empty(0)
