"""Apply another cut to a finished run when its input no longer exists.

All tables are made from the stored scores. A FASTA output needs sequences, and only those of
viral records and regions are in the earlier outputs. A stricter cut finds all it needs there; a
more sensitive one may not, and then the FASTA is not written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from virnucpro.ground.errors import InputMissingError, VirnucproError
from virnucpro.ground.files import sha256
from virnucpro.ground.records import FastaRecord, Records
from virnucpro.run.folder import RunDir
from virnucpro.run.hashes import Outputs
from virnucpro.run.manifest import Manifest
from virnucpro.run.scores import ScoreStore
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.inputs import InputFile
from virnucpro.stories.blocks import Maker
from virnucpro.stories.options import RunOptions
from virnucpro.tables.sinks import LETTERS, Portion

_PLACE = re.compile(r"(.*)\|[a-z]+_([0-9]+)_([0-9]+)", re.DOTALL)  # of a region in its record
_UNKNOWN_LINE = re.compile(rf"^[^>\n]*{ScoreStore.unknown}".encode(), re.MULTILINE)  # of a sequence


def lost_inputs(options: RunOptions, rundir: RunDir, recorded: Manifest | None) -> list[str]:
    """The missing inputs of a run, if it can be cut again without them.

    That needs complete scores, and no named input that is new or has changed.
    """
    if not options.resume or recorded is None or not rundir.scores.is_dir():
        return []
    there = {file.path: file for file in recorded.inputs if Path(file.path).is_file()}
    gone = [file.shown for file in recorded.inputs if file.path not in there]
    is_enough = (
        gone
        and all(_is_known(path, recorded) for path in options.input)
        and all(sha256(Path(file.path)) == file.sha256 for file in there.values())
        and Outputs(rundir).read_kept()
    )
    return gone if is_enough else []


def _is_known(path: Path, recorded: Manifest) -> bool:
    """True if a path is an input of the run, or a folder of nothing but inputs of the run."""
    known = [Path(name) for file in recorded.inputs for name in (file.path, file.name) if name]
    here = path.absolute()
    if not path.exists():
        return any(here in (one, *one.parents) for one in known)
    try:
        files = InputFile.all_of(path)
    except VirnucproError:
        return path.is_dir() and any(here in one.parents for one in known)
    return all(Path(file.path) in known for file in files)


class _Peeked:
    """The records of an earlier output, in order; ``next`` is the one to be taken next."""

    def __init__(self, records: Iterator[FastaRecord]) -> None:
        self._records = records
        self.next = next(records, None)

    def take(self) -> None:
        """Advance to the next record."""
        self.next = next(self._records, None)


Letters: TypeAlias = tuple[_Peeked, _Peeked]  # of records that were called viral, and of regions


def letters_of_before(rundir: RunDir, hashes: Mapping[str, str]) -> Letters:
    """Open the FASTA outputs of a run that still have the hash recorded for them.

    They stay open, so replacing the files changes nothing.
    """
    viral, regions = (
        _Peeked(read_fasta(rundir.root / name) if name in hashes else iter(())) for name in LETTERS
    )
    return viral, regions


def check_blind(store: ScoreStore | None, finder: object, lost: Sequence[str]) -> None:
    """
    Raises:
        InputMissingError: another version of VirNucPro made the scores, or regions are wanted that
            were not searched for with these options.
    """
    assert store is not None, "scores are kept where the scorer calls"
    labels = [label for _, label in store.labels()]
    if len(labels) < len(store.files()):
        raise InputMissingError(
            f"{lost[0]} is gone, and another version of VirNucPro made the scores of this run",
            hint="put the input back, so that it can be scored again",
        )
    if finder is not None and any(
        label.attributes.get("finder") != store.finder for label in labels
    ):
        raise InputMissingError(
            f"{lost[0]} is gone, so regions cannot be searched for with new options",
            hint="put the input back, or leave the options for regions as they were",
        )


def blind_portions(maker: Maker, letters: Letters) -> Iterator[Portion]:
    """Yield the outputs of all records of a run without its inputs, in order."""
    store = maker.scores
    assert store is not None, "scores are kept where the scorer calls"
    for path in store.files():
        if (scored := store.read(path, None)[0]) is not None:
            records = Records.of(_with_letters(one, letters) for one in scored.records.each())
            yield from maker.portions(maker.call(replace(scored, records=records)))


def _with_letters(record: FastaRecord, before: Letters) -> FastaRecord:
    """The record with as much of its sequence as the earlier outputs have."""
    (viral, regions), letters = before, record.sequence
    if viral.next is not None and viral.next.id == record.id:
        letters = viral.next.sequence
        viral.take()
    while regions.next is not None:
        place = _PLACE.fullmatch(regions.next.id)
        if place is None or place[1] != record.id:
            break
        start, end = int(place[2]) - 1, int(place[3])
        letters = letters[:start] + regions.next.sequence + letters[end:]
        regions.take()
    return record._replace(sequence=letters)


def lacks_letters(name: str, rows: bytes | memoryview) -> bool:
    """True if the rows of an output are sequences with unknown letters."""
    is_fasta = name.endswith((".fasta", ".fa"))
    return is_fasta and _UNKNOWN_LINE.search(rows) is not None
