"""The forward pass gives fair-esm's vectors, in every precision and with every kernel."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import esm
import pytest
import torch
import torch.nn.functional as F
from esm.rotary_embedding import RotaryEmbedding
from fair_esm_reference import (
    ATTENTION_SHARE,
    LONGEST,
    MLP_SHARE,
    SCORE_SPREAD,
    fair_esm_hidden,
    fair_esm_tokens,
    make_fair_esm,
    random_protein,
    save_fair_esm,
    stored_state,
    tolerance,
    worst_row,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from virnucpro.core.errors import UnavailableError
from virnucpro.core.native import multiplies_bf16
from virnucpro.models import triton_kernels
from virnucpro.models.attention import (
    E4M3,
    Kernel,
    RunLayout,
    attend_compiled,
    attend_compiled_bf16,
    attend_efficient,
    attend_efficient_triton,
    attend_runs,
    attend_to_train,
    attend_varlen,
    attend_varlen_triton,
    choose_kernel,
    describe,
)
from virnucpro.models.eight_bits import (
    EIGHT_BITS,
    FP8_WIDTH,
    Linear8,
    check_device,
    quantise,
    restore,
)
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.loading import load_esm2
from virnucpro.models.esm2.model import ESM2
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.models.packing import PackedBatch, bag_mean, use_device
from virnucpro.models.pooling import bos_pool, mean_pool, residues_only
from virnucpro.models.transformer import rotary_frequencies

SHAPES = {  # by the dimensions of a head, as of the published 8M, 35M, 150M and 650M
    16: ESM2Shape(n_layers=3, dim=64, n_heads=4),
    24: ESM2Shape(n_layers=3, dim=72, n_heads=3),
    32: ESM2Shape(n_layers=3, dim=96, n_heads=3),
    64: ESM2Shape(n_layers=2, dim=128, n_heads=2),
}
ODD_LETTERS = "MKXBUZO-J*.AXX**W"
LENGTHS = (50, 1, 333, 50, 50, 3, LONGEST, 2, 3, 166)
PROTEINS = [
    *(random_protein(length, seed) for seed, length in enumerate(LENGTHS)),
    ODD_LETTERS,
    ODD_LETTERS.lower(),
]


@dataclass(frozen=True)
class Case:
    """A device, a precision and a kernel.

    The kernel in C has its own weight layout, as in a run.
    """

    device: str
    dtype: torch.dtype
    kernel: Kernel

    def __str__(self) -> str:
        return f"{self.device}-{str(self.dtype).removeprefix('torch.')}-{self.kernel.__name__}"

    def load(self, path: Path, layer: int) -> ESM2:
        device = torch.device(self.device)
        if self.dtype in EIGHT_BITS.values():
            if self.device == "cuda" and inspect_esm2(path).shape.dim % FP8_WIDTH:
                pytest.skip("too narrow for the products of a GPU")
            model = load_esm2(path, layer, torch.bfloat16, torch.device("cpu"))
            model.quantise(device, self.dtype)
        else:
            model = load_esm2(path, layer, self.dtype, device)
            if self.kernel in (attend_compiled, attend_compiled_bf16):
                model.reorder_weights()
        model.attend = self.kernel
        return model


HERE = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
on_cuda, on_turing, on_ampere, on_ada = (
    pytest.mark.skipif(
        needed > HERE, reason=f"needs a CUDA device of compute capability {needed} or newer"
    )
    for needed in ((0, 1), (7, 5), (8, 0), (8, 9))
)
on_bf16_cpu = pytest.mark.skipif(not multiplies_bf16(), reason="needs AVX512_BF16")
CASES = [
    pytest.param(case, id=str(case), marks=marks)
    for case, marks in (
        (Case("cpu", torch.float32, attend_runs), ()),
        (Case("cpu", torch.float32, attend_compiled), ()),
        (Case("cpu", torch.float32, attend_to_train), ()),
        (Case("cpu", torch.bfloat16, attend_runs), ()),
        (Case("cpu", torch.bfloat16, attend_compiled), ()),
        (Case("cpu", torch.bfloat16, attend_compiled_bf16), on_bf16_cpu),
        (Case("cpu", torch.float16, attend_runs), ()),
        (Case("cpu", E4M3, attend_compiled), ()),
        (Case("cpu", torch.int8, attend_runs), ()),
        (Case("cpu", torch.int8, attend_compiled), ()),
        (Case("cpu", torch.int8, attend_compiled_bf16), on_bf16_cpu),
        (Case("cuda", E4M3, attend_varlen), on_ada),
        (Case("cuda", E4M3, attend_varlen_triton), on_ada),
        (Case("cuda", torch.int8, attend_varlen), on_ampere),
        (Case("cuda", torch.int8, attend_varlen_triton), on_ampere),
        (Case("cuda", torch.float32, attend_runs), on_cuda),
        (Case("cuda", torch.float16, attend_runs), on_cuda),
        (Case("cuda", torch.float32, attend_efficient), on_cuda),
        (Case("cuda", torch.float16, attend_efficient), on_cuda),
        (Case("cuda", torch.float16, attend_efficient_triton), on_turing),
        (Case("cuda", torch.bfloat16, attend_runs), on_ampere),
        (Case("cuda", torch.float16, attend_varlen), on_ampere),
        (Case("cuda", torch.bfloat16, attend_varlen), on_ampere),
        (Case("cuda", torch.float16, attend_varlen_triton), on_ampere),
        (Case("cuda", torch.bfloat16, attend_varlen_triton), on_ampere),
    )
]


@dataclass(frozen=True)
class Oracle:
    """A checkpoint, and fair-esm's vectors of all proteins after its last layer."""

    shape: ESM2Shape
    model: esm.ESM2
    path: Path
    hidden: list[Tensor]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda head_dim: f"heads_of_{head_dim}")
