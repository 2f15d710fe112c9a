"""Which encoder weights a training changes, and at what rate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, Tiny
from fair_esm_reference import tolerance
from labelled_data_helpers import options, train_here, write_labelled
from safetensors.torch import load_file
from torch import Tensor
from training_helpers import SHAPE, frames

from virnucpro.models.esm2.model import ESM2
from virnucpro.models.packing import PackedBatch
from virnucpro.training.networks import _LowRank, add_adapters, merge_adapters

RANK = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("data"))


def tuned(data: Path, out: Path, tiny: Tiny, **changes: object) -> dict[str, Tensor]:
    """Return the encoder weights after an epoch."""
    asked = {"finetune": True, "model": str(tiny.model), "epochs": 1, "lr": 0.01, **changes}
    train_here(options(data, out, **asked))
    return load_file(out / "model" / "model.safetensors")


def changed(found: dict[str, Tensor], tiny: Tiny) -> set[str]:
    """Return the names of the weights that differ from the starting model."""
    start = load_file(tiny.model / "model.safetensors")
    return {name for name, weight in found.items() if not torch.equal(weight, start[name])}


def test_lora_encoder_is_taken_by_predict(data, tiny, tmp_path):
    found = tuned(data, tmp_path / "out", tiny, lora=RANK)
    start = load_file(tiny.model / "model.safetensors")
    names = changed(found, tiny)
    assert names and all(start[name].ndim == 2 and ".layer." in name for name in names)
    for name in names:
        rank = torch.linalg.matrix_rank((found[name] - start[name]).double(), rtol=1e-4)
        assert 1 <= rank <= RANK, name  # roundings of a sum of float32 are 1e-7 of the weight
    stored = torch.load(tmp_path / "out" / "checkpoints" / "best.pt", weights_only=True)
    learned = {name for name in stored["module"] if name.startswith("reader.")}
    assert learned and all(name.endswith(("lora_a", "lora_b", "inv_freq")) for name in learned), (
        "the encoder that stays as it is takes no room in a checkpoint"
    )


@torch.no_grad()
def test_merged_encoder_equals_the_trained_one() -> None:
    torch.manual_seed(1)
    encoder = ESM2.create(SHAPE)
    add_adapters(encoder, RANK, None, None)
    low = [module for module in encoder.modules() if isinstance(module, _LowRank)]
    batch = PackedBatch.from_sequences(frames(5).proteins(np.arange(5)))
    assert len(low) == 4 * SHAPE.n_layers
    before = encoder(batch)
    for module in low:
        torch.nn.init.normal_(module.lora_b, std=0.05)
    trained = encoder(batch)
    merge_adapters(encoder)
    assert not any(isinstance(module, _LowRank) for module in encoder.modules())
    off = float((encoder(batch) - trained).norm() / trained.norm())
    assert off < 2 * tolerance(SHAPE.n_layers, torch.float32)  # both are rounded
    assert float((trained - before).norm() / before.norm()) > 100 * off


def test_only_the_last_layers_are_trained(data, tiny, tmp_path):
    names = changed(tuned(data, tmp_path / "out", tiny, train_layers=1), tiny)
    last = f".layer.{TINY.n_layers - 1}."
    assert any(last in name for name in names)
    assert all(last in name or "emb_layer_norm_after" in name for name in names)


def test_encoder_has_its_own_rate(data, tiny, tmp_path):
    """At a rate close to 0 it hardly moves, and the head does."""
    start = load_file(tiny.model / "model.safetensors")
    moved = {}
    for rate in (None, 1e-7):
        out = tmp_path / str(rate)
        found = tuned(data, out, tiny, encoder_lr=rate)
        moved[rate] = max(float((found[name] - start[name]).abs().max()) for name in found)
    assert moved[1e-7] < 1e-4 * moved[None]
    heads = [load_file(tmp_path / str(rate) / "model" / "head.safetensors") for rate in moved]
    weights = [head["nucleotide.layers.1.weight"] for head in heads]
    assert float(weights[1].abs().max()) > 1e-2


def test_checkpointing_changes_no_weight(data, tiny, tmp_path):
    plain = tuned(data, tmp_path / "plain", tiny)
    again = tuned(data, tmp_path / "again", tiny, gradient_checkpointing=True)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
