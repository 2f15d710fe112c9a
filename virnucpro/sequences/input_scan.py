"""Scan all inputs before the run is planned.

The scan finds which inputs are readable to their end, which type they contain, whether an id occurs
twice in a file, and whether two files share an id. A run with one file needs no scan, because
planning finds the same.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import compress, islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import InputError, InputMissingError
from virnucpro.core.logging import LOGGER, announce, format_count, printable
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import InputType
from virnucpro.core.types import FastaRecord, Records
from virnucpro.sequences.fasta import detect_interleaved, guess_input_type, parse_block
from virnucpro.sequences.file_scan import FileScan, RecordScan, scan_file, with_text_hash
from virnucpro.sequences.inputs import InputFile, list_inputs
from virnucpro.sequences.samples import find_repeated_ids, id_digests, rename_records


def _majority(guesses: Sequence[tuple[InputFile, InputType | None]]) -> InputType:
    ranks = Counter(guess for _, guess in guesses if guess is not None).most_common()
    if len(ranks) > 1 and ranks[0][1] == ranks[1][1]:
        files = {guess: file.display_name for file, guess in reversed(guesses)}
        raise InputError(
            f"{files['nucleotide']} contains nucleotides, {files['protein']} proteins",
            hint=with_options(
                "run them separately, or set the type of all files with {input_type}"
            ),
        )
    return ranks[0][0] if ranks else "nucleotide"


@dataclass(slots=True, eq=False)
class InputScan:
    """Read all files once to their end. Memory contains at most 9 bytes per record.

    Unreadable files are rejected, with the reason. A strict scan raises instead.
    """

    is_strict: bool = False
    renames: bool = False  # repeated ids in a file get numbers
    on_letters: Callable[[int], None] = lambda _: None  # gets the number of letters so far
    on_text_bytes: Callable[[int], None] = lambda _: None  # gets the decompressed bytes so far
    n_letters: int = 0
    digests: array[int] = field(default_factory=lambda: array("q"))  # of ids, once per file
    refused: list[tuple[InputFile, InputError | InputMissingError]] = field(default_factory=list)

    scans: dict[str, FileScan] = field(default_factory=dict)  # by path
    n_free_bytes: int = 1 << 25  # memory left for parsed records

    @contextmanager
    def rejecting(self, file: InputFile) -> Iterator[None]:
        """Reject a file if the ``with`` block cannot read it.

        Raises:
            InputError, InputMissingError: the error, if the scan is strict.
        """
        try:
            yield
        except (InputError, InputMissingError) as error:
            if self.is_strict:
                raise
            remedy = with_options(" (hint: {hint})", hint=error.hint) if error.hint else ""
            LOGGER.warning("skipped an unreadable file: %s%s", error.message, remedy)
            self.refused.append((replace(file, error=str(error)), error))

    def hash(
        self,
        files: Iterable[InputFile],
        on_bytes: Callable[[int], None],
        *,
        reads_records: bool = False,
    ) -> list[InputFile]:
        """Hash the readable files that have no hash yet. ``on_bytes`` gets the bytes so far.

        With ``reads_records``, the same pass reads their records for the steps that follow.

        Raises:
            InputError, InputMissingError: as ``rejecting``.
        """
        inputs: list[InputFile] = []
        n_before = 0
        for file in files:
            with self.rejecting(file):
                if file.stamp is None:
                    scan = scan_file(
                        file,
                        lambda n: on_bytes(n_before + n),  # noqa: B023 - called at once
                        reads_records=reads_records,
                        max_kept_bytes=self.n_free_bytes,
                    )
                    file = scan.file
                    self.scans[file.path] = scan
                    self.n_free_bytes -= file.parsed.n_bytes if file.parsed else 0
                inputs.append(file)
                n_before += file.n_bytes
        self._announce_reads(inputs)
        return inputs

    def _announce_reads(self, inputs: Iterable[InputFile]) -> None:
        """Announce once how FASTQ reads are treated."""
        n_files = 0
        interleaved: list[str] = []
        for file in inputs:
            with suppress(InputError, InputMissingError):  # reported when the file is read
                kind = self._reads_kind(file)
                n_files += bool(kind)
                if kind == "mates" and not file.mate:
                    interleaved.append(file.display_name)
        if n_files:
            announce(f"{format_count(n_files, 'FASTQ file')}: qualities are ignored")
        if interleaved:
            announce(f"{list_inputs(interleaved, 1)}: interleaved read pairs; ids end in /1 and /2")

    def _reads_kind(self, file: InputFile) -> Literal["", "single", "mates"]:
        """Detect whether a file has reads, as ``detect_interleaved`` does.

        Raises:
            InputError, InputMissingError: as ``detect_interleaved``.
        """
        scan = self.scans.get(file.path)
        if scan and scan.records:
            return scan.records.reads
        return "" if scan and scan.begins_as_fasta else detect_interleaved(Path(file.path))

    def _scanned_records(self, file: InputFile) -> RecordScan | None:
        """Return the records of a file, if the pass that hashed it read them."""
        scan = self.scans.get(file.path)
        return scan.records if scan else None

    def hash_texts(self, files: Iterable[InputFile]) -> list[InputFile]:
        """Hash the decompressed content of compressed files, and return the readable files.

        Raises:
            InputError, InputMissingError: as ``rejecting``.
        """
        inputs: list[InputFile] = []
        n_before = 0
        for file in files:
            with self.rejecting(file):
                scan = self.scans.get(file.path)
                if scan is None or scan.is_packed:
                    file = with_text_hash(file, lambda n: self.on_text_bytes(n_before + n))  # noqa: B023 - called at once
                inputs.append(file)
                n_before += file.n_text_bytes
        return inputs

    def run(self, inputs: Sequence[InputFile]) -> list[InputFile]:
        """Scan the files and return the readable ones.

        Ids in rejected files count too, because a resume may add a repaired file.
        """
        files = []
        for file in inputs:
            first = len(self.digests)
            with self.rejecting(file):
                files.append(self.read(file))
            self.keep_once(first)
        return files

    def read(self, file: InputFile) -> InputFile:
        """Add the digests of a file's ids, and count the records to rename.

        Raises:
            InputError: the file is not FASTA, is damaged, or has an id twice.
        """
        first = len(self.digests)
        if scanned := self._scanned_records(file):
            self.digests.extend(scanned.digests)
            del scanned.digests[:]
            self.n_letters += scanned.n_letters
            self.on_letters(self.n_letters)
            if scanned.fault is not None:
                raise scanned.fault
        else:
            self.add(parse_block(file.blocks()))
        if len(self.digests) == first:
            LOGGER.warning("%s has no records", file.display_name)
        records = ((file, record) for record in file.read())
        repeat = find_repeat(records, self.digests, first)
        if repeat is None:
            return file
        if not self.renames:
            raise repeat.error(with_options("or add {rename_duplicates}"))
        n_renamed = self.keep_once(first)
        announce(
            f"{file.display_name}: numbered {format_count(n_renamed, 'record')} with a "
            f"repeated id: the "
            f"second {printable(repeat.record_id)} is {printable(repeat.record_id)}_2"
        )
        del self.digests[first:]
        file = replace(file, n_renamed=n_renamed)
        self.add(rename_records(file))
        return file

    def keep_once(self, first: int) -> int:
        """Drop repeated digests from index ``first`` on. Return how many were dropped."""
        if not len(_sort_and_compare(self.digests, first)):
            return 0
        n_before = len(self.digests)
        unique = np.unique(np.frombuffer(self.digests[first:], dtype=np.int64)).tobytes()
        del self.digests[first:]
        self.digests.frombytes(unique)
        return n_before - len(self.digests)

    def share_ids(self, files: Sequence[InputFile]) -> bool:
        """Return True if two files share an id, judged by digests, and announce it."""
        if not files or not len(_sort_and_compare(self.digests)):
            return False
        announce(
            "files share ids: ids of this run begin with their sample, as in "
            f"{printable(f'{files[0].sample}:ID')}"
        )
        return True

    def decide_type(
        self, inputs: Sequence[InputFile], recorded: InputType | None = None
    ) -> tuple[InputType, list[InputFile]]:
        """Decide the sequence type of the run: the recorded type, or else the most frequent one.

        Returns:
            The type, and the files that do not have the other type.

        Raises:
            InputError: equal numbers of files contain nucleotides and proteins.
        """
        guesses: list[tuple[InputFile, InputType | None]] = []
        for file in inputs:
            with self.rejecting(file):
                guesses.append((file, self._guess_type(file)))
        agreed = recorded or _majority(guesses)
        files = []
        for file, guess in guesses:
            with self.rejecting(file):
                if guess not in (None, agreed):
                    raise InputError(
                        f"{file.display_name} contains {guess}s, the other files {agreed}s",
                        hint=with_options(
                            "run it separately, or set the type of all files with {input_type}"
                        ),
                    )
                files.append(file)
        return agreed, files

    def _guess_type(self, file: InputFile) -> InputType | None:
        """Guess the type of a file, as ``guess_input_type`` does.

        Raises:
            InputError, InputMissingError: as ``guess_input_type``.
        """
        scanned = self._scanned_records(file)
        if scanned is None or scanned.fault is not None:
            return guess_input_type(Path(file.path), file.name)
        if isinstance(scanned.input_type, InputError):
            raise scanned.input_type
        return scanned.input_type

    def warn_of_type(self, inputs: Sequence[InputFile], input_type: InputType) -> None:
        """Warn about files that do not look like the user's input type."""
        mismatched = []
        for file in inputs:
            with suppress(InputError, InputMissingError):  # reported when the file is read
                if self._guess_type(file) not in (None, input_type):
                    mismatched.append(file.display_name)
        if mismatched:
            n_more = len(mismatched) - 1
            more = f" and {format_count(n_more, 'other file')}" if n_more else ""
            LOGGER.warning(
                "%s%s: read as %ss, but the letters do not look like %ss%s",
                mismatched[0],
                more,
                input_type,
                input_type,
                with_options(" (hint: leave {input_type} out to detect the type from the letters)"),
            )

    def add(self, blocks: Iterable[Records]) -> None:
        for records in blocks:
            self.digests.frombytes(id_digests(records.ids).tobytes())
            self.n_letters += sum(map(len, records.sequences))
            self.on_letters(self.n_letters)


