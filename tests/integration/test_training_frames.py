"""Frame weights, and what is learned from frames."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from training_helpers import Training, frames, settings

from virnucpro.sequences.kmers import N_FEATURES
from virnucpro.training.distributed import Ranks
from virnucpro.training.frame_dataset import balanced_weights, recipe_weights

CPU = Ranks(0, 1, torch.device("cpu"))


def grouped(groups: str, viral: str):
    """Make a frame per letter, which is its group. The groups in ``viral`` are viral."""
    n = len(groups)
    return replace(
        frames(n),
        group=np.array([ord(letter) for letter in groups]),
        is_virus=np.array([letter in viral for letter in groups]),
        weight=np.ones(n, dtype=np.float32),
    )


def test_both_classes_weigh_the_same():
    weighed = grouped("aaaaaaaaabbccccdddddddddddde", viral="ab")
    weight = balanced_weights(weighed)
    # sums of some dozen float32 numbers
    assert weight.sum() == pytest.approx(len(weighed), rel=1e-5)
    assert weight[weighed.is_virus].sum() == pytest.approx(len(weighed) / 2, rel=1e-5)


def test_group_weighs_as_the_root_of_its_frames():
    weighed = grouped("a" * 16 + "b" * 4 + "c" * 100 + "d", viral="ab")
    weight = balanced_weights(weighed)
    of = {name: weight[weighed.group == ord(name)].sum() for name in "abcd"}
    assert of["a"] / of["b"] == pytest.approx(4 / 2, rel=1e-5)
    assert of["c"] / of["d"] == pytest.approx(10 / 1, rel=1e-5)


def test_frame_weight_follows_the_manifest():
    weighed = grouped("aaab", viral="a")
    weighed.weight[0] = 3
    weight = balanced_weights(weighed)
    assert weight[0] / weight[1] == pytest.approx(3, rel=1e-5)


def test_frames_of_a_single_class_have_a_weight():
    assert balanced_weights(grouped("aab", viral="ab")).sum() == pytest.approx(1.5, rel=1e-5)


def with_gc(weighed, gc: list[float]):
    """Build the same frames from the codons AAA and GCG, with these GC contents."""
    composition = np.zeros((len(weighed), N_FEATURES), dtype=np.float32)
    composition[:, 0] = 1 - np.array(gc)
    composition[:, 38] = gc  # GCG: 16 * 2 + 4 * 1 + 2
    return replace(weighed, all_compositions=composition)


def test_recipe_weighs_groups_nearly_evenly():
    weighed = with_gc(grouped("a" * 16 + "b" + "c" * 16 + "d", viral="ab"), [0.5] * 34)
    weight = recipe_weights(weighed)
    of = {name: weight[weighed.group == ord(name)].sum() for name in "abcd"}
    assert of["a"] / of["b"] == pytest.approx(16**0.25, rel=1e-5)
    assert of["c"] / of["d"] == pytest.approx(16**0.25, rel=1e-5)
    assert weight.mean() == pytest.approx(1, rel=1e-5)


def test_labels_weigh_the_same_at_each_gc():
    weighed = grouped("aabbbbbbccdd", viral="ab")
    gc = [0.3, 0.3] + [0.6] * 6 + [0.3, 0.3, 0.6, 0.6]
    weighed = with_gc(weighed, gc)
    weight = recipe_weights(weighed)
    for value in set(gc):
        inside = np.array(gc) == value
        viral = weight[inside & weighed.is_virus].sum()
        assert viral == pytest.approx(weight[inside & ~weighed.is_virus].sum(), rel=1e-5)


def test_few_frames_at_a_gc_have_limited_weight():
    weighed = grouped("a" + "b" * 99 + "c" * 100, viral="ab")
    gc = [0.3] + [0.6] * 99 + [0.3] * 100
    apart, even = (recipe_weights(with_gc(weighed, values)) for values in (gc, [0.5] * 200))
    # four times the weight where others are many, half of it where there are viruses alone
    assert apart[0] / apart[1] == pytest.approx(4 / 0.5 * even[0] / even[1], rel=1e-5)


@pytest.mark.parametrize("task", ["labels", "residues"])
def test_every_parameter_gets_a_gradient(tmp_path, task):
    trainer = Training(tmp_path, settings(), task, dropout=0.3).trainer(CPU)
    trainer.module(trainer.objective.batch(np.arange(20), 0)).backward()
    for name, parameter in trainer.module.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
