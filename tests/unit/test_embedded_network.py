"""The network on codons, trained and converted by ``train_embedded_network.py``."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sampling import Collection, collect
from scorer_folds import group_folds
from torch import nn
from train_embedded_network import (
    HELD_OUT,
    SEED,
    Sampler,
    Settings,
    TrainingNetwork,
    codons_of,
    converted,
    fit,
    log_odds_of,
    without_held_out,
)
from train_embedded_scorer import N_VIRAL

from virnucpro.core.types import FastaRecord
from virnucpro.models.codon_cnn import N_CODONS
from virnucpro.training.labelled_data import Labelled, LabelledRecord

SETTINGS = Settings(
    of_codon=4,
    channels=8,
    dilations=(1, 3),
    hidden=6,
    seconds=2,
    n_bases=1500,
    sizes=(60, 90),
)
KINGDOMS = {"phages": True, "RNA+ viruses": True, "bacteria": False, "archaea": False}
IN_TRAINING, HELD = "CG", "AT"  # no codon of the one kind of groups is in the other, on any strand


def labelled_records() -> list[LabelledRecord]:
    return [
        LabelledRecord(f"{kingdom} {i}", is_virus, f"{kingdom} group {i // 2}", kingdom=kingdom)
        for kingdom, is_virus in KINGDOMS.items()
        for i in range(40)
    ]


def pairs() -> Iterator[Labelled]:
    """Records with bases by which a fragment shows whether its group is held out."""
    records, rng = labelled_records(), np.random.default_rng(1)
    folds = group_folds(records)
    for record in records:
        letters = list(HELD if folds[record.group] in HELD_OUT else IN_TRAINING)
        bases = "".join(rng.choice(letters, int(rng.integers(90, 300))))
        yield record, FastaRecord(record.id, record.id, bases)


@pytest.fixture(scope="module")
def collection() -> Collection:
    return collect(pairs())


@pytest.fixture(scope="module")
def network(collection: Collection) -> TrainingNetwork:
    before, n_threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    trained = fit(collection, SETTINGS)
    torch.set_num_threads(n_threads)
    torch.set_rng_state(before)
    return trained


def scrambled(network: TrainingNetwork) -> TrainingNetwork:
    """The network with normalisations that matter more than those of a short training."""
    torch.manual_seed(1)
    network = copy.deepcopy(network).requires_grad_(False)
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None and norm.running_var is not None
            norm.running_var.uniform_(0.002, 0.2)
            for tensor in (norm.running_mean, norm.weight, norm.bias):
                tensor.normal_()
    return network


@pytest.mark.parametrize("n_bases", [60, 91, 302])
def test_converted_network_gives_the_log_odds(network: TrainingNetwork, n_bases: int) -> None:
    bases = torch.from_numpy(np.random.default_rng(n_bases).integers(0, 4, (30, n_bases)))
    chunks = ["".join("ACGT"[base] for base in row) for row in bases.tolist()]
    for trained in (network, scrambled(network)):
        with torch.inference_mode():
            expected = log_odds_of(trained(codons_of(bases))[0])
            log_odds = converted(trained)(chunks)[:, -1]
        # each sum rounds by some 2^-24 of its largest term; ten layers, more or less, add up
        tolerance = 2e-6 * (1 + expected.abs().max().item())
        assert expected.std() > 100 * tolerance
        torch.testing.assert_close(log_odds, expected, rtol=0, atol=tolerance)


def test_held_out_groups_leave_no_trace(
    network: TrainingNetwork,
) -> None:
    torch.manual_seed(SEED)
    untrained = TrainingNetwork(SETTINGS)  # as training starts
    digits = ["ACGT".index(base) for base in IN_TRAINING]
    is_seen = torch.zeros(N_CODONS, dtype=torch.bool)
    is_seen[[16 * a + 4 * b + c for a in digits for b in digits for c in digits]] = True
    with torch.inference_mode():
        cosines = F.cosine_similarity(untrained.codons.weight, network.codons.weight)[:N_CODONS]
    # without a gradient, a row only decays; the tolerance is that of a cosine in float32
    assert (cosines[~is_seen] > 1 - 1e-6).all()
    assert cosines[is_seen].mean() < 1 - 2e-5


def test_held_out_groups_are_never_drawn(collection: Collection) -> None:
    torch.manual_seed(1)
    trained_on = without_held_out(collection)
    groups = {record.group for record in collection.records}
    held_out = groups - {record.group for record in trained_on.records}
    folds = group_folds(collection.records)
    assert held_out == {group for group in groups if folds[group] in HELD_OUT} and held_out
    bases = torch.from_numpy(collection.digits)
    for records, letters in ((trained_on, IN_TRAINING), (collection, IN_TRAINING + HELD)):
        drawn, kinds = Sampler(records, bases, 60).draw(4000)
        assert {"ACGT"[base] for base in drawn.flatten().tolist()} == set(letters)
        # a share of 4,000 fragments deviates by less than 0.008 in two of three draws
        assert (kinds < N_VIRAL).float().mean().item() == pytest.approx(0.5, abs=0.04)