@dataclass(frozen=True, slots=True)
class _Repeat:
    """An id that occurs twice, and its first two positions as file:line."""

    record_id: str
    first: str
    second: str

    def error(self, remedy: str) -> InputError:
        return InputError(
            f"{self.second}: the id {printable(self.record_id)} occurs twice "
            f"(first at {self.first})",
            hint=with_options(
                "make the ids unique, for example with `seqkit rename`, {remedy}", remedy=remedy
            ),
        )


def find_repeat(
    records: Iterable[tuple[InputFile, FastaRecord]], digests: array[int], first: int = 0
) -> _Repeat | None:
    """Find the first id that occurs twice. Records are read only if a digest occurs twice.

    The digests from index ``first`` on, up to hundreds of millions, are sorted without a copy.
    """
    ids_at_once = 1000  # ids per lookup
    suspects = _sort_and_compare(digests, first)
    positions: dict[str, str] = {}
    remaining = iter(records if len(suspects) else ())
    while batch := list(islice(remaining, ids_at_once)):
        names = {*_suspect_repeats([record.id for _, record in batch], suspects)}
        for file, record in batch:
            if record.id in names:
                position = f"{file.display_name}:{record.line}"
                if record.id in positions:
                    return _Repeat(record.id, positions[record.id], position)
                positions[record.id] = position
    return None


