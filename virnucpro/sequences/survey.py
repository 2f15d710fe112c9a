"""The survey of all inputs, before any of them is planned.

It finds which inputs can be read to their end, what they hold, whether an id occurs twice in one,
and whether two of them share an id. A run of one file learns all of that while it is planned.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.config import InputType
from virnucpro.ground.errors import InputError, InputMissingError
from virnucpro.ground.log import LOGGER, announce, counted, printable
from virnucpro.ground.records import FastaRecord, Records
from virnucpro.sequences.fasta import guess_input_type, parsed
from virnucpro.sequences.inputs import InputFile, Source, announce_reads, hashed
from virnucpro.sequences.samples import id_digests, renamed

_IDS_AT_ONCE = 1000  # that are hashed
_TRIED = 1000  # shared hashes that are tried; one of so many is of a shared id, not a collision


def _most(guesses: Sequence[tuple[InputFile, InputType | None]]) -> InputType:
    ranks = Counter(guess for _, guess in guesses if guess is not None).most_common()
    if len(ranks) > 1 and ranks[0][1] == ranks[1][1]:
        files = {guess: file.shown for file, guess in reversed(guesses)}
        raise InputError(
            f"{files['nucleotide']} holds nucleotides, {files['protein']} proteins",
            hint="run them separately, or name the type of all with --input-type",
        )
    return ranks[0][0] if ranks else "nucleotide"


@dataclass(slots=True)
class Survey:
    """One reading of files, each to its end. Memory holds 9 bytes per record at most.

    Files that cannot be read are kept out, with the reasons, unless the survey is strict.
    """

    is_strict: bool = False
    renames: bool = False  # whether repeated ids in a file get numbers
    on_letters: Callable[[int], None] = lambda _: None  # gets the number of letters so far
    n_letters: int = 0
    hashes: array[int] = field(default_factory=lambda: array("q"))  # hashes of ids, once per file
    refused: list[tuple[InputFile, InputError | InputMissingError]] = field(default_factory=list)

    @contextmanager
    def refusing(self, file: InputFile) -> Iterator[None]:
        """Catch an error in the reading of a file, which ends the block; a strict run ends as well.

        Raises:
            InputError, InputMissingError: what stands in the way of a strict run.
        """
        try:
            yield
        except (InputError, InputMissingError) as error:
            if self.is_strict:
                raise
            remedy = f" (hint: {error.hint})" if error.hint else ""
            LOGGER.warning("left out, since it cannot be read: %s%s", error, remedy)
            self.refused.append((replace(file, error=str(error)), error))

    def hash(self, sources: Iterable[Source], on_bytes: Callable[[int], None]) -> list[InputFile]:
        """The files that can be read, hashed; ``on_bytes`` gets the number of bytes so far.

        Raises:
            InputError, InputMissingError: as ``refusing``; or a file changed meanwhile.
        """
        inputs: list[InputFile] = []
        before = 0
        for path, name, sample, mate in sources:
            file = InputFile(str(path), "", 0, name=name, sample=sample, mate=mate)
            with self.refusing(file):
                inputs.append(hashed(file, lambda n, before=before: on_bytes(before + n)))  # type: ignore[misc]
                before += inputs[-1].n_bytes
        announce_reads(inputs)
        return inputs

    def run(self, inputs: Sequence[InputFile]) -> list[InputFile]:
        """The files that can be read.

        The ids of refused files count as well: once a file is fixed, a resume brings them back.
        """
        files = []
        for file in inputs:
            first = len(self.hashes)
            with self.refusing(file):
                files.append(self.read(file))
            self.keep_once(first)
        return files

    def read(self, file: InputFile) -> InputFile:
        """Add the hashes of a file's ids, and count those that are to be renamed.

        Raises:
            InputError: it is not a FASTA file, is damaged, or holds an id twice.
        """
        first = len(self.hashes)
        self.add(parsed(file.blocks()))
        if len(self.hashes) == first:
            LOGGER.warning("%s holds no record", file.shown)
        records = ((file, record) for record in file.read())
        repeat = _find_repeat(records, _sort_and_compare(self.hashes, first))
        if repeat is None:
            return file
        if not self.renames:
            raise repeat.error("or add --rename-duplicates")
        n_renamed = self.keep_once(first)
        announce(
            f"{file.shown}: {counted(n_renamed, 'record')} with an id that occurs earlier, "
            f"numbered: the second {printable(repeat.record_id)} is {printable(repeat.record_id)}_2"
        )
        del self.hashes[first:]
        file = replace(file, n_renamed=n_renamed)
        self.add(renamed(file))
        return file

    def keep_once(self, first: int) -> int:
        """Drop repeated hashes from this place on, and count them."""
        if not len(_sort_and_compare(self.hashes, first)):
            return 0
        n_before = len(self.hashes)
        unique = np.unique(np.frombuffer(self.hashes[first:], dtype=np.int64)).tobytes()
        del self.hashes[first:]
        self.hashes.frombytes(unique)
        return n_before - len(self.hashes)

    def share_ids(self, files: Sequence[InputFile]) -> bool:
        """True if two files share an id; the first such id is announced."""
        suspects = frozenset(_sort_and_compare(self.hashes)[:_TRIED].tolist())
        owners: dict[str, InputFile] = {}
        for file in (*files, *(file for file, _ in self.refused)) if suspects else ():
            with suppress(InputError, InputMissingError):
                for name in chain.from_iterable(records.ids for records in _once_named(file)):
                    if hash(name) not in suspects:
                        continue
                    owner = owners.setdefault(name, file)
                    if owner is not file:
                        announce(
                            f"{owner.shown} and {file.shown} share the id {printable(name)}: "
                            "ids of this run are written with their file, as in "
                            f"{printable(f'{file.sample}:{name}')}"
                        )
                        return True
        return False

    def agree_on_type(
        self, inputs: Sequence[InputFile], recorded: InputType | None = None
    ) -> tuple[InputType, list[InputFile]]:
        """The type of a run's sequences, and the files without those of the other type.

        The type is the recorded one, or else that of most files, by their letters.

        Raises:
            InputError: there are as many files of nucleotides as of proteins.
        """
        guesses: list[tuple[InputFile, InputType | None]] = []
        for file in inputs:
            with self.refusing(file):
                guesses.append((file, guess_input_type(Path(file.path), file.name)))
        agreed = recorded or _most(guesses)
        files = []
        for file, guess in guesses:
            with self.refusing(file):
                if guess not in (None, agreed):
                    raise InputError(
                        f"{file.shown} holds {guess}s, the other files {agreed}s",
                        hint="move it to another folder and run it by itself, or name the type of "
                        "all with --input-type",
                    )
                files.append(file)
        return agreed, files

    @staticmethod
    def doubt_type(inputs: Sequence[InputFile], input_type: InputType) -> None:
        """Warn of files that do not look like the input type that the user named."""
        strange = []
        for file in inputs:
            with suppress(InputError, InputMissingError):  # it is reported when the file is read
                if guess_input_type(Path(file.path), file.name) not in (None, input_type):
                    strange.append(file.shown)
        if strange:
            others = f" and {counted(len(strange) - 1, 'other file')}" if len(strange) > 1 else ""
            LOGGER.warning(
                "%s%s: read as %ss, but the letters are not those of %ss (hint: leave "
                "--input-type out to let the letters decide)",
                *(strange[0], others, input_type, input_type),
            )

    def add(self, blocks: Iterable[Records]) -> None:
        for records in blocks:
            self.hashes.extend(map(hash, records.ids))
            self.n_letters += sum(map(len, records.sequences))
            self.on_letters(self.n_letters)


def _once_named(file: InputFile) -> Iterator[Records]:
    """The records of a file; no two have the same id."""
    return renamed(file) if file.n_renamed else parsed(file.blocks())


@dataclass(frozen=True, slots=True)
class _Repeat:
    """An id, and the two places where it stands."""

    record_id: str
    first: str
    second: str

    def error(self, remedy: str) -> InputError:
        return InputError(
            f"{self.second}: the id {printable(self.record_id)} occurs twice "
            f"(first at {self.first})",
            hint=f"make the ids unique, for example with `seqkit rename`, {remedy}",
        )


def find_repeat(
    records: Iterable[tuple[InputFile, FastaRecord]], digests: array[int]
) -> _Repeat | None:
    """The first id that stands twice; records are read only if digests of their ids do.

    The digests are sorted where they are: there may be hundreds of millions.
    """
    return _find_repeat(records, _sort_and_compare(digests), _digests)


def _digests(ids: Sequence[str]) -> list[int]:
    digests: list[int] = id_digests(ids).view(np.int64).tolist()
    return digests


def _hashes(ids: Sequence[str]) -> list[int]:
    return list(map(hash, ids))


def _sort_and_compare(hashes: array[int], first: int = 0) -> NDArray[np.int64]:
    """Sort the hashes from a place on; return those that occur more than once, each once."""
    ordered = np.frombuffer(hashes, dtype=np.int64)[first:]
    ordered.sort()
    return _neighbours(ordered)


def _neighbours(ordered: NDArray[np.int64]) -> NDArray[np.int64]:
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    return np.concatenate([repeats[:1], repeats[1:][repeats[1:] != repeats[:-1]]])


def _find_repeat(
    records: Iterable[tuple[InputFile, FastaRecord]],
    hashes: NDArray[np.int64],
    hashes_of: Callable[[Sequence[str]], list[int]] = _hashes,
) -> _Repeat | None:
    """The first id, among those that have these hashes, that stands twice."""
    suspects = frozenset(hashes.tolist())
    first: dict[str, str] = {}
    places = ((file, record.id, record.line) for file, record in (records if suspects else ()))
    while some := list(islice(places, _IDS_AT_ONCE)):
        of_ids = hashes_of([record_id for _, record_id, _ in some])
        for (file, record_id, line), value in zip(some, of_ids, strict=True):
            if value in suspects:
                where = f"{file.shown}:{line}"
                if record_id in first:
                    return _Repeat(record_id, first[record_id], where)
                first[record_id] = where
    return None
