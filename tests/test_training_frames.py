"""What a frame weighs, and what is learned from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from trainings import Training, frames, settings

from virnucpro.labelled.frames import balanced_weights
from virnucpro.training.ranks import Ranks

CPU = Ranks(0, 1, torch.device("cpu"))


def grouped(groups: str, viral: str):
    """A frame per letter, which is its group; the groups of ``viral`` are viral."""
    n = len(groups)
    return replace(
        frames(n),
        group=np.array([ord(letter) for letter in groups]),
        is_virus=np.array([letter in viral for letter in groups]),
        weight=np.ones(n, dtype=np.float32),
    )


def test_both_classes_weigh_the_same_and_a_frame_weighs_one_in_the_mean():
    weighed = grouped("aaaaaaaaabbccccdddddddddddde", viral="ab")
    weight = balanced_weights(weighed)
    # sums of some dozen float32 numbers
    assert weight.sum() == pytest.approx(len(weighed), rel=1e-5)
    assert weight[weighed.is_virus].sum() == pytest.approx(len(weighed) / 2, rel=1e-5)


def test_a_group_weighs_as_the_root_of_its_frames():
    weighed = grouped("a" * 16 + "b" * 4 + "c" * 100 + "d", viral="ab")
    weight = balanced_weights(weighed)
    of = {name: weight[weighed.group == ord(name)].sum() for name in "abcd"}
    assert of["a"] / of["b"] == pytest.approx(4 / 2, rel=1e-5)
    assert of["c"] / of["d"] == pytest.approx(10 / 1, rel=1e-5)


def test_a_frame_weighs_more_if_the_manifest_says_so():
    weighed = grouped("aaab", viral="a")
    weighed.weight[0] = 3
    weight = balanced_weights(weighed)
    assert weight[0] / weight[1] == pytest.approx(3, rel=1e-5)


def test_frames_of_one_class_alone_have_a_weight():
    assert balanced_weights(grouped("aab", viral="ab")).sum() == pytest.approx(1.5, rel=1e-5)


@pytest.mark.parametrize("task", ["labels", "residues"])
def test_every_parameter_gets_a_gradient(tmp_path, task):
    trainer = Training(tmp_path, settings(), task, dropout=0.3).trainer(CPU)
    trainer.module(trainer.objective.batch(np.arange(20), 0)).backward()
    for name, parameter in trainer.module.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
