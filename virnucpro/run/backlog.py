"""The shards that are still to be embedded, for whoever reads their vectors at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Condition

from virnucpro.ground.records import Shard
from virnucpro.ground.tasks import AbandonedError


class Backlog:
    """The shards that are owed: one thread settles them, another waits for each in its order.

    ``reasons`` has those of the settled shards that got no feature file, by their index.
    """

    def __init__(self, pending: Iterable[Shard] = ()) -> None:
        self.reasons: dict[int, str] = {}
        self._owed = {shard.index for shard in pending}
        self._is_abandoned = False
        self._changed = Condition()

    @property
    def is_empty(self) -> bool:
        return not self._owed

    def owes(self, shard: Shard) -> bool:
        """Whether a shard is still to come; false, too, when nobody goes on."""
        return shard.index in self._owed and not self._is_abandoned

    def settle(self, shard: Shard, reason: str = "") -> None:
        """Take a shard off: its feature file is there, or the reason why it never will be."""
        with self._changed:
            if reason:
                self.reasons[shard.index] = reason
            self._owed.discard(shard.index)
            self._changed.notify_all()

    def abandon(self) -> None:
        """Have all that wait, or will, go on with an error."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    def wait_for(self, shard: Shard) -> None:
        """Wait until a shard is settled.

        Raises:
            AbandonedError: whatever has become of it, nobody goes on.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_abandoned or shard.index not in self._owed)
            self.check()

    def check(self) -> None:
        """
        Raises:
            AbandonedError: nobody goes on.
        """
        if self._is_abandoned:
            raise AbandonedError
