"""Pass shards from the thread that plans them to the executor that runs them."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from virnucpro.core.types import Shard


class ShardFeed:
    """The shards of a run, in order, some of which may not be planned yet.

    One thread adds shards and closes the feed. Another takes them.
    """

    def __init__(self) -> None:
        self._shards: list[Shard] = []  # not taken yet
        self._is_closed = False
        self._lock = Lock()

    @classmethod
    def from_shards(cls, shards: Iterable[Shard]) -> ShardFeed:
        """Return a closed feed with all shards of a run."""
        feed = cls()
        feed.add(shards)
        feed.close()
        return feed

    def add(self, shards: Iterable[Shard]) -> None:
        """Add the next shards."""
        with self._lock:
            assert not self._is_closed, "a closed feed has all shards"
            self._shards += shards

    def close(self) -> None:
        """End the feed: no shard follows, because all were added or planning has failed."""
        with self._lock:
            self._is_closed = True

    def take(self) -> list[Shard]:
        """Take the shards that were added since the last call, without waiting."""
        with self._lock:
            shards = self._shards
            self._shards = []
        return shards

    @property
    def is_open(self) -> bool:
        """Return True if shards may follow."""
        return not self._is_closed

    @property
    def is_finished(self) -> bool:
        """Return True if the feed is closed and every shard was taken."""
        with self._lock:
            return self._is_closed and not self._shards