def oracle(request, tmp_path_factory) -> Oracle:
    shape = SHAPES[request.param]
    model = make_fair_esm(shape)
    path = save_fair_esm(model, tmp_path_factory.mktemp("oracle") / "model.pt")
    return Oracle(shape, model, path, fair_esm_hidden(model, PROTEINS, shape.n_layers))


def our_gradients(fair_esm: esm.ESM2) -> dict[str, Tensor]:
    """Return the gradients of fair-esm's weights, under our names."""
    found = {
        "embedding.weight": fair_esm.embed_tokens.weight.grad,
        "final_norm.weight": fair_esm.emb_layer_norm_after.weight.grad,
        "final_norm.bias": fair_esm.emb_layer_norm_after.bias.grad,
    }
    for i, layer in enumerate(fair_esm.layers):
        attention = layer.self_attn
        modules = {
            "attention_norm": layer.self_attn_layer_norm,
            "attention_out": attention.out_proj,
            "mlp_norm": layer.final_layer_norm,
            "up": layer.fc1,
            "down": layer.fc2,
        }
        for kind in ("weight", "bias"):
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            found[f"layers.{i}.qkv.{kind}"] = torch.cat([getattr(p, kind).grad for p in parts])
            for name, module in modules.items():
                found[f"layers.{i}.{name}.{kind}"] = getattr(module, kind).grad
    return found


def embed(model: ESM2, proteins: list[str]) -> list[Tensor]:
    """Embed all proteins in one batch. -> one (n_residues + 2, dim) array per protein"""
    batch = PackedBatch.from_sequences(proteins)
    return list(model(batch).split([len(protein) + 2 for protein in proteins]))


