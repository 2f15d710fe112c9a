"""Store scores from a run without a model, in one file per record block.

A file contains everything that the outputs need, except the threshold and the record letters, so a
new threshold needs neither scoring nor input. Like a feature file it has a label at its end, and it
exists only when it is complete. A damaged file, or one for other records or another scorer, counts
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
from virnucpro.store.run_dir import SCORE_FORMAT, RunDir
from virnucpro.viral.calling import ScoredRecords
from virnucpro.viral.known import WindowHits
from virnucpro.viral.scoring import WindowScores
from virnucpro.viral.types import Region, Track

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreStore:
    """A run's score files, by block index."""

    tree: SafeDir
    folder: Path
    fingerprint: str  # recipe fingerprint
    finder: str  # hash of the region finder; "": no search
    unknown: ClassVar = " "  # replaces each letter of a missing sequence

    @property
    def _attributes(self) -> dict[str, str | int]:
        return {"format": SCORE_FORMAT, "fingerprint": self.fingerprint}

    def path(self, index: int) -> Path:
        return self.folder / f"{shard_name(index)}{RunDir.scores_suffix}"

    def write(self, index: int, scored: ScoredRecords, work: int) -> None:
        """Write one file, with its work in the label.

        Args:
            work: letters read. Letters searched for regions count twice.

        Raises:
            OutputError, StorageError: the file cannot be written.
        """
        level = 1  # for zstd: half of the content is numbers that hardly compress
        content = zstd.compress(save(_to_arrays(scored)), level)
        attributes: dict[str, str | int] = {
            **self._attributes,
            "records": _cache_key(scored.records),
            "finder": self.finder,
            "n_letters": scored.records.n_letters,
            "work": work,
        }
        write_checksummed(self.tree, self.path(index), content, attributes)

    def read(self, path: Path, records: Records | None) -> tuple[ScoredRecords | None, bool]:
        """Read these records' scores.

        If ``records`` is None, they come from the file, and ``unknown`` replaces every letter.

        Returns:
            The scores, or None if they are missing, and whether the records were searched with the
            current region finder.
        """
        if not path.exists():
            return None, False
        expected = {} if records is None else {"records": _cache_key(records)}
        # Errors of numpy, safetensors, zstd and JSON on a damaged file.
        damage = (
            FeatureFileError,
            LookupError,
            ValueError,
            TypeError,
            StopIteration,
            SafetensorError,
            zstd.ZstdError,
        )
        try:
            label, content = read_checksummed(path, {**self._attributes, **expected})
            scored = _from_arrays(load(_unpack(label, content)), records, label)
        except damage:
            return None, False
        return scored, label.attributes.get("finder") == self.finder

    def differs(self, other: ScoreStore, index: int) -> bool:
        """Return whether a block has other scores or regions in ``other`` than here.

        Regions are compared if both were searched with the same finder.

        Raises:
            FeatureFileError: a file is missing or damaged.
        """
        region_columns = ("text", "n_track", "track_")  # column names that depend on the finder
        label, arrays = self._arrays(index)
        other_label, other_arrays = other._arrays(index)
        has_regions = label.attributes.get("finder") == other_label.attributes.get("finder")
        if arrays.keys() != other_arrays.keys():
            return True
        names = [name for name in arrays if has_regions or not name.startswith(region_columns)]
        return not all(_is_equal(arrays[name], other_arrays[name]) for name in names)

    def _arrays(self, index: int) -> tuple[Label, Arrays]:
        """Read a block's arrays.

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
        """Return whether a block's file exists intact."""
        try:
            read_checksummed(self.path(index), self._attributes)
        except FeatureFileError:
            return False
        return True

    def files(self) -> list[Path]:
        """List the existing files, by block index."""
        files = [
            path for path in self.folder.glob(f"*{RunDir.scores_suffix}") if path.stem.isdecimal()
        ]
        return sorted(files, key=lambda path: int(path.stem))

    def labels(self) -> Iterator[tuple[Path, Label]]:
        """Yield each file that belongs to this recipe, with its label."""
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
    """Decompress a file's content, if its size is plausible for the letters in its label.

    Raises:
        ValueError, TypeError, ZstdError: the content is too large or damaged.
    """
    largest_ratio = 32
    bytes_per_letter = 2
    n_letters = label.attributes["n_letters"]
    check_counts(n_letters)
    # Limits on unpacked bytes: per block, per letter of its records (pieces and tracks take half a
    # byte), and per packed byte (for headers that are nearly identical).
    fixed_bytes = 2**26
    limit = fixed_bytes + bytes_per_letter * int(n_letters) + largest_ratio * len(content)
    n_bytes = zstd.get_frame_info(content).decompressed_size
    if n_bytes is None or n_bytes > limit:
        raise ValueError(f"its content has {n_bytes} bytes; {n_letters} letters give {limit}")
    unpacker = zstd.ZstdDecompressor()
    unpacked: bytes = unpacker.decompress(content, max_length=n_bytes)
    if not unpacker.eof or unpacker.unused_data or len(unpacked) != n_bytes:
        raise ValueError(f"its content does not have the {n_bytes} bytes that it claims")
    return unpacked


def _is_equal(array: NDArray[Any], other: NDArray[Any]) -> bool:
    return array.dtype == other.dtype and array.tobytes() == other.tobytes()


