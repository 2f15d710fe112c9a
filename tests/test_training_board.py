"""TensorBoard shows every epoch once, however often the training was stopped."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from virnucpro.learning.training.board import Board


def points(folder, name: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return [(point.step, point.value) for point in found.Scalars(name)]


def row(epoch: int, loss: float, **figures: float) -> dict[str, float]:
    return {"epoch": float(epoch), "loss": loss, **figures}


def test_the_figures_of_an_epoch_are_points(tmp_path):
    with Board(tmp_path) as tell:
        tell(row(1, 0.5))
        tell(row(2, 0.25, auroc=0.75))
    assert points(tmp_path, "loss") == [(1, 0.5), (2, 0.25)]
    assert points(tmp_path, "auroc") == [(2, 0.75)]


def test_an_epoch_that_is_done_again_after_a_kill_is_shown_once(tmp_path):
    killed = Board(tmp_path)
    tell = killed.__enter__()
    tell(row(1, 0.5))
    tell(row(2, 0.25))  # it was told, but killed before it was stored
    with Board(tmp_path) as again:
        again(row(2, 0.26))
        again(row(3, 0.125))
    assert points(tmp_path, "loss") == [(1, 0.5), (2, pytest.approx(0.26)), (3, 0.125)]
    killed.__exit__(None, None, None)


def test_a_training_that_tells_nothing_leaves_no_file(tmp_path):
    with Board(tmp_path / "logs"):
        pass
    assert not (tmp_path / "logs").exists()