@pytest.mark.parametrize("case", CASES)
def test_mixed_batch_equals_fair_esm(oracle, case):
    batch = PackedBatch.from_sequences(PROTEINS)
    hidden = case.load(oracle.path, oracle.shape.n_layers)(batch)
    limit = tolerance(oracle.shape.n_layers, case.dtype)
    assert hidden.dtype == torch.float32
    assert worst_row(hidden, torch.cat(oracle.hidden)) < limit
    residues = torch.cat([reference[1:-1] for reference in oracle.hidden])
    assert worst_row(residues_only(hidden, batch), residues) < limit
    means = torch.stack([reference[1:-1].double().mean(dim=0) for reference in oracle.hidden])
    assert worst_row(mean_pool(hidden, batch), means) < limit
    firsts = torch.stack([reference[0] for reference in oracle.hidden])
    assert worst_row(bos_pool(hidden, batch), firsts) < limit


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_ada)])
@pytest.mark.parametrize("n_tokens", [1, 33])
def test_fp8_product_equals_its_rounded_rows(device, n_tokens):
    linear = nn.Linear(64, 48, dtype=torch.bfloat16, device=device).requires_grad_(False)
    linear.weight *= 10 ** torch.arange(-6.0, 6.0, 0.25, device=device)[:, None]  # of every row
    x = 10 ** torch.linspace(-8, 8, n_tokens)[:, None] * torch.randn(n_tokens, 64)
    # a row of zeros, but for one
    x[0] = 0
    x[0, 5] = 3e-20
    rows = quantise(x.to(device), E4M3)
    product = Linear8(linear, E4M3)
    weight = restore(quantise(linear.weight, E4M3)).double()
    exact = restore(rows).double() @ weight.T + linear.bias.double()
    size = restore(rows).double().abs() @ weight.T.abs() + linear.bias.double().abs()
    # sums of 64 products in float32, four more operations, and one rounding to bf16
    limit = size * 70 * torch.finfo(torch.float32).eps / 2 + exact.abs() * 2**-8
    if device == "cuda":  # tensor cores keep some 14 bits within an instruction (arXiv:2412.19437)
        limit += size * 2**-12
    assert ((product(rows).double() - exact).abs() <= limit).all()
    # to the nearest of numbers with three bits behind the first, but for the least of a row
    kept = restore(rows).cpu().double()
    largest = x.double().abs().amax(dim=1, keepdim=True)
    assert ((kept - x).abs() <= x.abs() * (2**-4 + 1e-6) + largest.clamp(min=1e-12) * 2**-18).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_gelu", [False, True])
@pytest.mark.parametrize("dim", [1, 16, 72, 333])
def test_rows_are_rounded_to_int8(dtype, has_gelu, dim):
    """To the nearest 1/127 of the largest number. Ties and the last bits of GELU may differ."""
    x = 10 ** torch.linspace(-8, 8, 7)[:, None] * torch.randn(7, dim)
    x[0] = 0
    x = x.to(dtype)
    rows = quantise(x, torch.int8, has_gelu=has_gelu)
    exact = F.gelu(x.double()) if has_gelu else x.double()
    largest = exact.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
    assert rows.values.dtype == torch.int8 and rows.values.abs().amax() == 127
    torch.testing.assert_close(rows.scales.double(), largest / 127, rtol=1e-5, atol=0)
    # erf has an absolute error of 1.5e-7, which is multiplied by x
    error_of_gelu = x.double().abs() * 3e-7 if has_gelu else 0.0
    distance = (restore(rows).double() - exact).abs()
    assert (distance <= (0.5 + 1e-4) * largest / 127 + error_of_gelu).all()
    assert not rows.values[0].any()


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("has_gelu", [False, True])
def test_fault_in_a_row_is_in_its_whole_int8_product(fault, has_gelu):
    x = torch.randn(3, 40)
    x[1, 17] = fault
    rows = quantise(x, torch.int8, has_gelu=has_gelu)
    assert rows.scales.isnan().flatten().tolist() == [False, True, False]
    linear = nn.Linear(40, 24, dtype=torch.bfloat16).requires_grad_(False)
    product = Linear8(linear, torch.int8)(rows)
    assert product[1].isnan().all() and not product[::2].isnan().any()


@pytest.mark.parametrize("n_tokens", [1, 3, 33])
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 48), (72, 216), (333, 7)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_int8_product_equals_its_rounded_rows(n_tokens, n_in, n_out, has_bias):
    linear = nn.Linear(n_in, n_out, bias=has_bias, dtype=torch.bfloat16).requires_grad_(False)
    rows = quantise(torch.randn(n_tokens, n_in), torch.int8)
    weight = restore(quantise(linear.weight, torch.int8)).double()
    exact = restore(rows).double() @ weight.T
    exact = exact + linear.bias.double() if has_bias else exact
    # the sum is exact, and the scales and the bias take four operations before the last rounding
    found = Linear8(linear, torch.int8)(rows)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(("precision", "name"), [("fp8", "_scaled_mm"), ("int8", "_int_mm")])
