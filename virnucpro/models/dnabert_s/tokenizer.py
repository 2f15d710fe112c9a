"""DNABERT-S's tokenizer: byte-pair encoding over A, C, G and T, read from ``tokenizer.json``.

A word merges two others, and its id is the rank of that merge. By definition, encoding repeatedly
merges the two neighbours that form the word with the smallest id, the leftmost first. The result is
the only sequence of words in which no two neighbours would have merged. So texts are read from left
to right. The next word is the longest one that stays separate from the previous word. If there is
none, the previous word was wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import read_json
from virnucpro.models.base import check_intact

UNKNOWN, FIRST, LAST = 0, 1, 2  # ids of [UNK], [CLS], [SEP]
_SPECIAL = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
_BASES = "ACGT"
_PIECES = re.compile(r"[ACGT]+|\S")  # each other letter is an unknown token
_OTHER = len(_BASES)  # code for such a letter
_UNASKED = 0
_APART = 1
_MERGED = 2


class Tokenizer:
    """The words by id, and the encoding of texts."""

    def __init__(self, words: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        """Take ``words`` in id order: special ones, bases, and a word for each merge.

        Raises:
            ValueError: they are in another order.
        """
        n_letters = len(_SPECIAL) + len(_BASES)
        if tuple(words[:n_letters]) != (*_SPECIAL, *_BASES):
            raise ValueError("its first words are not the special ones and the bases")
        if [left + right for left, right in merges] != list(words[n_letters:]):
            raise ValueError("its words are not those of its merges, in their order")
        ids = {word: number for number, word in enumerate(words)}
        self._n_letters = n_letters
        self.n_words = len(words)
        self.merges = tuple(merges)
        self._lengths = list(map(len, words))
        self._parts = [(number, number) for number in range(n_letters)]
        self._parts += [(ids[left], ids[right]) for left, right in merges]
        self._word_of = {parts: n for n, parts in enumerate(self._parts) if n >= n_letters}
        used = self._used_words(words)
        self._shorter = [_longest_prefix(word, used) for word in words]
        self._child, self._word_at = _make_trie(used)
        self._codes = np.full(256, _OTHER, dtype=np.uint8)
        self._codes[list(_BASES.encode())] = range(len(_BASES))
        self._relations = bytearray(self.n_words**2)  # for two neighbours, filled on demand

    def _used_words(self, words: Sequence[str]) -> dict[str, int]:
        """Return the ids for the bases, and for the words that encoding can produce.

        A word never occurs if an earlier merge joins letters across the border between its two
        parts.
        """
        used = dict.fromkeys(range(len(_SPECIAL), self._n_letters))
        for word in range(self._n_letters, self.n_words):
            left, right = self._parts[word]
            if left in used and right in used and self._keep_apart(left, right, until=word):
                used[word] = None
        return {words[number]: number for number in used}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's ids, between [CLS] and [SEP]. White space is dropped."""
        longest = self._longest_words("\0".join(texts))
        rows = []
        first = 0
        for text in texts:
            ids = [FIRST]
            for piece in _PIECES.finditer(text):
                if text[piece.start()] in _BASES:
                    ids += self._read(longest[first + piece.start() : first + piece.end()])
                else:
                    ids.append(UNKNOWN)
            ids.append(LAST)
            rows.append(ids)
            first += len(text) + 1
        return rows

    def _longest_words(self, text: str) -> list[int]:
        """Return the longest word that begins at each letter, or 0."""
        codes = self._codes[np.frombuffer(text.encode("latin-1", "replace"), dtype=np.uint8)]
        codes = np.append(codes, np.uint8(_OTHER))
        longest = np.zeros(len(codes), dtype=np.int64)
        place = np.arange(len(codes))
        node = np.zeros(len(codes), dtype=np.int64)
        depth = 0
        while len(place):
            node = self._child[node, codes.take(place + depth, mode="clip")]
            is_word = node > 0
            place = place[is_word]
            node = node[is_word]
            words = self._word_at[node]
            longest[place[words > 0]] = words[words > 0]
            depth += 1
        ids: list[int] = longest.tolist()
        return ids

    def _read(self, longest: Sequence[int]) -> list[int]:
        """Return the words in a text of bases, from the longest word at each position."""
        lengths = self._lengths
        shorter = self._shorter
        n_words = self.n_words
        relations = self._relations
        end = len(longest)
        ids: list[int] = []
        dead: set[int] = set()  # positions from which no sequence of words fits
        place = 0
        before = FIRST
        word = longest[0]
        while place < end:
            while word:
                pair = before * n_words + word
                relation = relations[pair] or self._relate(pair)
                if relation == _APART and place + lengths[word] not in dead:
                    break
                word = shorter[word]
            if word:
                ids.append(word)
                place += lengths[word]
                before = word
                word = longest[place] if place < end else 0
            else:
                dead.add(place)
                wrong = ids.pop()
                place -= lengths[wrong]
                before = ids[-1] if ids else FIRST
                word = shorter[wrong]
        return ids

    def _relate(self, pair: int) -> int:
        """Find and store the relation of two neighbours: ``_APART`` or ``_MERGED``.

        ``pair`` is their index in ``_relations``.
        """
        left, right = divmod(pair, self.n_words)
        relation = _APART if self._keep_apart(left, right, until=self.n_words) else _MERGED
        self._relations[pair] = relation
        return relation

    def _keep_apart(self, left: int, right: int, until: int) -> bool:
        """Return whether no merge below ``until`` joins two words across the border between them.

        The merges that formed the words at the border are undone, the last one first. Two words
        that were neighbours there would have merged if that merge came before either became part of
        a longer word. Among equal merges, the left one comes first.
        """
        ends = [until, until - 1]  # merges that use up the words at the border
        while True:
            merge = self._word_of.get((left, right))
            if merge is not None and merge < ends[0] and merge <= ends[1]:
                return False
            if max(left, right) < self._n_letters:
                return True
            if left > right:
                ends[0], left = left, self._parts[left][1]
            else:
                ends[1], right = right, self._parts[right][0]


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``. Its padding and truncation are ignored.

    Raises:
        UnavailableError: the file is missing, damaged, or describes another kind of tokenizer.
    """
    hint = "fetch it again: `virnucpro models download dnabert-s`"
    with check_intact(path, "the tokenizer of DNABERT-S", hint):
        content = read_json(path)
        _check_settings(content)
        vocabulary = content["model"]["vocab"]
        words = sorted(vocabulary, key=vocabulary.__getitem__)
        if list(map(vocabulary.__getitem__, words)) != list(range(len(words))):
            raise ValueError("its ids are not counted from 0")
        return Tokenizer(words, [_parts(merge) for merge in content["model"]["merges"]])


def _check_settings(content: Mapping[str, Any]) -> None:
    """Check that the tokenizer splits texts as expected.

    Raises:
        ValueError, LookupError: it describes another way to split texts.
    """
    model = content["model"]
    expected = {"type": "BPE", "dropout": None, "unk_token": _SPECIAL[UNKNOWN]}
    for name, value in expected.items():
        if model[name] != value:
            raise ValueError(f"its {name} is {model[name]!a}")
    for name in ("fuse_unk", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ValueError(f"its {name} is {model[name]!a}")
    if content["normalizer"] is not None or content["pre_tokenizer"] != {"type": "Whitespace"}:
        raise ValueError("it changes texts first")


def _parts(merge: str | Sequence[str]) -> tuple[str, str]:
    """Return the two words in a merge, in either version of the format."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _longest_prefix(word: str, used: Mapping[str, int]) -> int:
    """Return the id of the longest used word at the start of ``word``, or 0."""
    prefixes = (word[:n] for n in range(len(word) - 1, 0, -1))
    return next((used[prefix] for prefix in prefixes if prefix in used), 0)


def _make_trie(used: Mapping[str, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Build the prefix tree over all words: each node's next nodes, and its word id.

    Node 0 is the root, and as a next node means none. Id 0 means no word.
    """
    child = [[0] * (_OTHER + 1)]
    word_at = [0]
    for word, number in used.items():
        node = 0
        for base in map(_BASES.index, word):
            if not child[node][base]:
                child[node][base] = len(child)
                child.append([0] * (_OTHER + 1))
                word_at.append(0)
            node = child[node][base]
        word_at[node] = number
    return np.array(child), np.array(word_at)
