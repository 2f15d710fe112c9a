"""The order of a run to its workers, in the form in which it crosses to their processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from virnucpro.ground.config import EncoderSpec
from virnucpro.run.cache import CacheFolder
from virnucpro.run.features import FeatureStore, open_stores


@dataclass(frozen=True, slots=True)
class Job:
    """The facts of a run that a worker needs: plain data, without a device."""

    features: Path  # folder
    encoders: tuple[EncoderSpec, ...]
    weights: tuple[Path, ...]  # of each encoder: a checkpoint, or its converted form
    fingerprint: str  # hash of the recipe
    owner: str  # name of the process that has the job: no two write the same partial file
    cache: CacheFolder | None = field(default=None, kw_only=True)

    @property
    def stores(self) -> tuple[FeatureStore, ...]:
        """The feature stores of the encoders."""
        return open_stores(self.features, self.encoders, self.fingerprint)