def test_torch_without_8_bit_products_is_named(monkeypatch, precision, name):
    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("not currently supported on your device")

    monkeypatch.setattr(torch, name, refuse)
    with pytest.raises(UnavailableError, match=f"no products in {precision} for meta") as caught:
        check_device(torch.device("meta"), precision)
    assert caught.value.hint == "use --precision bf16"
    monkeypatch.undo()
    # Its shapes, types and layouts are those of a GPU's product.
    check_device(torch.device("meta"), precision)


class CoarseRotary(RotaryEmbedding):
    """fair-esm's rotary embedding, with the tables of a model that was cast to bf16."""

    def _update_cos_sin_tables(self, x: Tensor, seq_dimension: int = 1) -> tuple[Tensor, Tensor]:
        positions = torch.arange(x.shape[seq_dimension], dtype=torch.bfloat16)
        angles = torch.outer(positions, self.inv_freq.bfloat16()).repeat(1, 2)
        return angles.cos().float()[None], angles.sin().float()[None]


def test_weights_fit_the_tolerance(oracle):
    spreads: list[Tensor] = []
    shares: dict[str, list[float]] = {"attention": [], "mlp": []}

    def look(layer: torch.nn.Module, inputs: tuple[Tensor], _: object) -> None:
        x = inputs[0]
        normed = layer.self_attn_layer_norm(x)
        q, k = (
            project(normed)[:, 0].unflatten(-1, (oracle.shape.n_heads, -1)).transpose(0, 1)
            for project in (layer.self_attn.q_proj, layer.self_attn.k_proj)
        )
        spreads.append((q @ k.mT / oracle.shape.head_dim**0.5).std())
        attended = layer.self_attn(normed, normed, normed)[0]
        shares["attention"].append(float(attended.norm() / x.norm()) ** 2)
        x = x + attended
        branch = layer.fc2(F.gelu(layer.fc1(layer.final_layer_norm(x))))
        shares["mlp"].append(float(branch.norm() / x.norm()) ** 2)

    handles = [layer.register_forward_hook(look) for layer in oracle.model.layers]
    fair_esm_hidden(oracle.model, PROTEINS, oracle.shape.n_layers)
    for handle in handles:
        handle.remove()
    # made of some hundred random biases and norms, the figures stray by a tenth
    assert torch.stack(spreads).square().mean().sqrt() == pytest.approx(SCORE_SPREAD, rel=0.1)
    assert sum(shares["attention"]) / len(shares["attention"]) < ATTENTION_SHARE
    assert sum(shares["mlp"]) / len(shares["mlp"]) < MLP_SHARE


@pytest.mark.parametrize("fault", ["a rotary table in bf16", "no token dropout", "GELU by tanh"])
def test_tolerance_detects_faults(oracle, monkeypatch, fault):
    """The tolerance of float32 detects the last fault, that of bf16 all others."""
    shape = oracle.shape
    wrong = make_fair_esm(oracle.shape)
    if fault == "no token dropout":
        wrong = make_fair_esm(replace(shape, token_dropout=False))
    elif fault == "GELU by tanh":
        monkeypatch.setattr(esm.modules, "gelu", lambda x: F.gelu(x, approximate="tanh"))
    else:
        for layer in wrong.layers:
            layer.self_attn.rot_emb = CoarseRotary(shape.head_dim)
    hidden = fair_esm_hidden(wrong, PROTEINS[:7], shape.n_layers)
    limit = tolerance(shape.n_layers, torch.float32 if "GELU" in fault else torch.bfloat16)
    for protein, found, reference in zip(PROTEINS, hidden, oracle.hidden, strict=False):
        if "rotary" not in fault or len(protein) > LONGEST - 1:  # angles are off far from the start
            assert worst_row(found, reference) > limit


