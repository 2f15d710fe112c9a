"""Name the samples of a run, and make the ids of their records in the run.

Every input file is a sample; the two files of read pairs are one sample. Its name is the cleaned
file name, because it may become part of an id or the name of a folder. No two samples of a run have
names that a file system could confuse.

If files of a run share ids, the run is *qualified*: the id of each record in the run is
``sample:id``. Sample names have no colon, so no two records get the same id.
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
from virnucpro.core.numeric import mix_hashes
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

_LONGEST = 100  # bytes of the longest name
_ALLOWED = "._-+"
_NO_NAME = "sample"
_SHOWN = 3  # names in a message
_LETTERS_AT_ONCE = 2**18  # letters of ids digested at once
_MATE = re.compile(r"(?P<name>.+)(?P<mark>[._][Rr]?)(?P<mate>\d)(?P<rest>_001)?")


def name_samples(files: Sequence[InputFile], recorded: Sequence[InputFile]) -> list[InputFile]:
    """Give each file a unique sample name; recorded files keep theirs.

    A name is the stem of the file name. If several files have the same stem, the name gets a
    prefix: the parent folder, at the level where the folders of these files differ most; of equal
    levels, the nearest. If needed, it gets a number at its end. The two files of read pairs are one
    sample, and neighbours in the result.
    """
    files = _pair_mates(files)
    keys = {_pair_key(file.sample) for file in recorded}
    by_path = {file.path: file for file in recorded}
    taken = {(file.sample, file.mate) for file in recorded if not file.error}
    levels = _distinguishing_levels((*map(_mate_path, files), *map(_mate_path, recorded)))
    result, changed = list[InputFile](), []
    prior: InputFile | None = None
    for file in files:
        path = _mate_path(file)
        if before := by_path.get(file.path):
            sample, mate = before.sample, before.mate
        elif prior and _is_pair(prior, file) and _lacks_mate(result[-1], taken):
            sample, mate = result[-1].sample, file.mate
        else:
            sample, mate = (
                _unused_name(clean_name(file.sample or _name(path, levels)), keys),
                file.mate,
            )
            keys.add(_pair_key(sample))
            if sample != (file.sample or _stem(path)):
                changed.append(f"{printable(file.sample) or file.display_name} as {sample}")
        result.append(replace(file, sample=sample, mate=mate))
        prior = file
    _announce_names(changed, [file.sample for file in result if file.mate == 1])
    return result


def _announce_names(changed: Sequence[str], pairs: Sequence[str]) -> None:
    """Announce samples with other names than their files, and those with read pairs."""
    if changed:
        announce(f"samples renamed: {list_inputs(changed, _SHOWN)}")
    if pairs:
        announce(
            f"{format_count(len(pairs), 'sample')} with read pairs in two files: "
            f"{list_inputs(pairs, _SHOWN)}; ids end in /1 and /2"
        )


def _pair_mates(files: Sequence[InputFile]) -> list[InputFile]:
    """The files; two files that their names mark as read pairs become neighbours and mates."""
    groups: dict[tuple[str, ...], dict[str, int]] = {}  # mates, and their places
    for place, file in enumerate(files):
        path = _mate_path(file)
        match = _MATE.fullmatch(stem_of(path.name))
        if match and not (file.sample or file.mate) and has_fastq_suffix(path.name):
            key = (str(path.parent), match["name"], match["mark"], match["rest"] or "")
            groups.setdefault(key, {})[match["mate"]] = place
    result: dict[int, InputFile] = {}
    pairs = {min(group.values()): group for group in groups.values() if set(group) == {"1", "2"}}
    for place, file in enumerate(files):
        for mate, own in sorted(pairs[place].items()) if place in pairs else ():
            result[own] = replace(files[own], mate=int(mate))
        result.setdefault(place, file)
    return list(result.values())


def _is_pair(first: InputFile, second: InputFile) -> bool:
    """Whether two files are the mates of one sample."""
    names = [file.sample or str(_mate_path(file)) for file in (first, second)]
    return (first.mate, second.mate) == (1, 2) and names[0] == names[1]


def _lacks_mate(first: InputFile, taken: Container[tuple[str, int]]) -> bool:
    """Whether a file is the first mate of its sample, and no second one is taken."""
    return first.mate == 1 and (first.sample, 2) not in taken


def clean_name(text: str) -> str:
    """Replace all but letters, digits and ``._-+`` by ``_``; never begin with a dot or hyphen.

    >>> clean("../my sample:1")
    '_my_sample_1'
    """
    letters = unicodedata.normalize("NFC", text)
    name = "".join(c if c.isalnum() or c in _ALLOWED else "_" for c in letters).lstrip(".-")
    return name.encode()[:_LONGEST].decode(errors="ignore") or _NO_NAME


def _pair_key(name: str) -> str:
    """The form in which names are compared: no file system confuses names with different keys."""
    return unicodedata.normalize("NFC", name).casefold()


def _mate_path(file: InputFile) -> PurePath:
    """The path that names a sample; the number of a mate is removed."""
    path = PurePath(file.name or file.path)
    match = _MATE.fullmatch(stem_of(path.name)) if file.mate else None
    return path.with_name(match["name"]) if match else path


def _stem(path: PurePath) -> str:
    return clean_name(stem_of(path.name))


def _name(path: PurePath, levels: Mapping[str, int | None]) -> str:
    """The stem of a path, with a parent folder as prefix if ``levels`` has the stem."""
    stem = _stem(path)
    level = levels.get(_pair_key(stem))
    parent = "" if level is None else path.parents[level].name
    return clean_name(f"{clean_name(parent)}_{stem}") if parent else stem


def _distinguishing_levels(paths: Iterable[PurePath]) -> dict[str, int | None]:
    """For each stem that several files have: the level at which their parent folders differ most.

    None if a file has no folder.
    """
    groups: dict[str, set[PurePath]] = {}
    for path in paths:
        groups.setdefault(_pair_key(_stem(path)), set()).add(path)
    levels: dict[str, int | None] = {}
    for stem, some in groups.items():
        names = [[_pair_key(clean_name(parent.name)) for parent in path.parents] for path in some]
        n_names = [len(set(of_level)) for of_level in zip(*names, strict=False)]
        if len(some) > 1:
            levels[stem] = n_names.index(max(n_names)) if n_names else None
    return levels


def _unused_name(stem: str, keys: set[str]) -> str:
    name, number = stem, 1
    while _pair_key(name) in keys:
        number += 1
        name = f"{stem}_{number}"
    return name


@dataclass(frozen=True, slots=True)
class RunIds:
    """The rule that turns the id of a record in its file into its id in the run."""

    is_qualified: bool = False
    replaced: frozenset[str] = frozenset()  # ids in the run that records of later inputs replace
    added: frozenset[str] = frozenset()  # samples with such inputs

    def from_inputs(self, sample: str, own_id: str) -> str:
        """The id in the run of a record that has ``own_id`` in the file of a sample."""
        is_replaced = sample in self.added and own_id in self.replaced
        return own_id if is_replaced or not self.is_qualified else f"{sample}:{own_id}"

    def read(self, file: InputFile) -> Iterator[FastaRecord]:
        """Yield the records of a file with their ids in the run.

        Raises:
            InputError, InputMissingError: as ``InputFile.read``.
        """
        for records in parse_block(self.blocks(file)):
            yield from records.iter_records()

    def blocks(
        self, file: InputFile, span: Span = WHOLE, streams: StreamCache | None = None
    ) -> Iterator[Block]:
        """Yield the records of a file, or of a span, in blocks, with their ids in the run.

        A record that replaces a failed one keeps its id: it is already an id in the run.

        Raises:
            InputError, InputMissingError: as ``InputFile.blocks``.
        """
        blocks = rename_records(file) if file.n_renamed else file.blocks(span, streams)
        if not self.is_qualified:
            return blocks
        replaced = self.replaced if file.generation else frozenset[str]()
        return (block.with_prefix(f"{file.sample}:", replaced) for block in blocks)


def rename_records(file: InputFile) -> Iterator[Records]:
    """Yield the records of a file; repeated ids get a number: ``id_2``, ``id_3``.

    A number is skipped if a record of the file already has that id. Memory holds 8 bytes per record
    (17 while they are sorted), and 12 per id that occurs more than once.
    """
    of_file = array("Q")
    for records in parse_block(file.blocks()):
        of_file.frombytes(id_digests(records.ids).tobytes())
    digests = np.sort(np.frombuffer(of_file, dtype=np.uint64))
    del of_file
    repeated = find_repeated_ids(digests)
    numbers = np.ones(len(repeated), dtype=np.uint32)  # the next one of each repeated id
    for records in parse_block(file.blocks()):
        ids, some = list(records.ids), id_digests(records.ids)
        places = np.searchsorted(repeated, some)
        for row in np.flatnonzero(np.isin(some, repeated)).tolist():
            name, place = ids[row], places[row]
            while numbers[place] > 1 and _contains_id(f"{name}_{numbers[place]}", digests):
                numbers[place] += 1
            ids[row] = name if numbers[place] == 1 else f"{name}_{numbers[place]}"
            numbers[place] += 1
        yield records.with_ids(ids)


def _contains_id(record_id: str, digests: NDArray[np.uint64]) -> bool:
    """Whether the digest of an id is among these, which are sorted."""
    [digest] = id_digests([record_id])
    place = int(np.searchsorted(digests, digest))
    return place < len(digests) and bool(digests[place] == digest)


def find_repeated_ids(ordered: NDArray[Any]) -> NDArray[Any]:
    """The values that occur more than once in sorted ones, each once."""
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    # without ``numpy.unique``, which imports all of ``numpy.ma``
    return np.concatenate([repeats[:1], repeats[1:][repeats[1:] != repeats[:-1]]])


def id_digests(ids: Sequence[str]) -> NDArray[np.uint64]:
    """A hash of 64 bits for each id, the same in every process. n -> (n,)

    It is multilinear: a sum of all bytes and an end mark, each weighted by its position (Lemire and
    Kaser 2014, doi:10.1093/comjnl/bxt070).
    """
    letters = np.frombuffer("\0".join((*ids, "")).encode(), np.uint8)
    ends = np.flatnonzero(letters == 0)
    starts = np.append(0, ends + 1)[:-1]
    digests = np.zeros(len(starts), dtype=np.uint64)
    low = 0
    while low < len(letters):
        first = int(np.searchsorted(ends, low))
        place = low - int(starts[first])  # offset in an id longer than a part, which is read alone
        high = min(low + _LETTERS_AT_ONCE, int(ends[first]) + 1 if place else len(letters))
        here = slice(first, int(np.searchsorted(ends, high - 1)) + 1)
        begins = np.maximum(starts[here], low)
        places = np.arange(low, high) - np.repeat(begins, np.diff(begins, append=high))
        weights = _weights(place, place + int(places.max()) + 1)
        weighted = (letters[low:high] + np.uint64(1)) * weights[places]
        digests[here] += np.add.reduceat(weighted, begins - low, dtype=np.uint64)
        low = high
    return digests


def _weights(first: int, end: int) -> NDArray[np.uint64]:
    """Numbers ``first`` to ``end`` of the generator SplitMix64 with seed 0. (end - first,)"""
    steps = np.arange(first + 1, end + 1, dtype=np.uint64)
    return mix_hashes(steps * np.uint64(0x9E3779B97F4A7C15))