def _suspect_repeats(ids: Sequence[str], suspects: NDArray[np.int64]) -> list[str]:
    """Return the ids that have one of these digests."""
    return list(compress(ids, np.isin(id_digests(ids).view(np.int64), suspects)))


def _sort_and_compare(digests: array[int], first: int = 0) -> NDArray[np.int64]:
    """Sort the digests from ``first`` on, without a copy. Return each repeated digest once."""
    if len(digests) - first < 2:  # as in many small files
        return np.empty(0, dtype=np.int64)
    ordered = np.frombuffer(digests, dtype=np.int64)[first:]
    ordered.sort()
    return find_repeated_ids(ordered)


def rejected_files(survey: InputScan) -> tuple[InputFile, ...]:
    return tuple(file for file, _ in survey.refused)


def warn_of_copies(files: Iterable[InputFile]) -> None:
    groups: dict[str, list[InputFile]] = {}
    for file in files:
        groups.setdefault(file.identity, []).append(file)
    groups.pop(hashlib.sha256().hexdigest(), None)  # files without content repeat nothing
    for first, *copies in groups.values():
        if copies:
            more = f" + {len(copies) - 1} more" if len(copies) > 1 else ""
            LOGGER.warning(
                "%s and %s%s have the same content: each record counts %s",
                first.display_name,
                copies[0].display_name,
                more,
                f"{len(copies) + 1} times" if more else "twice",
            )