@pytest.mark.parametrize("case", CASES)
def test_earlier_layer_equals_fair_esm(oracle, case):
    for layer in range(1, oracle.shape.n_layers):
        hidden = case.load(oracle.path, layer)(PackedBatch.from_sequences(PROTEINS[:4]))
        reference = torch.cat(fair_esm_hidden(oracle.model, PROTEINS[:4], layer))
        limit = tolerance(layer, case.dtype)
        assert worst_row(hidden, reference) < limit
        assert worst_row(oracle.model.emb_layer_norm_after(reference), reference) > limit


@pytest.mark.parametrize("oracle", [24], indirect=True)
def test_earlier_layer_needs_no_later_tensor(oracle, tmp_path):
    state = stored_state(oracle.model)
    del state[f"encoder.sentence_encoder.layers.{oracle.shape.n_layers - 1}.fc1.bias"]
    path = tmp_path / "model.pt"
    torch.save({"model": state}, path)
    cpu = torch.device("cpu")
    n_layers = oracle.shape.n_layers
    model = load_esm2(path, n_layers - 1, torch.float32, cpu)
    assert len(model.layers) == n_layers - 1
    with pytest.raises(UnavailableError, match=rf"layers\.{n_layers - 1}\.fc1\.bias"):
        load_esm2(path, n_layers, torch.float32, cpu)


@pytest.mark.parametrize("oracle", [24], indirect=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 50, 333])
def test_vector_does_not_depend_on_its_batch(oracle, case, length):
    model = case.load(oracle.path, oracle.shape.n_layers)
    protein = random_protein(length, seed=1000)
    others = PROTEINS[:6]
    (alone,) = embed(model, [protein])
    limit = tolerance(oracle.shape.n_layers, case.dtype, case.dtype)
    batches = {
        "first": [protein, *others],
        "last": [*reversed(others), protein],
        "among its like": [random_protein(length), protein, random_protein(length, 1)],
        "longest first": sorted([*others, protein], key=len, reverse=True),
    }
    for name, batch in batches.items():
        together = embed(model, batch)[batch.index(protein)]
        assert worst_row(together, alone) < limit, name


@pytest.mark.parametrize("oracle", [24], indirect=True)
def test_only_products_use_the_precision(oracle):
    model = load_esm2(oracle.path, oracle.shape.n_layers, torch.bfloat16, torch.device("cpu"))
    reduced = {
        name.split(".")[-2]
        for name, tensor in model.state_dict().items()
        if tensor.dtype == torch.bfloat16
    }
    assert reduced == {"qkv", "attention_out", "up", "down"}
    rest = [t for t in model.state_dict().values() if t.dtype != torch.bfloat16]
    assert {tensor.dtype for tensor in rest} == {torch.float32}
    assert model.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        (torch.float32, attend_compiled),
        (torch.float16, attend_runs),
        (torch.bfloat16, attend_compiled_bf16 if multiplies_bf16() else attend_compiled),
        (torch.int8, attend_compiled_bf16 if multiplies_bf16() else attend_compiled),
    ],
)
def test_avx512_cpu_attends_in_c(dtype, kernel, monkeypatch):
    for capability, chosen in (("AVX512", kernel), ("AVX2", attend_runs)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)  # noqa: B023
        assert choose_kernel(torch.device("cpu"), dtype, 32) is chosen


@pytest.mark.parametrize("head_dim", [10, *SHAPES])
@pytest.mark.parametrize("gain", [1.0, 100.0])
def test_cpu_attention_is_float32(head_dim, gain):
    batch = PackedBatch.from_sequences([random_protein(length) for length in (166, 166, 7, 1)])
    staged = RunLayout.from_batch(batch, rotary_frequencies(head_dim))
    qkv = torch.randn(len(batch.tokens), 3, 3, head_dim).bfloat16()
    qkv[:, 0, 1] *= gain  # the queries of the second head
    found = attend_compiled(qkv.float(), staged)
    exact = attend_runs(qkv.double(), staged)
    distances = [(x - exact).norm() for x in (found, attend_runs(qkv.float(), staged))]
    assert distances[0] < 2 * distances[1], "SDPA sums in float32 too, in another order"
    assert torch.equal(attend_compiled(qkv, staged), found.bfloat16()), "rounded once"
    first = PackedBatch.from_sequences([random_protein(166)])
    alone = attend_compiled(qkv[:168], RunLayout.from_batch(first, rotary_frequencies(head_dim)))
    assert torch.equal(alone, found[:168].bfloat16()), "bit for bit"


