"""Name the outputs of a model, and describe the array of each.

The array of an output has the rows of one sequence after the other. The number of rows for a
sequence depends on the kind of the output and on the length of the sequence, so an array needs no
index besides the ids and lengths of its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Pooling = Literal["mean", "max", "std", "bos", "none"]
Include = Literal["contacts", "logits", "perplexity", "perplexity-single-pass"]
Store = Literal["float32", "bfloat16"]  # numbers on disk; bfloat16 rounds to nearest even
OutputKind = Literal["per_sequence", "per_residue", "pairwise", "scalar"]

_ROWS_PER_SEQUENCE = {"scalar": 0, "per_sequence": 0, "per_residue": 1, "pairwise": 2}  # exponents


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
        return lengths.astype(np.int64) ** _ROWS_PER_SEQUENCE[self.kind]

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
    return f"{'residues' if pooling == 'none' else pooling}_layer{layer}"


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
    match include:
        case "contacts":
            return OutputSpec(name="contacts", kind="pairwise", width=1, dtype=dtype)
        case "logits":
            return OutputSpec(name="logits", kind="per_residue", width=n_tokens, dtype=dtype)
        case "perplexity" | "perplexity-single-pass":
            return OutputSpec(name=include.replace("-", "_"), kind="scalar", width=1)
