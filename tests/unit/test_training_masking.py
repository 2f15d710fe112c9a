"""The masked-language task equals that of ESM-2."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fair_esm_reference import (
    AMINO_ACIDS,
    make_fair_esm,
    random_protein,
    save_fair_esm,
    tolerance,
    worst_row,
)

from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.loading import load_esm2
from virnucpro.models.esm2.model import MaskedBatch
from virnucpro.models.packing import PackedBatch
from virnucpro.models.protein_tokens import AMINO_ACID_TOKENS, SpecialToken
from virnucpro.sequences.kmers import N_FEATURES
from virnucpro.training.frame_dataset import LabelledFrames
from virnucpro.training.networks import MaskedLanguageModel, MaskedResidues

LENGTHS = (1, 2, 3, 7, 10, 20, 50, 166, 333)
PROTEINS = [random_protein(length, seed) for seed, length in enumerate(LENGTHS)]


def frames_of(proteins: list[str]) -> LabelledFrames:
    return LabelledFrames.from_store(
        proteins, np.zeros((len(proteins), N_FEATURES), dtype=np.float32)
    )


def masked(proteins: list[str]) -> MaskedBatch:
    return MaskedBatch.from_batch(proteins, [(3, i) for i in range(len(proteins))])


def test_15_percent_of_residues_are_chosen():
    packed = PackedBatch.from_sequences(PROTEINS)
    batch = masked(PROTEINS)
    tokens = batch.packed.tokens
    places = batch.places
    per_protein = np.histogram(places, packed.cu_seqlens)[0].tolist()
    assert per_protein == [1, 1, 1, 1, 2, 3, 8, 25, 50]
    assert len(set(places.tolist())) == len(places)
    assert not {SpecialToken.CLS, SpecialToken.EOS} & set(packed.tokens[places].tolist())
    others = np.setdiff1d(np.arange(len(tokens)), places)
    assert np.array_equal(tokens[others], packed.tokens[others])


def test_chosen_residues_are_masked_or_drawn():
    proteins = [random_protein(200, seed) for seed in range(400)]
    batch = masked(proteins)
    assert set(PackedBatch.from_sequences([AMINO_ACIDS]).tokens[1:-1].tolist()) == set(
        AMINO_ACID_TOKENS.tolist()
    )
    n = len(batch.places)
    assert n == 400 * 30
    read = batch.packed.tokens[batch.places]
    told = batch.targets
    # a draw is one of 20 amino acids, so it is the same as before once in 20 times
    shares = {
        "masked": (np.sum(read == SpecialToken.MASK), 0.8),
        "swapped": (np.sum((read != SpecialToken.MASK) & (read != told)), 0.1 * 19 / 20),
    }
    for name, (found, share) in shares.items():
        # a binomial count strays by five standard deviations once in a million
        assert abs(found - n * share) < 5 * np.sqrt(n * share * (1 - share)), name
    drawn = read[(read != SpecialToken.MASK) & (read != told)]
    assert set(drawn.tolist()) == set(AMINO_ACID_TOKENS.tolist())


def test_mask_depends_on_epoch_not_batch():
    task = MaskedResidues(frames_of(PROTEINS), frames_of([]), seed=4)
    row = LENGTHS.index(166)

    def masked(rows: list[int], epoch: int) -> list[int]:
        batch = task.batch(np.array(rows), epoch)
        lengths = np.diff(batch.packed.cu_seqlens).tolist()
        begin, end = list(pairwise(batch.packed.cu_seqlens))[lengths.index(168)]
        return batch.packed.tokens[begin:end].tolist()

    alone = masked([row], epoch=1)
    assert masked([0, 3, row, 8], epoch=1) == alone
    assert masked([8, row, 2], epoch=1) == alone
    assert masked([row], epoch=2) != alone


def test_batch_weight_is_chosen_residues():
    task = MaskedResidues(frames_of(PROTEINS), frames_of([]), seed=4)
    rows = np.array([4, 0, 8])
    assert task.weight(rows) == len(task.batch(rows, epoch=0).places) == 2 + 1 + 50


def test_masked_proteins_equal_fair_esm(tmp_path):
    shape = ESM2Shape(n_layers=3, dim=64, n_heads=4)
    fair_esm = make_fair_esm(shape)
    path = save_fair_esm(fair_esm, tmp_path / "model.pt")
    encoder = load_esm2(path, shape.n_layers, torch.float32, torch.device("cpu"))
    model = MaskedLanguageModel(encoder)
    with torch.no_grad():
        for part in ("dense", "layer_norm"):
            getattr(model, part).load_state_dict(getattr(fair_esm.lm_head, part).state_dict())
        model.bias.copy_(fair_esm.lm_head.bias)
    batch = MaskedBatch.from_batch(PROTEINS, [(1, i) for i in range(len(PROTEINS))])
    expected = []
    with torch.no_grad():
        for begin, end in pairwise(batch.packed.cu_seqlens.tolist()):
            tokens = torch.from_numpy(batch.packed.tokens[begin:end])[None]
            inside = batch.places[(batch.places >= begin) & (batch.places < end)] - begin
            expected.append(fair_esm(tokens)["logits"][0, inside])
        logits = torch.cat(expected)
        # behind the encoder comes a product, GELU, norm and product more: less than in a layer
        assert worst_row(model.logits(batch), logits) < tolerance(shape.n_layers + 1, torch.float32)
        loss = F.cross_entropy(logits, torch.from_numpy(batch.targets), reduction="sum")
        # a loss is off by no more than a logit is, and logits are some units large, as losses are
        assert float(model(batch)) == pytest.approx(
            float(loss), rel=tolerance(shape.n_layers + 1, torch.float32)
        )
