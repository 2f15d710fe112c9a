"""Names that a run derives from the id of a record, and the search for ids that look like one.

A chunk is ``ID_chunk_2``, a frame of it ``ID_chunk_2F1``, a piece ``ID_piece_3``, and a region
``ID|provirus_1_500`` or ``ID|whole_1_500``. If a record of the run has such a name as its id, a
number follows: ``ID|provirus_1_500_2``, ``ID_chunk_2_2F1``. Two records or positions never give the
same derived name, because the id is all that precedes the last of these words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

FRAME_ENDINGS = ("", "F1", "F2", "F3", "R1", "R2", "R3")  # of a chunk and its frames
_NUMBER = "[1-9][0-9]*"
_DERIVED = re.compile(
    rf"(?P<owner>.+)(?P<place>_(?:chunk|piece)_{_NUMBER}|\|(?:provirus|whole)_{_NUMBER}_{_NUMBER})"
    rf"(?:_{_NUMBER})?(?P<frame>[FR][123])?",
    re.DOTALL,
)
# the words of derived names in a file, by their first letter
_WORDS = {b"_": (b"_chunk_", b"_piece_"), b"|": (b"|provirus_", b"|whole_")}
_OVERLAP = max(len(word) for words in _WORDS.values() for word in words) - 1
_FEW = 100  # places that are looked at one by one


def original_name(name: str) -> str:
    """The id of the record from which a run would derive this name; "" if it would not.

    >>> owner_of("a_chunk_1F2"), owner_of("a|provirus_1_500_2"), owner_of("a_chunk_01")
    ('a', 'a', '')
    """
    match = _DERIVED.fullmatch(name)
    return match["owner"] if match else ""


def without_number(name: str) -> str:
    """A derived name without the number that keeps it apart from an id; other names unchanged.

    >>> without_number("a_chunk_1_2F2"), without_number("a|provirus_1_500"), without_number("a_2")
    ('a_chunk_1F2', 'a|provirus_1_500', 'a_2')
    """
    match = _DERIVED.fullmatch(name)
    return f"{match['owner']}{match['place']}{match['frame'] or ''}" if match else name


@dataclass(slots=True)
class DerivedNameScan:
    """Look for the words of derived names in a text that comes in blocks."""

    has_found: bool = False
    _end: bytes = field(default=b"")  # of the blocks so far

    def scan(self, block: bytes) -> None:
        if not self.has_found:
            joint = self._end + block[:_OVERLAP]
            self.has_found = _has_word(joint) or _has_word(block)
            self._end = (joint if len(block) < _OVERLAP else block)[-_OVERLAP:]


def _has_word(data: bytes) -> bool:
    return any(_occur(first, words, data) for first, words in _WORDS.items())


def _occur(first: bytes, words: tuple[bytes, ...], data: bytes) -> bool:
    """Whether a word, all of which begin with ``first``, occurs in some bytes.

    Most bytes are letters of sequences, and a search for one letter is many times as fast as that
    for a word.
    """
    place = data.find(first)
    for _ in range(_FEW):
        if place < 0:
            return False
        if data.startswith(words, place):
            return True
        place = data.find(first, place + 1)
    return place >= 0 and _occur_behind(place, first, words, data)


def _occur_behind(place: int, first: bytes, words: tuple[bytes, ...], data: bytes) -> bool:
    """The same from a place on, which is faster if the first letter is frequent."""
    letters = np.frombuffer(data, np.uint8)
    places = place + np.flatnonzero(letters[place:] == ord(first))
    for word in words:
        some = places[places <= len(data) - len(word)]
        for offset, letter in enumerate(word[1:], 1):
            some = some[letters[some + offset] == letter]
            if not len(some):
                break
        else:
            return True
    return False
