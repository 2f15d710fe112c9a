"""Parse the names that a run derives from record ids, and search for ids that look like one.

A chunk is ``ID_chunk_2``, its frame ``ID_chunk_2F1``, a piece ``ID_piece_3``, and a region
``ID|provirus_1_500`` or ``ID|whole_1_500``. If a record of the run already has such a name as its
id, a number follows: ``ID|provirus_1_500_2``, ``ID_chunk_2_2F1``. Two records or positions never
get the same derived name, because the id is everything before the last of these words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

FRAME_ENDINGS = ("", "F1", "F2", "F3", "R1", "R2", "R3")  # for a chunk and its frames
_NUMBER = "[1-9][0-9]*"
_DERIVED = re.compile(
    rf"(?P<owner>.+)(?P<part>_(?:chunk|piece)_{_NUMBER}|\|(?:provirus|whole)_{_NUMBER}_{_NUMBER})"
    rf"(?:_{_NUMBER})?(?P<frame>[FR][123])?",
    re.DOTALL,
)
# words in derived names, by their first letter
_WORDS = {b"_": (b"_chunk_", b"_piece_"), b"|": (b"|provirus_", b"|whole_")}


def original_name(name: str) -> str:
    """Return the record id from which a run would derive this name, or "" if there is no such id.

    >>> original_name("a_chunk_1F2"), original_name("a_chunk_01")
    ('a', '')
    >>> original_name("a|provirus_1_500_2")
    'a'
    """
    match = _DERIVED.fullmatch(name)
    return match["owner"] if match else ""


def without_number(name: str) -> str:
    """Remove from a derived name the number that distinguishes it from an id.

    Other names are returned unchanged.

    >>> without_number("a_chunk_1_2F2"), without_number("a|provirus_1_500"), without_number("a_2")
    ('a_chunk_1F2', 'a|provirus_1_500', 'a_2')
    """
    match = _DERIVED.fullmatch(name)
    return f"{match['owner']}{match['part']}{match['frame'] or ''}" if match else name


@dataclass(slots=True, eq=False)
class DerivedNameScan:
    """Search for derived names in a text that arrives in blocks."""

    _OVERLAP = max(len(word) for words in _WORDS.values() for word in words) - 1

    has_found: bool = False
    _end: bytes = field(default=b"")  # last bytes of the blocks so far

    def scan(self, block: bytes) -> None:
        if not self.has_found:
            joint = self._end + block[: self._OVERLAP]
            self.has_found = _has_word(joint) or _has_word(block)
            self._end = (joint if len(block) < self._OVERLAP else block)[-self._OVERLAP :]


def _has_word(data: bytes) -> bool:
    return any(_occur(first, words, data) for first, words in _WORDS.items())


def _occur(first: bytes, words: tuple[bytes, ...], data: bytes) -> bool:
    """Return True if any of ``words``, which all begin with ``first``, occurs in some bytes.

    Most bytes are sequence letters, and searching for one letter is many times faster than
    searching for a word.
    """
    few = 100  # positions checked one by one
    position = data.find(first)
    for _ in range(few):
        if position < 0:
            return False
        if data.startswith(words, position):
            return True
        position = data.find(first, position + 1)
    return position >= 0 and _occur_behind(position, first, words, data)


def _occur_behind(position: int, first: bytes, words: tuple[bytes, ...], data: bytes) -> bool:
    """Search from ``position`` on with arrays, which is faster if the first letter is frequent."""
    letters = np.frombuffer(data, np.uint8)
    candidates = position + np.flatnonzero(letters[position:] == ord(first))
    for word in words:
        matches = candidates[candidates <= len(data) - len(word)]
        for offset, letter in enumerate(word[1:], 1):
            matches = matches[letters[matches + offset] == letter]
            if not len(matches):
                break
        else:
            return True
    return False
