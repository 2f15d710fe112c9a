"""The table at the end says how fast the training was, and where the time went."""

from __future__ import annotations

import time

import pytest
import torch
from trainings import Training, settings

from virnucpro.learning.training.clock import Clock, Speed, profile_lines, speed_lines
from virnucpro.learning.training.ranks import Ranks

SPEEDS = [
    Speed("cuda:0", 6000, {"waiting for data": 1.0, "forward and backward": 2.0, "validation": 9}),
    Speed("cuda:1", 6000, {"waiting for data": 3.0, "forward and backward": 1.0, "optimizer": 2}),
]


def test_time_goes_to_what_it_was_spent_on():
    clock = Clock()
    time.sleep(0.02)
    clock.restart()
    clock.lap("nothing")
    time.sleep(0.05)
    clock.lap("sleep")
    time.sleep(0.05)
    clock.lap("sleep")
    assert clock.seconds["sleep"] >= 0.1 > 0.02 > clock.seconds["nothing"]


def test_the_speed_is_that_of_training_alone_per_device_and_in_all():
    lines = [line.split() for line in speed_lines(SPEEDS, "frames")]
    assert lines == [
        ["rank", "frames", "seconds", "frames/s"],
        ["0", "cuda:0", "6,000", "3.0", "2,000.0"],
        ["1", "cuda:1", "6,000", "6.0", "1,000.0"],
        ["all", "12,000", "6.0", "3,000.0"],
    ]


def test_the_profile_has_a_share_for_each_part_of_each_device():
    lines = profile_lines(SPEEDS)
    assert lines[0].split() == ["seconds", "0", "cuda:0", "1", "cuda:1"]
    assert [line.split() for line in lines[1:]] == [
        ["waiting", "for", "data", "1.0", "8.3%", "3.0", "50.0%"],
        ["forward", "and", "backward", "2.0", "16.7%", "1.0", "16.7%"],
        ["validation", "9.0", "75.0%", "0.0", "0.0%"],
        ["optimizer", "0.0", "0.0%", "2.0", "33.3%"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_a_training_knows_its_speed(tmp_path):
    trainer = Training(tmp_path, settings(epochs=2)).trainer(Ranks(0, 1, torch.device("cpu")))
    begun = time.perf_counter()
    trainer.run()
    spent = time.perf_counter() - begun
    (speed,) = trainer.speeds()
    assert (speed.device, speed.n_rows) == ("cpu", 2 * 48)
    assert 0 < speed.training_seconds < sum(speed.seconds.values()) <= spent
    again = Training(tmp_path, settings(epochs=2)).trainer(Ranks(0, 1, torch.device("cpu")))
    again.run()
    assert again.speeds()[0].n_rows == 0, "all was done by the first start"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_profile_waits_for_the_device():
    device = torch.device("cuda")
    big = torch.randn(8192, 8192, device=device)
    for _ in range(2):  # the first product loads what it needs
        clock = Clock(wait_for=device)
        begun = time.perf_counter()
        for _ in range(20):
            big @ big
        queued = time.perf_counter() - begun
        clock.lap("products")
    assert clock.seconds["products"] > 5 * queued
