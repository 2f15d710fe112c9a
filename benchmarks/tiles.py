"""Count how far attention in a run on real input fills the tiles of a kernel. No GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from front_end import run_ours

from virnucpro.models.attention_tiles import shared_tile_fill, tile_fill
from virnucpro.models.protein_tokens import EXTRA_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRow:
    """The share of the query-key pairs in tiles that attention needs, by kernel."""

    input: str
    n_proteins: int
    median_tokens: float
    flash_attention: float  # tiles of 128 queries and 128 keys
    tiles_of_64: float  # each protein has its own
    shared_tiles_of_64: float
    shared_tiles_of_32: float


def count_tiles(fastas: Sequence[Path]) -> Iterator[TileRow]:
    """Yield a row for the proteins that a run makes from each file, sorted by length."""
    for fasta in fastas:
        with TemporaryDirectory(prefix="virnucpro-measure-") as folder:
            frames = run_ours(fasta, Path(folder))()
        lengths = sorted((len(protein) for _, protein in frames), reverse=True)
        seqlens = np.array(lengths) + EXTRA_TOKENS
        yield TileRow(
            input=fasta.name,
            n_proteins=len(seqlens),
            median_tokens=median(seqlens.tolist()),
            flash_attention=tile_fill(seqlens, 128, 128),
            tiles_of_64=tile_fill(seqlens, 64, 64),
            shared_tiles_of_64=shared_tile_fill(seqlens, 64),
            shared_tiles_of_32=shared_tile_fill(seqlens, 32),
        )
