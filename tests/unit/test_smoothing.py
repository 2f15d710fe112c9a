"""Smoothing keeps the function of a model, and int8 vectors exact if channels differ in size."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from fair_esm_reference import make_fair_esm, random_protein, save_fair_esm, worst_row
from torch import Tensor, nn

from virnucpro.models.attention import attend_runs
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.loading import load_esm2
from virnucpro.models.esmc.config import ESMCShape, inner_of
from virnucpro.models.esmc.loading import load_esmc, random_esmc, save_esmc
from virnucpro.models.packing import PackedBatch
from virnucpro.models.smoothing import NormedProducts, measure_channels, smooth
from virnucpro.models.transformer import PackedTransformer

CPU = torch.device("cpu")
PROTEINS = [random_protein(length, seed=1) for length in (90, 40, 40, 7)]


@pytest.fixture(scope="module", params=["esm2", "esmc"])
def path(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "esm2":
        model = make_fair_esm(ESM2Shape(n_layers=3, dim=64, n_heads=4))
        return save_fair_esm(model, folder / "esm2.pt")
    shape = ESMCShape(n_layers=3, dim=128, n_heads=2, inner=inner_of(128))
    save_esmc(folder / "esmc", random_esmc(shape, seed=1))
    return folder / "esmc"


def load(path: Path, dtype: torch.dtype = torch.bfloat16) -> PackedTransformer:
    load = load_esm2 if path.suffix else load_esmc
    return load(path, None, dtype, CPU)


def embed(model: PackedTransformer) -> Tensor:
    with torch.inference_mode():
        return model(PackedBatch.from_sequences(PROTEINS))


def products_of(model: PackedTransformer) -> list[NormedProducts]:
    return [products for layer in model.each_layer() for products in layer.normed_products]


def enlarge_channels(model: PackedTransformer, factor: float) -> None:
    """Enlarge two channels behind each norm, and divide their weights by the same factor."""
    for norm, linears in products_of(model):
        norm.weight[3:5] *= factor
        norm.bias[3:5] *= factor
        for linear in linears:
            linear.weight[:, 3:5] /= factor


def test_smoothed_model_has_the_same_bits(path):
    """Multiplication by a power of two is exact."""
    model = load(path)
    model.attend = attend_runs  # other kernels do not call the norms as modules
    enlarge_channels(model, 8.0)
    expected = embed(model)
    before = [products.norm.weight.clone() for products in products_of(model)]
    maxima = measure_channels(products_of(model), lambda _: embed(model))
    for products, weight in zip(products_of(model), before, strict=True):
        smooth(products, maxima[products.norm])
        assert not torch.equal(products.norm.weight, weight)
    assert torch.equal(embed(model), expected)


def test_large_channels_cost_no_exactness(path):
    """Channels enlarged by a power of two are reduced by it. So the same numbers are rounded."""
    exact = embed(load(path, torch.float32))
    plain, enlarged = load(path), load(path)
    enlarge_channels(enlarged, 64.0)
    unsmoothed = copy.deepcopy(enlarged)
    for layer in unsmoothed.each_layer():
        layer.quantise(torch.int8)
    vectors = embed(enlarged.quantise(CPU, torch.int8))
    assert torch.equal(vectors, embed(plain.quantise(CPU, torch.int8)))
    assert worst_row(vectors, exact) < worst_row(embed(unsmoothed), exact) / 2


def test_model_without_large_channels_is_not_changed(path):
    model = load(path)
    unsmoothed = copy.deepcopy(model)
    for layer in unsmoothed.each_layer():
        layer.quantise(torch.int8)
    assert torch.equal(embed(model.quantise(CPU, torch.int8)), embed(unsmoothed))


def test_loaded_weights_are_not_changed(path):
    """Workers share them."""
    model = load(path)
    enlarge_channels(model, 64.0)
    loaded = {name: tensor.data for name, tensor in model.named_parameters()}
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    model.quantise(CPU, torch.int8)
    assert all(torch.equal(loaded[name], before[name]) for name in loaded)


def test_unused_channels_stay_unused():
    norm = nn.LayerNorm(8)
    linear = nn.Linear(8, 2).requires_grad_(False)
    norm.weight.data[:3] = torch.tensor([0.0, 100.0, 100.0])
    linear.weight[:, 1] = 0.0
    x = torch.randn(5, 8)
    expected = linear(norm(x))
    products = NormedProducts(norm, (linear,))
    smooth(products, measure_channels([products], lambda _: norm(x))[norm])
    assert norm.weight[0] == 0 and norm.weight[2] < 100
    assert not linear.weight[:, 1].any()
    assert torch.equal(linear(norm(x)), expected)
