"""Interpret the sequences that a Python caller passes: paths, text, records or a mapping.

A ``pathlib.Path`` is always a path. A string is a path if a file or folder with this name exists,
or if it contains a character that only paths have, such as a slash or a dot. It is a sequence if it
contains only capital letters, or only DNA and RNA letters. Any other string could be a mistyped
path or sequence, so it raises an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from virnucpro.core.errors import InputError
from virnucpro.core.logging import printable
from virnucpro.core.model_outputs import MASK_LETTER
from virnucpro.core.types import MASK_TEXT

Record: TypeAlias = Any  # (id, sequence), or a SeqRecord of Biopython
Paths: TypeAlias = str | Path | Iterable[str | Path]
Sequences: TypeAlias = str | Path | Mapping[str, Any] | Iterable[str | Path] | Iterable[Record]
_Kind: TypeAlias = Literal["path", "sequence", "record"]

_RESIDUES = re.compile(r"(?:[A-Z]|<mask>)(?:[A-Z*]|<mask>)*")
_BASES = re.compile(r"[ACGTUNacgtun]+")
_NO_SEQUENCE = re.compile(r"[^A-Za-z0-9*>\s-]")  # a character that only paths have
_WAYS = (
    "give a path as pathlib.Path or with input=, and a sequence in capital letters, as a pair of "
    "id and sequence, or in a dict"
)


class NamedSequence(NamedTuple):
    """A sequence with its id, as FASTA can represent it. ``fault`` says why it cannot."""

    id: str
    letters: str
    fault: str = ""


def split_input(sequences: Sequences) -> tuple[list[str | Path], Iterator[NamedSequence]]:
    """Distinguish paths from sequences. One of the two results is empty.

    Only the first item of a sequence iterator is read now.

    Raises:
        InputError: an item is neither, or of another kind than the first. See the module.
    """
    items = _iter_items(sequences)
    first = next(items, None)
    if first is None:
        return [], iter(())
    kind = _item_kind(first)
    same = _check_one_kind(chain([first], items), kind)
    if kind == "path":
        return list(same), iter(())
    return [], _with_name(same, kind)


def _iter_items(sequences: Sequences) -> Iterator[Any]:
    """Iterate over the items that a caller passed.

    Raises:
        InputError: the value is not iterable, or is a single record.
    """
    if isinstance(sequences, str) and not sequences:
        raise InputError("the path or sequence is empty", hint="check that the variable is set")
    if isinstance(sequences, str | Path):
        return iter([sequences])
    if isinstance(sequences, Mapping):
        return iter(sequences.items())
    if hasattr(sequences, "seq") or not isinstance(sequences, Iterable):
        raise InputError(
            f"{printable(repr(sequences))} is neither a path, a sequence, a list nor a dict",
            hint="give paths, sequences, or a list of records: pairs of id and sequence, or "
            "SeqRecords",
        )
    return iter(sequences)


def _check_one_kind(items: Iterable[Any], kind: _Kind) -> Iterator[Any]:
    """Yield the items.

    Raises:
        InputError: an item is of another kind.
    """
    for item in items:
        own = "sequence" if kind == "sequence" and _may_be_sequence(item) else _item_kind(item)
        if own != kind:
            raise InputError(
                f"{printable(repr(item))} is not a {kind}, unlike the first one",
                hint=f"pass items of one kind: {_WAYS}",
            )
        yield item


def _item_kind(item: Any) -> _Kind:  # noqa: ANN401 - user input
    """Classify an item as path, sequence or record.

    Raises:
        InputError: a string may be a path or a sequence.
    """
    if isinstance(item, Path):
        return "path"
    if not isinstance(item, str):
        return "record"
    if _exists(item) or item == "-" or "\0" in item:  # ``-`` is standard input
        return "path"
    if _RESIDUES.fullmatch(item) or _BASES.fullmatch(item):
        return "sequence"
    if item and _NO_SEQUENCE.search(item) and not item.startswith(">"):
        return "path"
    problem = "text of a FASTA file" if item.startswith(">") else "neither a file nor a sequence"
    raise InputError(f"{printable(repr(item))} is {problem}", hint=_WAYS)


def _may_be_sequence(item: Any) -> bool:  # noqa: ANN401 - user input
    """Return True if a later item in a list of sequences is one too, even with invalid letters.

    It gets the status ``invalid``, so that it does not stop the others.
    """
    return isinstance(item, str) and not {"/", "."} & set(item) and not _exists(item)


def _exists(name: str) -> bool:
    """Return True if a file or folder has this name. Skip long names without a slash."""
    longest_name = 255  # bytes in a file name on common file systems
    is_short = len(name) <= longest_name or os.sep in name
    return bool(name) and "\0" not in name and is_short and os.path.lexists(name)


def _with_name(items: Iterable[Any], kind: _Kind) -> Iterator[NamedSequence]:
    """Yield ids and sequences. Sequences without ids are numbered from 1.

    Raises:
        InputError: an item is not a record.
    """
    for number, item in enumerate(items, 1):
        yield _record((f"sequence_{number}", item) if kind == "sequence" else item)


def _record(item: Record) -> NamedSequence:
    """Convert an item to a named sequence.

    Raises:
        InputError: the item is not a pair of id and sequence, or FASTA cannot represent the id.
    """
    pair = (item.id, item.seq) if hasattr(item, "seq") else item
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
        raise InputError(
            f"{printable(repr(item))} is not a record",
            hint="give paths, sequences, pairs of id and sequence, or SeqRecords",
        )
    name = str(pair[0])  # NumPy has its own string type
    if name.split() != [name]:
        raise InputError(
            f"the id {printable(repr(name))} is empty or has blanks", hint="give an id of one word"
        )
    sequence = getattr(pair[1], "seq", pair[1])  # a dict may have SeqRecords as values
    if not isinstance(sequence, str) and not type(sequence).__module__.startswith("Bio."):
        return NamedSequence(name, "", f"its sequence is not text: {printable(repr(sequence))}")
    letters = str(sequence).replace(MASK_TEXT, MASK_LETTER)
    if letters.split() not in ([letters], []) or ">" in letters:
        return NamedSequence(name, "", "its sequence has blanks or >")
    return NamedSequence(name, letters)
