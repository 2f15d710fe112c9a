"""Name the samples of a run, and make run-wide record ids.

Every input file is a sample, except that two files with read pairs are one sample. Its name is the
cleaned file name, because it may become part of an id or a folder name. No two samples in a run
have names that a file system could confuse.

If files in a run share ids, the run is *qualified*: each record's id in the run is ``sample:id``.
Sample names contain no colon, so no two records get the same id.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.logging import announce, format_count, printable
from virnucpro.core.native import call
from virnucpro.core.types import FastaRecord, Records
from virnucpro.sequences.fasta import (
    WHOLE,
    Block,
    Span,
    StreamCache,
    has_fastq_suffix,
    parse_block,
    stem_of,
)
from virnucpro.sequences.inputs import InputFile, list_inputs

_MATE = re.compile(r"(?P<name>.+)(?P<mark>[._][Rr]?)(?P<mate>\d)(?P<rest>_001)?")


def name_samples(files: Sequence[InputFile], recorded: Sequence[InputFile]) -> list[InputFile]:
    """Give each file a unique sample name. Recorded files keep theirs.

    A name is the stem of the file name. If several files have the same stem, the name gets a parent
    folder as prefix, at the level where the folders of these files differ most, or the nearest of
    equal levels. If needed, the name ends in a number. Two files with read pairs are one sample,
    and neighbours in the result.
    """
    files = _pair_mates(files)
    paths = [_mate_path(file) for file in files]
    keys = {_pair_key(file.sample) for file in recorded}
    recorded_by_path = {file.path: file for file in recorded}
    recorded_mates = {(file.sample, file.mate) for file in recorded if not file.error}
    levels = _distinguishing_levels((*paths, *map(_mate_path, recorded)))
    result: list[InputFile] = []
    changed: list[str] = []
    prior: InputFile | None = None
    for file, path in zip(files, paths, strict=True):
        if known_file := recorded_by_path.get(file.path):
            sample = known_file.sample
            mate = known_file.mate
        elif prior and _is_pair(prior, file) and _lacks_mate(result[-1], recorded_mates):
            sample = result[-1].sample
            mate = file.mate
        else:
            wanted_name = file.sample or _name(path, levels)
            sample = _unused_name(clean_name(wanted_name), keys)
            mate = file.mate
            keys.add(_pair_key(sample))
            if sample != (file.sample or _stem(path)):  # not named after its sheet or file
                changed.append(f"{printable(file.sample) or file.display_name} as {sample}")
        result.append(replace(file, sample=sample, mate=mate))
        prior = file
    _announce_names(changed, [file.sample for file in result if file.mate == 1])
    return result


def _announce_names(changed: Sequence[str], pairs: Sequence[str]) -> None:
    """Announce renamed samples, and samples with read pairs."""
    shown = 3  # names in a message
    if changed:
        announce(f"samples renamed: {list_inputs(changed, shown)}")
    if pairs:
        announce(
            f"{format_count(len(pairs), 'sample')} with read pairs in two files: "
            f"{list_inputs(pairs, shown)}; ids end in /1 and /2"
        )


def _pair_mates(files: Sequence[InputFile]) -> list[InputFile]:
    """Mark files whose names indicate read pairs as mates, and make them neighbours."""
    groups: dict[tuple[str, ...], dict[str, int]] = {}  # pair key -> mate -> file index
    for index, file in enumerate(files):
        path = _mate_path(file)
        match = _MATE.fullmatch(stem_of(path.name))
        if match and not (file.sample or file.mate) and has_fastq_suffix(path.name):
            key = (str(path.parent), match["name"], match["mark"], match["rest"] or "")
            groups.setdefault(key, {})[match["mate"]] = index
    result: dict[int, InputFile] = {}
    pairs = {min(group.values()): group for group in groups.values() if set(group) == {"1", "2"}}
    for index, file in enumerate(files):
        if index in pairs:
            for mate, mate_index in sorted(pairs[index].items()):
                result[mate_index] = replace(files[mate_index], mate=int(mate))
        result.setdefault(index, file)
    return list(result.values())


def _is_pair(first: InputFile, second: InputFile) -> bool:
    """Return True if two files are the mates of one sample."""
    if (first.mate, second.mate) != (1, 2):
        return False
    names = [file.sample or str(_mate_path(file)) for file in (first, second)]
    return names[0] == names[1]


def _lacks_mate(first: InputFile, recorded_mates: Container[tuple[str, int]]) -> bool:
    """Return True if a file is the first mate of its sample, and the second is still missing."""
    return first.mate == 1 and (first.sample, 2) not in recorded_mates


def clean_name(text: str) -> str:
    """Replace all characters but letters, digits and ``._-+`` by ``_``.

    The result never begins with a dot or hyphen.

    >>> clean_name("../my sample:1")
    '_my_sample_1'
    """
    no_name = "sample"
    allowed = "._-+"
    longest = 100  # bytes in a name
    letters = unicodedata.normalize("NFC", text)
    name = "".join(c if c.isalnum() or c in allowed else "_" for c in letters).lstrip(".-")
    return name.encode()[:longest].decode(errors="ignore") or no_name


def _pair_key(name: str) -> str:
    """Return the form for comparing names. No file system confuses names with different keys."""
    return unicodedata.normalize("NFC", name).casefold()


def _mate_path(file: InputFile) -> PurePath:
    """Return the path that names a sample, without the mate number."""
    path = PurePath(file.name or file.path)
    match = _MATE.fullmatch(stem_of(path.name)) if file.mate else None
    return path.with_name(match["name"]) if match else path


def _stem(path: PurePath) -> str:
    return clean_name(stem_of(path.name))


def _name(path: PurePath, levels: Mapping[str, int | None]) -> str:
    """Return the stem of a path, with a parent folder as prefix if ``levels`` lists the stem."""
    stem = _stem(path)
    level = levels.get(_pair_key(stem))
    parent = "" if level is None else path.parents[level].name
    return clean_name(f"{clean_name(parent)}_{stem}") if parent else stem


def _distinguishing_levels(paths: Iterable[PurePath]) -> dict[str, int | None]:
    """Map each stem that several files share to the level where their parent folders differ most.

    The level is None if a file has no folder.
    """
    groups: dict[str, set[PurePath]] = {}
    for path in paths:
        groups.setdefault(_pair_key(_stem(path)), set()).add(path)
    levels: dict[str, int | None] = {}
    for stem, same_stem in groups.items():
        if len(same_stem) == 1:
            continue
        names = [_parent_keys(path) for path in same_stem]
        n_names = [len(set(level_names)) for level_names in zip(*names, strict=False)]
        levels[stem] = n_names.index(max(n_names)) if n_names else None
    return levels


def _parent_keys(path: PurePath) -> list[str]:
    return [_pair_key(clean_name(parent.name)) for parent in path.parents]


def _unused_name(stem: str, keys: set[str]) -> str:
    name = stem
    number = 1
    while _pair_key(name) in keys:
        number += 1
        name = f"{stem}_{number}"
    return name


@dataclass(frozen=True, slots=True)
class RunIds:
    """The rule that turns a record's id in its file into its id in the run."""

    is_qualified: bool = False
    replaced: frozenset[str] = frozenset()  # run ids that records in later inputs replace
    added: frozenset[str] = frozenset()  # samples with such inputs

    def from_inputs(self, sample: str, own_id: str) -> str:
        """Return the run id of a record that has ``own_id`` in a sample's file."""
        is_replaced = sample in self.added and own_id in self.replaced
        return own_id if is_replaced or not self.is_qualified else f"{sample}:{own_id}"

    def read(self, file: InputFile) -> Iterator[FastaRecord]:
        """Yield the records of a file with their run ids.

        Raises:
            InputError, InputMissingError: as ``InputFile.read``.
        """
        for records in parse_block(self.blocks(file)):
            yield from records.iter_records()

    def blocks(
        self, file: InputFile, span: Span = WHOLE, streams: StreamCache | None = None
    ) -> Iterator[Block]:
        """Yield the records of a file, or of a span, in blocks, with their run ids.

        A record that replaces a failed one keeps its id, which is already a run id.

        Raises:
            InputError, InputMissingError: as ``InputFile.blocks``.
        """
        blocks = rename_records(file) if file.n_renamed else file.blocks(span, streams)
        if not self.is_qualified:
            return blocks
        replaced = self.replaced if file.generation else frozenset[str]()
        return (block.with_prefix(f"{file.sample}:", replaced) for block in blocks)


