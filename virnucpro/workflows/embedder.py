"""Embed lists of proteins with a model that stays loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import InputError, UsageError
from virnucpro.core.logging import printable
from virnucpro.core.recipe import Recipe
from virnucpro.core.types import PROTEIN, Embeddings, FastaRecord, Orf, Records
from virnucpro.engine.resident import ShardEmbedder, open_resident
from virnucpro.sequences.screen import reject_reasons
from virnucpro.store.shard_files import shard_size
from virnucpro.workflows.extract_config import ExtractConfig

Vector = NDArray[np.float32]


class ResidentEmbedder:
    """A loaded model. ``virnucpro.Embedder`` builds it from options."""

    def __init__(self, config: ExtractConfig, sequence_column: str, vector_column: str) -> None:
        self._recipe = config.recipe_for("protein")
        (self.encoder,) = self._recipe.encoders
        self._columns = (sequence_column, vector_column)
        resources = config.resources
        self.devices = resources.devices
        self._engine: ShardEmbedder | None = open_resident(
            self.encoder, config.weights[0], resources
        )

    @property
    def dim(self) -> int:
        """Return the numbers per vector."""
        return self.encoder.dim

    def embed(self, sequences: Iterable[str]) -> Vector | list[Vector]:
        """Embed proteins, in order. The bytes are those of ``extract`` with the same options.

        Args:
            sequences: letters of residues. Case and a final ``*`` do not matter.

        Returns:
            (n, dim) float32, or with ``pooling="none"`` a list of arrays (residues, dim).

        Raises:
            InputError: a sequence cannot be embedded. The message has its position.
            UsageError: the embedder is closed, or ``sequences`` is a single text.
            UnavailableError: a device failed.
        """
        if self._engine is None:
            raise UsageError("the embedder is closed", hint="make a new one")
        if isinstance(sequences, str):
            raise UsageError("embed takes a list of sequences", hint="write embed([sequence])")
        texts = self._check(list(sequences))
        unique = list(dict.fromkeys(texts))
        position = {text: number for number, text in enumerate(unique)}
        rows = list(self._embed_unique(unique))
        chosen = [rows[position[text]] for text in texts]
        if self.encoder.per_residue:
            return [row.copy() for row in chosen]
        return np.stack(chosen) if chosen else np.empty((0, self.dim), dtype=np.float32)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add vectors to a batch of columns, as Ray Data, datatrove and Daft pass it.

        Args:
            batch: column name -> values. ``sequence_column`` has the proteins.

        Returns:
            The same columns, and ``vector_column``: (n, dim) float32, or an object array with an
            array per protein.

        Raises:
            UsageError: the batch has no such column.
            InputError: as ``embed``.
        """
        source, target = self._columns
        if source not in batch:
            raise UsageError(
                f"the batch has no column {printable(source)}",
                hint=f"it has {', '.join(map(printable, batch))}; name one with sequence_column",
            )
        vectors = self.embed([str(text) for text in batch[source]])
        if isinstance(vectors, list):
            column = np.empty(len(vectors), dtype=object)
            column[:] = vectors
            return {**batch, target: column}
        return {**batch, target: vectors}

    def _check(self, sequences: Sequence[object]) -> list[str]:
        """Return the letters that the model reads.

        Raises:
            InputError: a sequence is not text, or is screened out.
        """
        for number, text in enumerate(sequences):
            if not isinstance(text, str):
                raise InputError(
                    f"sequence {number} is {type(text).__name__}, not text",
                    hint="pass strings of residue letters",
                )
        records = [
            FastaRecord(str(number), str(number), str(text))
            for number, text in enumerate(sequences)
        ]
        rejected = reject_reasons(Records.from_records(records), self._recipe)
        for number, (status, note) in sorted(rejected.items()):
            raise InputError(
                f"sequence {number} is {status} ({printable(note)})", hint="leave it out, or fix it"
            )
        return [record.protein for record in records]

    def _embed_unique(self, texts: Sequence[str]) -> Iterator[Vector]:
        """Yield the rows of each text, in order.

        Raises:
            InputError: the model failed on a text.
        """
        assert self._engine is not None, "checked by embed"
        orfs = [
            Orf(str(number), str(number), str(number), 0, len(text), PROTEIN, text)
            for number, text in enumerate(texts)
        ]
        for result in self._engine.embed(list(cut_shards(orfs, self._recipe))):
            if result.failures:
                failure = result.failures[0]
                text = texts[int(failure.orf_id)]
                raise InputError(
                    f"a protein of {len(text)} residues has no vector: {printable(failure.reason)}",
                    hint="leave it out, or use a device with more memory",
                )
            yield from _rows(result)

    def close(self) -> None:
        """Release the devices. Further calls raise UsageError."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cut_shards(orfs: Sequence[Orf], recipe: Recipe) -> Iterator[list[Orf]]:
    """Cut ORFs into shards as a run does, because batches do not cross shards."""
    position = 0
    shard: list[Orf] = []
    n_residues = 0
    for orf in orfs:
        shard.append(orf)
        n_residues += len(orf.protein)
        if n_residues >= shard_size(position, recipe.largest_shard):
            yield shard
            position += 1
            shard = []
            n_residues = 0
    if shard:
        yield shard


def _rows(embeddings: Embeddings) -> list[Vector]:
    """Split the rows of a shard by ORF: (dim,), or (residues, dim)."""
    if embeddings.per_residue:
        return np.split(embeddings.vectors, np.cumsum(embeddings.lengths))[:-1]
    return list(embeddings.vectors)
