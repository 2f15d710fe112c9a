"""Shards that pass from a planning thread to an executor, and the progress that counts them."""

from __future__ import annotations

from pathlib import Path

from virnucpro.cli.progress import counts_of, line_of
from virnucpro.core.events import (
    BatchDone,
    EmbeddingStarted,
    Memory,
    ShardDone,
    ShardsPlanned,
    WorkerReady,
)
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.types import Shard
from virnucpro.engine.progress import ProgressState
from virnucpro.engine.shard_feed import ShardFeed
from virnucpro.workflows.write_tables import Backlog

SHARDS = tuple(Shard(index, Path(), 10, 10, 1000, "") for index in range(4))
NO_MEMORY = Memory(0, 0)
ESM2 = EncoderSpec(
    family="esm2", model="tiny", sha256="", layer=1, pooling="mean", precision="fp32", dim=1
)


def test_shards_that_are_planned_later_belong_to_this_start():
    backlog = Backlog()
    backlog.add(SHARDS[1:3])
    assert [backlog.is_new(shard) for shard in SHARDS] == [False, True, True, False]
    backlog.on_event(ShardDone("cpu", SHARDS[1], 1.0, 0))
    assert backlog.is_new(SHARDS[1]), "its files need no check although it is done"
    assert [backlog.is_pending(shard) for shard in SHARDS] == [False, False, True, False]


def test_feed_gives_each_shard_once_in_order():
    feed = ShardFeed()
    assert feed.is_open
    assert feed.take() == []
    feed.add(SHARDS[:2])
    feed.add(SHARDS[2:3])
    assert feed.take() == [*SHARDS[:3]]
    assert feed.take() == []
    assert not feed.is_finished
    feed.add(SHARDS[3:])
    feed.close()
    assert not feed.is_open
    assert not feed.is_finished  # a shard is left
    assert feed.take() == [SHARDS[3]]
    assert feed.is_finished


def test_feed_of_a_complete_plan_is_closed():
    feed = ShardFeed.from_shards(SHARDS)
    assert not feed.is_open
    assert feed.take() == [*SHARDS]
    assert feed.is_finished
    assert ShardFeed.from_shards(()).is_finished


def test_progress_of_a_partial_plan_never_shows_the_end():
    seconds = [0.0]
    state = ProgressState(clock=lambda: seconds[0])
    state.update(EmbeddingStarted((), 0, encoders=(ESM2,), planned_share=0.0))
    assert state.fraction == 0.0
    assert state.seconds_left is None
    state.update(WorkerReady("cpu", "cpu", NO_MEMORY))
    state.update(ShardsPlanned(SHARDS[:1], 1, 0.25))
    for _ in range(2):
        seconds[0] += 1
        state.update(BatchDone("cpu", SHARDS[0], (), 510, NO_MEMORY))
    state.update(ShardDone("cpu", SHARDS[0], 1.0, 0))
    assert state.fraction == 0.25  # although all planned shards are done
    assert counts_of(state) == ["2/2 shards", "25% of the input planned"]
    assert state.seconds_left == 6.0  # one quarter took two seconds
    assert "100%" not in line_of(state)
    state.update(ShardsPlanned(SHARDS[1:], 0, 1.0))
    assert counts_of(state) == ["2/5 shards"]
    for shard in SHARDS[1:]:
        state.update(BatchDone("cpu", shard, (), 1020, NO_MEMORY))
        state.update(ShardDone("cpu", shard, 1.0, 0))
    assert state.fraction == 1.0
    files = (((0, 2),), ((2, 4),))
    state.update(ShardsPlanned((), 0, 1.0, files))
    assert counts_of(state) == ["5/5 shards", "2/2 files"]