@pytest.mark.parametrize("none", [torch.nan, torch.inf])
def test_nan_stays_nan_in_cpu_attention(none):
    """A NaN in a query affects its token. A NaN in a key or value affects all tokens."""
    staged = RunLayout.from_batch(PackedBatch.from_sequences(["MKV"]), rotary_frequencies(16))
    for dtype in (torch.float32, torch.bfloat16):
        for part, tokens in enumerate(([1], slice(None), slice(None))):
            qkv = torch.randn(5, 3, 2, 16, dtype=dtype)
            qkv[1, part, 0] = none
            is_number = attend_compiled(qkv, staged).isfinite()
            assert not is_number[tokens, 0].any() and is_number[:, 1].all()


_COUNT_FAULTS = """
import resource, sys
from pathlib import Path
import torch
from virnucpro.core.recipe import EncoderSpec
from virnucpro.models.esm2.model_files import load
from virnucpro.engine.local import worker_main

def work(*_):
    torch.set_num_threads(1)
    spec = EncoderSpec(model="m", sha256="", layer=3, pooling="mean", precision="bf16", dim=96)
    encoder = load(spec, Path(sys.argv[1]), torch.device("cpu"))
    faults = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        encoder.start(["M" * 400] * 20).rows()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(*faults)
    sys.exit()

worker_main(None, work, None, None, "worker", "cpu")
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what they do")
@pytest.mark.parametrize("oracle", [32], indirect=True)
def test_cpu_worker_reuses_its_memory(oracle):
    command = [sys.executable, "-c", _COUNT_FAULTS, str(oracle.path)]
    faults = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    # what a layer allocates are 8,040 tokens of 4 * 96 numbers of 2 bytes for the MLP alone, which
    # are 1,500 pages; a few more are touched by chance
    assert int(faults[-1]) < 1500, faults


# Gradients


@pytest.mark.parametrize("oracle", [24], indirect=True)
@pytest.mark.parametrize("kernel", [attend_runs, attend_to_train])
def test_gradients_equal_fair_esm(oracle, kernel):
    proteins = PROTEINS[:6]
    n_layers = oracle.shape.n_layers
    model = load_esm2(oracle.path, n_layers, torch.float32, torch.device("cpu")).requires_grad_()
    model.attend = kernel
    fair_esm = make_fair_esm(oracle.shape).requires_grad_()
    weights = torch.randn(sum(map(len, proteins)) + 12, oracle.shape.dim)
    (model(PackedBatch.from_sequences(proteins)) * weights).sum().backward()
    hidden = [
        fair_esm(fair_esm_tokens(fair_esm, protein), [n_layers])["representations"][n_layers][0]
        for protein in proteins
    ]
    (torch.cat(hidden) * weights).sum().backward()
    # on the way back each rounding of the way there has two like it: one for what a product is
    # taken with, one for the gradient itself
    limit = 3 * tolerance(n_layers, torch.float32)
    expected = our_gradients(fair_esm)
    for name, parameter in model.named_parameters():
        found = parameter.grad.flatten()[None]
        assert worst_row(found, expected[name].flatten()[None]) < limit, name


@pytest.mark.parametrize("oracle", [16, 24, 32], indirect=True)
@pytest.mark.parametrize("length", [2, 50, 166])
@pytest.mark.parametrize("n_others", [1, 40])
@pytest.mark.parametrize(
    ("dtype", "is_reordered"),
    [
        (torch.bfloat16, True),
        (torch.bfloat16, False),
        (torch.float32, True),
        (torch.int8, False),
    ],
)
def test_cpu_vector_has_same_bits_in_any_batch(oracle, length, n_others, dtype, is_reordered):
    """In batches of four tokens or more. On AMD CPUs, MKL treats smaller ones differently."""
    loaded = torch.bfloat16 if dtype == torch.int8 else dtype
    model = load_esm2(oracle.path, oracle.shape.n_layers, loaded, torch.device("cpu"))
    if dtype == torch.int8:
        model.quantise(torch.device("cpu"), dtype)
    if is_reordered:
        model.reorder_weights()
    protein = random_protein(length, seed=1000)
    (alone,) = embed(model, [protein])
    others = [random_protein(max(1, length - i % 3), seed=i) for i in range(n_others)]
    assert torch.equal(embed(model, [*others, protein])[-1], alone)
    like = [random_protein(length, seed=i) for i in range(n_others)]
    assert torch.equal(embed(model, [protein, *like])[0], alone)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "kernel", "with_triton"),
    [
        ((7, 5), torch.float16, 24, attend_efficient, attend_efficient_triton),
        ((7, 0), torch.float32, 64, attend_efficient, attend_efficient),
        ((8, 0), torch.float32, 64, attend_efficient, attend_efficient),
        ((8, 0), torch.float16, 16, attend_varlen, attend_varlen_triton),
        ((12, 0), torch.bfloat16, 256, attend_varlen, attend_varlen_triton),
        ((9, 0), torch.bfloat16, 12, attend_runs, attend_runs),
        ((9, 0), torch.bfloat16, 264, attend_runs, attend_runs),
        ((7, 5), torch.float32, 12, attend_runs, attend_runs),
    ],
)
def test_gpu_kernel_follows_card_and_precision(
    monkeypatch, caplog, capability, dtype, head_dim, kernel, with_triton
):
    """In 16 bits Triton does rotation and norms. If it cannot, a warning says why."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    has_both = with_triton is not kernel
    with monkeypatch.context() as without:
        without.setattr(triton_kernels, "triton", None)
        assert choose_kernel(torch.device("cuda"), dtype, head_dim) is kernel
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"{TRITON_ALONE}PyTorch, which is slower than Triton (Triton is not installed)")
    ] * has_both
    monkeypatch.setattr(triton_kernels, "unavailable_kernels", lambda *_: {"rotation": ""})
    assert choose_kernel(torch.device("cuda"), dtype, head_dim) is with_triton
    assert len(caplog.records) == has_both
    assert describe(with_triton).endswith(f", {TRITON_ALONE}Triton") == has_both
    assert describe(kernel).endswith(f", {TRITON_ALONE}PyTorch") == (kernel is attend_varlen)


