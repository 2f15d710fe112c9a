"""Name the outputs of a model, and describe the array of each.

The array of an output has the rows of one sequence after the other. The number of rows for a
sequence depends on the kind of the output and on the length of the sequence, so an array needs no
index besides the ids and lengths of its sequences.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MASK_LETTER = "\x01"  # stands for ``MASK_TEXT``, so that each residue has one letter
Pooling = Literal["mean", "max", "std", "bos", "none"]
Include = Literal["contacts", "logits", "perplexity", "perplexity-single-pass"]
Store = Literal["float32", "bfloat16"]  # numbers on disk; bfloat16 rounds to nearest even
OutputKind = Literal["per_sequence", "per_residue", "pairwise", "scalar"]

_RESIDUES = "residues"  # the name of vectors without pooling


class HeadOutput(StrEnum):
    """The names of the arrays that ``--include`` adds."""

    CONTACTS = "contacts"
    LOGITS = "logits"
    PERPLEXITY = "perplexity"
    SINGLE_PASS_PERPLEXITY = "perplexity_single_pass"

    @classmethod
    def from_option(cls, include: Include) -> HeadOutput:
        """Return the output for a value of ``--include``.

        >>> str(HeadOutput.from_option("perplexity-single-pass"))
        'perplexity_single_pass'
        """
        return cls(include.replace("-", "_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """One output of a model.

    - ``per_sequence``: one row for each sequence, such as ``mean_layer33``
    - ``per_residue``: one row for each residue, such as ``residues_layer33`` and ``logits``
    - ``pairwise``: one number for each pair of residues, row by row: ``contacts``
    - ``scalar``: one number for each sequence, such as ``perplexity``
    """

    name: str
    kind: OutputKind
    width: int  # numbers per row; 1 for pairs and scalars
    dtype: Store = "float32"

    @property
    def has_vectors(self) -> bool:
        """Return True if a row is a vector, not a single number."""
        return self.kind in ("per_sequence", "per_residue")

    @property
    def has_one_row(self) -> bool:
        """Return True if each sequence has one row, whatever its length."""
        return self.kind in ("per_sequence", "scalar")

    def count_rows(self, lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Count the rows for sequences of these lengths. (n,) residues -> (n,)"""
        exponents = {"scalar": 0, "per_sequence": 0, "per_residue": 1, "pairwise": 2}
        return lengths.astype("int64") ** exponents[self.kind]

    def shape(self, lengths: NDArray[np.integer[Any]]) -> tuple[int, ...]:
        """Return the shape of the array for sequences of these lengths.

        (n_rows, width) for vectors, and (n_rows,) for single numbers.
        """
        n_rows = int(self.count_rows(lengths).sum())
        return (n_rows, self.width) if self.has_vectors else (n_rows,)


def vector_name(pooling: Pooling, layer: int) -> str:
    """Name the vectors after a layer.

    >>> vector_name("mean", 33), vector_name("none", 6)
    ('mean_layer33', 'residues_layer6')
    """
    return f"{_RESIDUES if pooling == 'none' else pooling}_layer{layer}"


class VectorName(NamedTuple):
    """What the name of vectors says."""

    pooling: Pooling
    layer: int


def parse_vector_name(name: str) -> VectorName | None:
    """Read the name of vectors. Return None for the result of a head.

    >>> parse_vector_name("residues_layer6"), parse_vector_name("logits")
    (VectorName(pooling='none', layer=6), None)
    """
    match = re.fullmatch(r"([a-z]+)_layer([0-9]+)", name)
    if match is None:
        return None
    word, number = match.groups()
    pooling = "none" if word == _RESIDUES else word
    assert pooling in get_args(Pooling), "a name from ``vector_name``"
    return VectorName(cast(Pooling, pooling), int(number))


def vector_output(pooling: Pooling, layer: int, dim: int, dtype: Store) -> OutputSpec:
    """Describe the vectors after a layer."""
    return OutputSpec(
        name=vector_name(pooling, layer),
        kind="per_residue" if pooling == "none" else "per_sequence",
        width=dim,
        dtype=dtype,
    )


def included_output(include: Include, n_tokens: int, dtype: Store) -> OutputSpec:
    """Describe the result of a head. ``n_tokens``: size of the model's alphabet.

    A perplexity is always float32, because 8 significant bits would not be enough.
    """
    name = HeadOutput.from_option(include)
    match name:
        case HeadOutput.CONTACTS:
            return OutputSpec(name=name.value, kind="pairwise", width=1, dtype=dtype)
        case HeadOutput.LOGITS:
            return OutputSpec(name=name.value, kind="per_residue", width=n_tokens, dtype=dtype)
        case HeadOutput.PERPLEXITY | HeadOutput.SINGLE_PASS_PERPLEXITY:
            return OutputSpec(name=name.value, kind="scalar", width=1)
