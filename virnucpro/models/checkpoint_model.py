"""A transformer checkpoint on disk: its memory estimate, conversion and weight checks.

Only the methods that load the model import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virnucpro.core.events import EventHandler
from virnucpro.core.recipe import EncoderSpec, Footprint, Precision
from virnucpro.models.base import Model, not_published, progress_of
from virnucpro.models.checkpoint import check_finite, hash_weights

WORTH_CONVERTING = 256 << 20  # bytes; smaller files load within a second


def estimate_footprint(n_parameters: int, dim: int, file_bytes: int = 0) -> Footprint:
    """Estimate the memory and disk space of a transformer. A large file is converted."""
    filling = 32_768 * 1280  # saturating tokens * dim: 32k tokens of 650M, 16k of 3B, 131k of 8M
    bytes_per_token_and_dim = 64  # peak activations in one layer, with a margin
    converted = 2 * n_parameters if file_bytes >= WORTH_CONVERTING else 0
    return Footprint(
        n_parameters=n_parameters,
        file_bytes=file_bytes,
        converted_bytes=converted,
        bytes_per_token=bytes_per_token_and_dim * dim,
        filling_tokens=filling // dim,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointModel(Model, ABC):
    """A transformer on disk. Its id depends on the weights, not on the file format."""

    shape: Any  # a frozen dataclass from the family
    published: str = ""  # name of the published model to match
    accepted: frozenset[str] = frozenset()  # valid SHA-256 values; empty if unknown

    @abstractmethod
    def check_numbers(self, precision: Precision) -> None:
        """Read every weight.

        Raises:
            UnavailableError: a weight is not finite in this precision.
        """

    @abstractmethod
    def load_network(self, precision: Precision) -> Any:  # noqa: ANN401 - a PackedTransformer
        """Load the complete model on the CPU.

        Raises:
            UnavailableError: the model cannot be used.
        """

    @abstractmethod
    def read_heads(self) -> Mapping[str, Any]:
        """Read the tensors of the heads, by the names in ``HeadScheme``.

        Raises:
            UnavailableError: a head is damaged.
        """

    def sha256(self, on_bytes: Callable[[int], None] = lambda _: None) -> str:
        return hash_weights(self.path, on_bytes)

    def prepare(self, precision: Precision, on_event: EventHandler) -> tuple[Path, str]:
        """Convert a large checkpoint once, so that all workers map the same copy.

        Weights that are not finite in this precision are rejected before anything else is done. The
        weights of a published model are known to be finite, so only the hash is compared.
        """
        weights = self.path
        n_bytes = self.footprint.file_bytes
        if n_bytes < WORTH_CONVERTING:
            digest = self.sha256(progress_of("hashing the model", n_bytes, on_event))
            if not self.accepted:
                self.check_numbers(precision)
        else:
            from virnucpro.models.converted import prepare

            weights, digest = prepare(self, precision, on_event)
        self.check(digest)
        return weights, digest

    def prepare_heads(self, spec: EncoderSpec, weights: Path) -> tuple[Path, str]:
        from virnucpro.models.converted import is_converted, keep_heads
        from virnucpro.models.heads import hash_heads, select_heads

        heads = self.read_heads()
        if is_converted(weights):
            weights = keep_heads(weights, self.path, heads)
        return weights, hash_heads(select_heads(heads, spec))

    def check(self, digest: str) -> None:
        """Reject other weights under the name of a published model.

        Raises:
            UnavailableError: the weights differ.
        """
        if self.accepted and digest not in self.accepted:
            raise not_published(self.path, self.published, f"its SHA-256 is {digest}")

    def verify(self) -> str:
        check_finite(self.path, self.load_network("fp32"))
        digest = self.sha256()
        self.check(digest)
        return digest