TRITON_ALONE = "rotation and LayerNorm: "  # what Triton may do, and PyTorch in its place
REDUCTIONS = [f"allow_{number}_reduced_precision_reduction" for number in ("bf16", "fp16")]


@pytest.fixture
def feigned_gpu(monkeypatch):
    """The devices that were made the current one, as if torch had GPUs here."""
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    was_planned = torch.backends.cuda.cudnn_sdp_enabled()
    products = torch.backends.cuda.matmul
    were_reduced = [getattr(products, switch) for switch in REDUCTIONS]
    for switch in REDUCTIONS:
        setattr(products, switch, True)
    yield chosen
    torch.backends.cuda.enable_cudnn_sdp(was_planned)
    for switch, was_reduced in zip(REDUCTIONS, were_reduced, strict=True):
        setattr(products, switch, was_reduced)


def test_used_gpu_is_current_with_true_float32(feigned_gpu):
    use_device(torch.device("cpu"))
    assert not feigned_gpu and torch.backends.cudnn.allow_tf32
    use_device(torch.device("cuda"))
    assert not feigned_gpu, "without a number it is the current one already"
    use_device(torch.device("cuda:1"))
    assert feigned_gpu == [torch.device("cuda:1")]
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not any(getattr(torch.backends.cuda.matmul, switch) for switch in REDUCTIONS)