def rename_records(file: InputFile) -> Iterator[Records]:
    """Yield the records of a file. Repeated ids get a number: ``id_2``, ``id_3``.

    A number is skipped if a record in the file already has that id. Memory contains 8 bytes per
    record (17 while they are sorted), and 12 per id that occurs more than once.
    """
    unsorted_digests = array("Q")
    for records in parse_block(file.blocks()):
        unsorted_digests.frombytes(id_digests(records.ids).tobytes())
    digests = np.sort(np.frombuffer(unsorted_digests, dtype=np.uint64))
    del unsorted_digests
    repeated = find_repeated_ids(digests)
    numbers = np.ones(len(repeated), dtype=np.uint32)  # next number of each repeated id
    for records in parse_block(file.blocks()):
        ids = list(records.ids)
        block_digests = id_digests(records.ids)
        positions = np.searchsorted(repeated, block_digests)
        for row in np.flatnonzero(np.isin(block_digests, repeated)).tolist():
            name = ids[row]
            index = positions[row]
            while numbers[index] > 1 and _contains_id(f"{name}_{numbers[index]}", digests):
                numbers[index] += 1
            ids[row] = name if numbers[index] == 1 else f"{name}_{numbers[index]}"
            numbers[index] += 1
        yield records.with_ids(ids)


def _contains_id(record_id: str, digests: NDArray[np.uint64]) -> bool:
    """Return True if an id's digest is in this sorted array."""
    [digest] = id_digests([record_id])
    position = int(np.searchsorted(digests, digest))
    return position < len(digests) and bool(digests[position] == digest)


def find_repeated_ids(ordered: NDArray[Any]) -> NDArray[Any]:
    """Return each value that occurs more than once in a sorted array."""
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    # not ``numpy.unique``, which imports all of ``numpy.ma``
    return np.concatenate([repeats[:1], repeats[1:][repeats[1:] != repeats[:-1]]])


def id_digests(ids: Sequence[str]) -> NDArray[np.uint64]:
    """Hash each id to 64 bits, equally in every process. n -> (n,)

    The hash is multilinear: a sum of all bytes and an end mark, weighted by position (Lemire and
    Kaser 2014, doi:10.1093/comjnl/bxt070).
    """
    letters = np.frombuffer("\0".join((*ids, "")).encode(), np.uint8)
    digests = np.empty(len(ids), dtype=np.uint64)
    call("id_digests", letters, len(letters), digests)
    return digests