def _cache_key(records: Records) -> str:
    """Hash the complete content of the records."""
    records_at_once = 10_000  # hashed together
    letters_at_once = 2**20
    digest = hashlib.sha256()
    for array in _to_columns(records).values():
        digest.update(array.data)
    for start in range(0, len(records.sequences), records_at_once):
        letters = "".join(records.sequences[start : start + records_at_once])
        for first in range(0, len(letters), letters_at_once):  # a record may be very long
            part = letters[first : first + letters_at_once]
            digest.update(part.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


_TEXTS = ("ids", "headers", "samples", "own_ids")  # text columns of records
_NUMBERS = ("lines", "n_gaps", "lengths")


def _to_columns(records: Records) -> dict[str, NDArray[Any]]:
    """Convert records to columns, without letters. No text contains a line end."""
    columns: dict[str, NDArray[Any]] = {}
    for name in _TEXTS:
        text = "\n".join(getattr(records, name)).encode("utf-8", "surrogateescape")
        columns[name] = np.frombuffer(text, dtype=np.uint8)
    for name in _NUMBERS:
        columns[name] = np.asarray(getattr(records, name), dtype=np.int64)
    return columns


def _mask_missing(arrays: Arrays) -> Records:
    """Restore records from ``_to_columns``, with ``unknown`` for every letter."""
    texts = {
        name: arrays[name].tobytes().decode("utf-8", "surrogateescape").split("\n")
        for name in _TEXTS
    }
    lines, n_gaps, lengths = (arrays[name].tolist() for name in _NUMBERS)
    sequences = [ScoreStore.unknown * length for length in lengths]
    return Records(sequences=sequences, lines=lines, n_gaps=n_gaps, **texts)


def _to_arrays(scored: ScoredRecords) -> dict[str, NDArray[Any]]:
    tracks = [track for strands in scored.found.values() for _, track in strands]
    regions = [
        (index, [strand_regions for strand_regions, _ in strands])
        for index, strands in scored.found.items()
    ]
    text = json.dumps(
        {
            "screened": list(scored.screened.items()),
            "notes": [(index, note) for index, note in enumerate(scored.notes) if note],
            "regions": regions,
        }
    )
    pieces = scored.pieces
    return {
        **_to_columns(scored.records),
        "text": np.frombuffer(text.encode(), dtype=np.uint8),
        "log_odds": scored.log_odds,
        "kingdoms": scored.kingdoms,
        "n_piece": scored.n_pieces,
        **{f"piece_{name}": getattr(pieces, name) for name in _PIECE_COLUMNS},
        **{f"known_{name}": getattr(scored.known, name) for name in WindowHits._fields},
        **_track_columns(tracks),
    }


_PIECE_COLUMNS = ("start", "n_bases", "log_odds")


def _track_columns(tracks: Sequence[Track]) -> Arrays:
    """Concatenate columns from several tracks, and record each track's length."""
    columns = {"n_track": np.array([len(track.start) for track in tracks], dtype=np.int64)}
    for name in Track._fields:
        dtype = np.float64 if name in ("log_odds", "posterior") else np.int64
        values = [np.empty(0, dtype), *(getattr(track, name) for track in tracks)]
        columns[f"track_{name}"] = np.concatenate(values)
    return columns


def _tracks(arrays: Arrays) -> Iterator[Track]:
    """Split ``_track_columns`` into tracks."""
    columns = [arrays[f"track_{name}"] for name in Track._fields]
    first = 0
    for n in arrays["n_track"].tolist():
        if not 0 <= n <= len(columns[0]) - first:
            raise ValueError("a track is longer than its columns")
        yield Track(*(column[first : first + n] for column in columns))
        first += n


def _from_arrays(arrays: Arrays, records: Records | None, label: Label) -> ScoredRecords:
    """Restore scored records from a file's arrays.

    Raises:
        ValueError, LookupError, TypeError: the arrays are damaged.
    """
    text = parse_json(arrays["text"].tobytes())
    _check_number(arrays["lengths"], label.attributes["n_letters"])
    _check_number(arrays["n_piece"], len(arrays["piece_start"]))
    records = _mask_missing(arrays) if records is None else records
    n_pieces = arrays["n_piece"]
    notes = [""] * len(records.ids)
    for index, note in text["notes"]:
        notes[index] = note
    owners = np.repeat(np.arange(len(notes)), n_pieces)
    tracks = _tracks(arrays)
    return ScoredRecords(
        records,
        dict(text["screened"]),
        notes,
        arrays["log_odds"],
        arrays["kingdoms"],
        n_pieces,
        WindowScores(owners, *(arrays[f"piece_{name}"] for name in _PIECE_COLUMNS)),
        WindowHits(*(arrays[f"known_{name}"] for name in WindowHits._fields)),
        {index: _strand_pair(regions, tracks) for index, regions in text["regions"]},
    )


def _check_number(counts: NDArray[np.int64], total: object) -> None:
    """Raise ValueError if counts do not sum to ``total``: what they count takes memory."""
    if sum(counts.tolist()) != total or (counts < 0).any():
        raise ValueError(f"its counts do not add up to {total}")


def _strand_pair(regions_by_strand: Sequence[Any], tracks: Iterator[Track]) -> tuple[Any, Any]:
    strands = [
        (tuple(Region(*region) for region in regions), next(tracks))
        for regions in regions_by_strand
    ]
    as_other, as_virus = strands
    return as_other, as_virus
