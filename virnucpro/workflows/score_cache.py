"""Store the scores of a run without a model, in one file per block of records.

A file has everything that the outputs are made from, except the cut and the letters of the records,
so another cut needs neither scoring nor input. Like a feature file it has a label at its end and
exists only when it is whole. A damaged file, or a file for other records or another scorer, counts
as missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from virnucpro.core.atomic_io import parse_json, zstd
from virnucpro.core.errors import FeatureFileError
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Records, check_counts, shard_name
from virnucpro.store.feature_file import (
    Label,
    open_reader,
    read_checksummed,
    read_label,
    write_checksummed,
)
from virnucpro.store.run_dir import SCORE_FORMAT, SCORES
from virnucpro.viral.calling import ScoredRecords
from virnucpro.viral.known import WindowHits
from virnucpro.viral.scoring import WindowScores
from virnucpro.viral.types import Region, Track

_LEVEL = 1  # of zstd: half of the content are numbers that hardly compress
_RECORDS_AT_ONCE = 10_000  # hashed together
# Bounds of the unpacked content: of a block in any case, for each letter of its records (pieces and
# tracks take half a byte), and for each packed byte (headers that are much alike)
_FIXED_BYTES, _BYTES_PER_LETTER, _LARGEST_RATIO = 2**26, 2, 32
# errors of numpy, safetensors, zstd and JSON on a damaged file
_DAMAGE = (
    *(FeatureFileError, LookupError, ValueError, TypeError, StopIteration),
    *(SafetensorError, zstd.ZstdError),
)

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ScoreStore:
    """The score files of a run, by block index."""

    tree: SafeDir
    folder: Path
    fingerprint: str  # of the recipe
    finder: str  # hash of the region finder; "": none
    unknown: ClassVar = " "  # replaces each letter of a record if its sequence is missing

    @property
    def _attributes(self) -> dict[str, str | int]:
        return {"format": SCORE_FORMAT, "fingerprint": self.fingerprint}

    def path(self, index: int) -> Path:
        return self.folder / f"{shard_name(index)}{SCORES}"

    def write(self, index: int, scored: ScoredRecords, work: int) -> None:
        """Write one file, with the amount of work in its label.

        Raises:
            OutputError, StorageError: the file cannot be written.
        """
        content = zstd.compress(save(_to_arrays(scored)), _LEVEL)
        attributes: dict[str, str | int] = {
            **self._attributes,
            "records": _cache_key(scored.records),
            "finder": self.finder,
            "n_letters": scored.records.n_letters,
            "work": work,
        }
        write_checksummed(self.tree, self.path(index), content, attributes)

    def read(self, path: Path, records: Records | None) -> tuple[ScoredRecords | None, bool]:
        """Read the scores of these records; None if they are missing.

        Without records, those of the file are meant, and ``unknown`` replaces every letter.

        -> scores, whether the records were searched with the current region finder
        """
        if not path.exists():
            return None, False
        of_records = {} if records is None else {"records": _cache_key(records)}
        try:
            label, content = read_checksummed(path, {**self._attributes, **of_records})
            scored = _from_arrays(load(_unpack(label, content)), records, label)
        except _DAMAGE:
            return None, False
        return scored, label.attributes.get("finder") == self.finder

    def differs(self, other: ScoreStore, index: int) -> bool:
        """Whether the file of a block has other scores, or other regions, than that of a store.

        Regions are compared if both searched with the same finder.

        Raises:
            FeatureFileError: a file is missing or damaged.
        """
        (label, mine), (its_label, its) = (store._arrays(index) for store in (self, other))
        has_regions = label.attributes.get("finder") == its_label.attributes.get("finder")
        names = [name for name in mine if has_regions or not name.startswith(_OF_REGIONS)]
        is_equal = mine.keys() == its.keys() and all(_is_equal(mine[n], its[n]) for n in names)
        return not is_equal

    def _arrays(self, index: int) -> tuple[Label, Arrays]:
        """
        Raises:
            FeatureFileError: the file is missing or damaged.
        """
        path = self.path(index)
        label, content = read_checksummed(path, self._attributes)
        with open_reader(path):
            try:
                return label, load(_unpack(label, content))
            except (SafetensorError, zstd.ZstdError) as error:
                raise ValueError(error) from error

    def is_complete(self, index: int) -> bool:
        """Whether the file of a block is there as it was written."""
        try:
            read_checksummed(self.path(index), self._attributes)
        except FeatureFileError:
            return False
        return True

    def files(self) -> list[Path]:
        """The existing files, by block index."""
        files = [path for path in self.folder.glob(f"*{SCORES}") if path.stem.isdecimal()]
        return sorted(files, key=lambda path: int(path.stem))

    def labels(self) -> Iterator[tuple[Path, Label]]:
        """Yield the files of this recipe, each with its label."""
        for path in self.files():
            try:
                label = read_label(path, self._attributes)
            except FeatureFileError:
                continue
            yield path, label

    def keep(self, names: Collection[str]) -> None:
        """Delete all files except these names (without suffix)."""
        for path in self.files():
            if path.stem not in names:
                self.tree.delete(path)


def _unpack(label: Label, content: bytes) -> bytes:
    """Decompress the content of a file, if it can be that of as many letters as its label says.

    Raises:
        ValueError, TypeError, ZstdError: it has more bytes, or is damaged.
    """
    n_letters = label.attributes["n_letters"]
    check_counts(n_letters)
    limit = _FIXED_BYTES + _BYTES_PER_LETTER * int(n_letters) + _LARGEST_RATIO * len(content)
    n_bytes = zstd.get_frame_info(content).decompressed_size
    if n_bytes is None or n_bytes > limit:
        raise ValueError(f"its content has {n_bytes} bytes; {n_letters} letters give {limit}")
    unpacker = zstd.ZstdDecompressor()
    unpacked: bytes = unpacker.decompress(content, max_length=n_bytes)
    if not unpacker.eof or unpacker.unused_data or len(unpacked) != n_bytes:
        raise ValueError(f"its content does not have the {n_bytes} bytes that it claims")
    return unpacked


def _is_equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _cache_key(records: Records) -> str:
    """Hash the whole content of the records."""
    digest = hashlib.sha256()
    for array in _to_columns(records).values():
        digest.update(array.data)
    for start in range(0, len(records.sequences), _RECORDS_AT_ONCE):
        letters = "".join(records.sequences[start : start + _RECORDS_AT_ONCE])
        digest.update(letters.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


_OF_REGIONS = ("text", "n_track", "track_")  # names of the columns that depend on the finder
_TEXTS = ("ids", "headers", "samples", "own_ids")  # columns of records that are text
_NUMBERS = ("lines", "n_gaps", "lengths")


def _to_columns(records: Records) -> dict[str, NDArray[Any]]:
    """The records without their letters; no text has a line end."""
    columns: dict[str, NDArray[Any]] = {}
    for name in _TEXTS:
        text = "\n".join(getattr(records, name)).encode("utf-8", "surrogateescape")
        columns[name] = np.frombuffer(text, dtype=np.uint8)
    for name in _NUMBERS:
        columns[name] = np.asarray(getattr(records, name), dtype=np.int64)
    return columns


def _mask_missing(arrays: Arrays) -> Records:
    """Records from ``_to_columns``, with ``unknown`` for every letter."""
    texts = {
        name: arrays[name].tobytes().decode("utf-8", "surrogateescape").split("\n")
        for name in _TEXTS
    }
    lines, n_gaps, lengths = (arrays[name].tolist() for name in _NUMBERS)
    sequences = [ScoreStore.unknown * length for length in lengths]
    return Records(sequences=sequences, lines=lines, n_gaps=n_gaps, **texts)


def _to_arrays(scored: ScoredRecords) -> dict[str, NDArray[Any]]:
    tracks = [track for both in scored.found.values() for _, track in both]
    text = json.dumps(
        {
            "screened": list(scored.screened.items()),
            "notes": [(place, note) for place, note in enumerate(scored.notes) if note],
            "regions": [
                (place, [regions for regions, _ in both]) for place, both in scored.found.items()
            ],
        }
    )
    pieces = scored.pieces
    return {
        **_to_columns(scored.records),
        "text": np.frombuffer(text.encode(), dtype=np.uint8),
        "log_odds": scored.log_odds,
        "n_piece": scored.n_pieces,
        **{f"piece_{name}": getattr(pieces, name) for name in _OF_PIECE},
        **{f"known_{name}": getattr(scored.known, name) for name in WindowHits._fields},
        **_track_columns(tracks),
    }


_OF_PIECE = ("start", "n_bases", "log_odds")


def _track_columns(tracks: Sequence[Track]) -> Arrays:
    """Concatenate the columns of several tracks, and note the length of each track."""
    columns = {"n_track": np.array([len(track.start) for track in tracks], dtype=np.int64)}
    for name in Track._fields:
        dtype = np.float64 if name in ("log_odds", "posterior") else np.int64
        values = [np.empty(0, dtype), *(getattr(track, name) for track in tracks)]
        columns[f"track_{name}"] = np.concatenate(values)
    return columns


def _tracks(arrays: Arrays) -> Iterator[Track]:
    """Split ``_track_columns`` into tracks."""
    columns, first = [arrays[f"track_{name}"] for name in Track._fields], 0
    for n in arrays["n_track"].tolist():
        if not 0 <= n <= len(columns[0]) - first:
            raise ValueError("a track is longer than its columns")
        yield Track(*(column[first : first + n] for column in columns))
        first += n


def _from_arrays(arrays: Arrays, records: Records | None, label: Label) -> ScoredRecords:
    """
    Raises:
        ValueError, LookupError, TypeError: they are not as they were written.
    """
    text = parse_json(arrays["text"].tobytes())
    _check_number(arrays["lengths"], label.attributes["n_letters"])
    _check_number(arrays["n_piece"], len(arrays["piece_start"]))
    records = _mask_missing(arrays) if records is None else records
    n_pieces, notes = arrays["n_piece"], [""] * len(records.ids)
    for place, note in text["notes"]:
        notes[place] = note
    owners = np.repeat(np.arange(len(notes)), n_pieces)
    tracks = _tracks(arrays)
    return ScoredRecords(
        records,
        dict(text["screened"]),
        notes,
        arrays["log_odds"],
        n_pieces,
        WindowScores(owners, *(arrays[f"piece_{name}"] for name in _OF_PIECE)),
        WindowHits(*(arrays[f"known_{name}"] for name in WindowHits._fields)),
        {place: _strand_pair(regions, tracks) for place, regions in text["regions"]},
    )


def _check_number(counts: NDArray[np.int64], total: object) -> None:
    """Raise ValueError for counts that do not add up: what they count takes memory."""
    if sum(counts.tolist()) != total or (counts < 0).any():
        raise ValueError(f"its counts do not add up to {total}")


def _strand_pair(both: Sequence[Any], tracks: Iterator[Track]) -> tuple[Any, Any]:
    as_other, as_virus = (
        (tuple(Region(*region) for region in regions), next(tracks)) for regions in both
    )
    return as_other, as_virus