PRODUCTS = """
import torch
from virnucpro.models.packing import bag_mean, use_device
use_device(torch.device("cpu"))
torch.set_num_threads(1)
torch.manual_seed(0)
rows, weight, bias = torch.randn(64, 320), torch.randn(1280, 320), torch.randn(1280)
together = torch.nn.functional.linear(rows, weight, bias)
for n in range(4, 40):
    for first in range(0, 24, 5):
        part = slice(first, first + n)
        alone = torch.nn.functional.linear(rows[part], weight, bias)
        assert torch.equal(alone, together[part]), (n, first)
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
@pytest.mark.parametrize("kernels", ["AVX2", "AVX512"])  # the second where the CPU has them
def test_cpu_product_ignores_row_position(monkeypatch, kernels):
    """This holds for four rows or more. With fewer, position matters on AMD CPUs."""
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", kernels)
    subprocess.run([sys.executable, "-c", PRODUCTS], check=True)


MANY_SHAPES = """
import psutil, torch
from virnucpro.models.packing import use_device
use_device(torch.device("cpu"))
linear = torch.nn.Linear(1280, 256, dtype=torch.bfloat16)
rows = torch.ones(600, 1280, dtype=torch.bfloat16)
n_bytes = psutil.Process().memory_info
with torch.inference_mode():
    linear(rows)
    before = n_bytes().rss
    for n in range(300, 600):
        linear(rows[:n])
assert n_bytes().rss - before < 100e6  # 40 MB, and 210 if all shapes are kept
"""


def test_cpu_memory_ignores_batch_shapes(monkeypatch):
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.delenv(cache, raising=False)
    subprocess.run([sys.executable, "-c", MANY_SHAPES], check=True)


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, _, args=(), kwargs=None):
        self.names[operator.overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))


def in_one_kernel(hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Compute ``mean_pool`` as on a GPU."""
    return bag_mean(hidden, batch.residues, batch.residues_before)


@pytest.mark.parametrize(
    ("kernel", "dtype", "operator"),
    [
        (attend_varlen, torch.bfloat16, "_flash_attention_forward"),
        (attend_efficient, torch.float32, "_efficient_attention_forward"),
    ],
)
@pytest.mark.parametrize("pool", [in_one_kernel, bos_pool, residues_only])
def test_gpu_attends_without_waiting(kernel, dtype, operator, pool):
    """Tensors have no numbers, so that reading one on the host is an error."""
    shape = SHAPES[64]
    with torch.device("meta"):
        model = ESM2(shape, shape.n_layers, dtype, kernel).to("meta")
    batch = PackedBatch.from_sequences(PROTEINS)
    with torch.inference_mode(), Operators() as operators:
        rows = pool(model(batch), batch)
    n_rows = sum(map(len, PROTEINS)) if pool is residues_only else len(PROTEINS)
    assert rows.shape == (n_rows, shape.dim) and rows.dtype == torch.float32
    assert operators.names[operator] == shape.n_layers
    attention = {name for name in operators.names if "attention" in name}
    assert attention == {operator}, "and no other kernel, whatever this torch prefers"


@pytest.mark.parametrize("oracle", [24], indirect=True)
def test_pooling_kernel_equals_pooling_by_length(oracle):
    batch = PackedBatch.from_sequences(PROTEINS)
    hidden = torch.cat(oracle.hidden)
    exact = torch.stack([rows[1:-1].double().mean(dim=0) for rows in oracle.hidden])
    # a sum of n terms is rounded n times, by u of its size at most, and the mean once more
    limit = (LONGEST + 1) * torch.finfo(torch.float32).eps / 2
    size = torch.stack([rows[1:-1].double().abs().mean(dim=0) for rows in oracle.hidden])
    for pool in (in_one_kernel, mean_pool):
        assert ((pool(hidden, batch) - exact).abs() <= limit * size).all()


def test_parameter_count_equals_the_model(oracle):
    model = load_esm2(oracle.path, oracle.shape.n_layers, torch.float32, torch.device("cpu"))
    assert oracle.shape.n_parameters == sum(p.numel() for p in model.parameters())
