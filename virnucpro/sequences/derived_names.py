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
# first letter of the words -> the words, as they occur in a file
_WORDS = {b"_": (b"_chunk_", b"_piece_"), b"|": (b"|provirus_", b"|whole_")}
_OVERLAP = max(len(word) for words in _WORDS.values() for word in words) - 1


def owner_of(name: str) -> str:
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
            data = self._end + block
            self.has_found = any(
                _occurs(first, word, data) for first, words in _WORDS.items() for word in words
            )
            self._end = data[-_OVERLAP:]


def _occurs(first: bytes, word: bytes, data: bytes) -> bool:
    """Whether a word, which begins with ``first``, occurs in some bytes.

    Most bytes are letters of sequences, and a search for one letter is many times as fast as that
    for a word.
    """
    if first not in data:
        return False
    letters = np.frombuffer(data, np.uint8)
    places = np.flatnonzero(letters[: len(data) - len(word) + 1] == ord(first))
    for offset, letter in enumerate(word):
        places = places[letters[places + offset] == letter]
    return len(places) > 0
