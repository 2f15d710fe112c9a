"""What each device did and when, for each start of a run, as ``machine.json`` contains it.

The report and ``status`` read it. No result depends on it, and a run works without it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from virnucpro.core.atomic_io import read_json
from virnucpro.core.errors import VirnucproError
from virnucpro.core.logging import LOGGER
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import check_counts

INITIAL_BIN_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class DeviceSeries:
    """The work of one device in time bins."""

    description: str = ""
    n_shards: int = 0
    tokens: list[int] = field(default_factory=list)  # embedded per bin
    memory: list[int] = field(default_factory=list)  # maximum bytes used per bin

    max_bins: ClassVar = 240  # with more, neighbours are merged, which doubles the bin width

    def __post_init__(self) -> None:
        check_counts(self.n_shards, *self.tokens, *self.memory)
        if len(self.tokens) != len(self.memory) or len(self.tokens) > self.max_bins:
            raise ValueError("a device has tokens in other bins than memory")
        if not isinstance(self.description, str):
            raise TypeError("a device is described in words")

    def add(self, bin_index: int, n_tokens: int, memory: int) -> None:
        missing = bin_index + 1 - len(self.tokens)
        self.tokens += [0] * missing
        self.memory += [0] * missing
        self.tokens[bin_index] += n_tokens
        self.memory[bin_index] = max(self.memory[bin_index], memory)

    def join_bins(self) -> None:
        """Merge each pair of neighbouring bins."""
        self.tokens = [sum(self.tokens[i : i + 2]) for i in range(0, len(self.tokens), 2)]
        self.memory = [max(self.memory[i : i + 2]) for i in range(0, len(self.memory), 2)]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceTimeline:
    """One start of a run, from its first shard on."""

    seconds_per_bin: float = INITIAL_BIN_SECONDS
    seconds: float = 0.0  # until the last event
    devices: dict[str, DeviceSeries] = field(default_factory=dict)
    n_losses: int = 0  # lost workers, replaced or not
    n_reductions: int = 0  # batches that did not fit into device memory
    n_failed_shards: int = 0
    lost_devices: list[str] = field(default_factory=list)  # a line for each

    def __post_init__(self) -> None:
        max_seconds = 10**15  # upper bound for every duration
        check_counts(self.n_losses, self.n_reductions, self.n_failed_shards)
        if not (0 <= self.seconds <= max_seconds and 0 < self.seconds_per_bin <= max_seconds):
            raise ValueError("JSON allows infinities and NaN too")
        if not all(isinstance(line, str) for line in self.lost_devices):
            raise TypeError("a lost device is described in words")

    def append_to(self, path: Path) -> None:
        """Append this start to the earlier ones in a file.

        A failed write is only a warning, because no result depends on it.
        """
        max_starts = 20  # keep the latest
        starts = [*self.read_all(path), self][-max_starts:]
        try:
            content = json.dumps({"starts": [asdict(start) for start in starts]})
            SafeDir(path.parent).write_file(path, content + "\n")
        except VirnucproError as error:
            LOGGER.warning("the work of the devices over time is not recorded: %s", error)

    @staticmethod
    def read_all(path: Path) -> list[DeviceTimeline]:
        """Read the starts in a file. A missing or corrupt file has no starts."""
        try:
            return [_from_json(**start) for start in read_json(path)["starts"]]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return []


def _from_json(devices: dict[str, dict[str, Any]], **stored: Any) -> DeviceTimeline:  # noqa: ANN401 - JSON
    """Convert a stored start.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: it was changed.
    """
    series = {name: DeviceSeries(**device) for name, device in devices.items()}
    return DeviceTimeline(**stored, devices=series)
