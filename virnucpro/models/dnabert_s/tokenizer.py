"""DNABERT-S's tokenizer: byte-pair encoding over A, C, G and T, read from ``tokenizer.json``.

A word merges two others, and its id is the rank of that merge. The library ``tokenizers`` encodes
texts. The extra ``published`` installs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virnucpro.core.atomic_io import read_json
from virnucpro.core.errors import UnavailableError
from virnucpro.models.base import check_intact

if TYPE_CHECKING:
    import tokenizers


class _SpecialWord(IntEnum):
    """Ids of the words that are no bases. In the vocabulary they have brackets: ``[UNK]``."""

    UNK = 0
    CLS = 1
    SEP = 2
    PAD = 3
    MASK = 4

    @property
    def text(self) -> str:
        return f"[{self.name}]"


class Tokenizer:
    """The words by id, and the encoding of texts."""

    def __init__(self, words: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        """Take ``words`` in id order: special ones, bases, and a word for each merge.

        Raises:
            ValueError: they are in another order.
            UnavailableError: the library is not installed.
        """
        first_words = (*(word.text for word in _SpecialWord), *"ACGT")
        if tuple(words[: len(first_words)]) != first_words:
            raise ValueError("its first words are not the special ones and the bases")
        if [left + right for left, right in merges] != list(words[len(first_words) :]):
            raise ValueError("its words are not those of its merges, in their order")
        self.n_words = len(words)
        self.merges = tuple(merges)
        self._encoder = _make_encoder(words, self.merges)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's ids, between [CLS] and [SEP]. White space is dropped.

        Texts are encoded one by one, because the library would encode a batch with a thread on
        every core.
        """
        encodings = (self._encoder.encode(text, add_special_tokens=False) for text in texts)
        return [[_SpecialWord.CLS, *encoding.ids, _SpecialWord.SEP] for encoding in encodings]


def _make_encoder(words: Sequence[str], merges: Sequence[tuple[str, str]]) -> tokenizers.Tokenizer:
    """Make the library's tokenizer, in which each letter but A, C, G and T is an unknown token.

    Raises:
        UnavailableError: the library is not installed.
    """
    try:
        from tokenizers import Tokenizer as Encoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import Whitespace
    except ModuleNotFoundError as error:
        raise UnavailableError(
            "DNABERT-S needs the package tokenizers, which is not installed",
            hint="pip install 'virnucpro[published]'",
        ) from error
    vocabulary = {word: number for number, word in enumerate(words)}
    encoder = Encoder(BPE(vocabulary, list(merges), unk_token=_SpecialWord.UNK.text))
    encoder.pre_tokenizer = Whitespace()
    return encoder


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
    expected = {"type": "BPE", "dropout": None, "unk_token": _SpecialWord.UNK.text}
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
