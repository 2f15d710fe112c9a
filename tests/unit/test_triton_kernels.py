"""Our kernels compile for every GPU and agree with PyTorch. No GPU is needed.

Triton compiles a kernel for GPUs that this machine lacks, and its interpreter runs it on the CPU.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fair_esm_reference import (
    fair_esm_hidden,
    make_fair_esm,
    random_protein,
    save_fair_esm,
    tolerance,
    worst_row,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from virnucpro.models import attention, triton_kernels, triton_tiles
from virnucpro.models.attention import (
    E4M3,
    TILE_ROWS,
    RunLayout,
    attend_efficient_triton,
    attend_runs,
    attend_tiles,
    attend_tiles_rotating,
    attend_varlen_triton,
    rotate,
)
from virnucpro.models.checkpoint import LAYER_NORM_EPS
from virnucpro.models.dnabert_s import model as dnabert_s
from virnucpro.models.dnabert_s.encoder import load_dnabert
from virnucpro.models.dnabert_s.model import alibi_slopes, attend_texts_triton, mean_pool, pack
from virnucpro.models.eight_bits import EIGHT_BITS, Linear8, Rows8, quantise, restore
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.loading import load_esm2
from virnucpro.models.esm2.model_files import read_shape
from virnucpro.models.esmc.config import ESMCShape
from virnucpro.models.esmc.loading import random_esmc
from virnucpro.models.esmc.model import ESMC
from virnucpro.models.packing import PackedBatch
from virnucpro.models.registry import FAMILIES
from virnucpro.models.transformer import DTYPES, rotary_frequencies
from virnucpro.models.validation import compare_reference as check
from virnucpro.models.validation.compare_reference import MARGIN

triton = pytest.importorskip("triton", reason="Triton has no build for this system")
interpreter = pytest.importorskip("triton.runtime.interpreter")
resources = pytest.importorskip("kernel_resources")
compile_for = resources.compile_for
read_resources = resources.read_resources

CPU = torch.device("cpu")

SHAPES = {name: read_shape(published) for name, published in FAMILIES["esm2"].published.items()}
WIDEST = {"esm2_t48_15B_UR50D": SHAPES["esm2_t48_15B_UR50D"]}
# rows that are no power of two and halves of heads that are no 16 bytes; and the most registers
ODD_AND_WIDEST = {"esm2_t12_35M_UR50D": SHAPES["esm2_t12_35M_UR50D"], **WIDEST}
GPUS = [  # 7.5 has no bf16; on the others fp16 is compiled as bf16 is
    (75, "fp16", ODD_AND_WIDEST),
    *((capability, "bf16", WIDEST) for capability in (80, 100, 120)),
    (90, "bf16", SHAPES),
    (90, "fp16", WIDEST),
]
LARGE = {name: SHAPES[name] for name in ("esm2_t36_3B_UR50D", "esm2_t48_15B_UR50D")}
DNABERT_S = FAMILIES["dnabert-s"].published["dnabert-s"]


def hand_kernels(monkeypatch, to: Callable[[Any], object] = triton.jit) -> None:
    """Pass our kernels to Triton's present driver or interpreter, or to a stand-in."""
    monkeypatch.setattr(triton_kernels, "wrap_kernel", functools.cache(to))


# Compilation


def check_machine_code(capability: int, steps: dict[str, Any], n_bytes: int = 16) -> None:
    """Check that code is for this GPU, spills no register, and writes rows 16 bytes at a time."""
    (target,) = re.findall(r"\.target (sm_\w+)", steps["ptx"])
    assert target.rstrip("a") == f"sm_{capability}"
    used = read_resources(steps["cubin"])
    assert used["REG"] and used["STACK"] == used["LOCAL"] == 0, used
    to_16_bits = re.findall(r"cvt\.(\w+)(?:\.satfinite)?\.(?:bf16|f16)(?:x2)?\.f32", steps["ptx"])
    to_8_bits = re.findall(r"cvt\.(\w+)\.satfinite\.e4m3x2", steps["ptx"])
    assert set(to_8_bits) <= {"rn"}
    # 8.9 rounds to 8 bits what it cuts off to fp16: that tips what lies between two within 2^-11
    assert set(to_16_bits) <= ({"rz"} if to_8_bits else {"rn"}), "to the nearest"
    found = set(re.findall(r"st\.global\.(\S+)", steps["ptx"]))
    # a row in 8 bits has its scale; the rest behind its largest power of two is half as wide
    to_integers = re.findall(r"cvt\.rzi\.s\d+\.f32", steps["ptx"])
    spare = {"b32", "v2.b32"} if to_8_bits or to_integers else set()
    assert found - spare == {f"v{n_bytes // 4}.b32"}


def check_rows_of_tokens(
    capability: int,
    kernel: tuple[Callable[..., None], Mapping[str, str], Mapping[str, Any]],
    row: int,
    n_bytes: int = 16,
    **options: int,
) -> None:
    """Check the same for a kernel for one token, and that its row offset has 64 bits.

    A million tokens of 15B are 2 * 10^10 numbers. So a token's number is widened before it is
    multiplied, except where it is an index itself, as for a scale.
    """
    steps = compile_for(capability, *kernel, {**triton_kernels.row_options(row), **options}).asm
    check_machine_code(capability, steps, n_bytes)
    (token,) = re.findall(r"(%\w+) = tt.get_program_id x", steps["ttir"])
    uses = re.findall(rf"= (.*){token}\b", steps["ttir"])
    assert uses and all(re.fullmatch(r"arith.extsi |tt.addptr %\w+, ", use) for use in uses)


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("capability", "number", "shapes"), GPUS)
def test_rotation_compiles_for_every_gpu(capability, number, shapes):
    pointers = {"qkv": f"*{number}", "cos": "*fp32", "sin": "*fp32"}
    for shape in shapes.values():
        sizes = triton_kernels.sizes_to_rotate(shape.n_heads, shape.head_dim)
        kernel = triton_kernels.rotate_token, pointers, sizes
        # half a head, the contiguous unit, has 24 bytes in 35M, else a multiple of 16
        n_bytes = 16 if shape.head_dim % 16 == 0 else 8
        check_rows_of_tokens(capability, kernel, shape.dim, n_bytes)


# between two layers; and for the widest within a layer, and behind the last, which is in float32
BORDER = (2, True, True)
MORE_BORDERS = [(1, False, True), (2, False, False)]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("capability", "number", "shapes"), GPUS)
def test_border_compiles_for_every_gpu(capability, number, shapes):
    for shape in shapes.values():
        more = MORE_BORDERS if shape == SHAPES["esm2_t48_15B_UR50D"] else []
        for n_added, keeps_total, is_reduced in (BORDER, *more):
            pointers = dict.fromkeys(("x", "weight", "bias", "total", "scales"), "*fp32")
            pointers |= dict.fromkeys(("first", "second"), f"*{number}")
            pointers["normed"] = f"*{number}" if is_reduced else "*fp32"
            sizes = triton_kernels.sizes_to_norm(
                shape.dim, n_added, LAYER_NORM_EPS, keeps_total=keeps_total
            )
            kernel = triton_kernels.add_and_norm_token, pointers, sizes
            check_rows_of_tokens(capability, kernel, shape.dim)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("capability", "number"),
    [*((card, "fp8e4nv") for card in (89, 90, 100, 120)), *((card, "i8") for card in (80, 120))],
)
def test_8_bit_rows_compile_for_every_gpu(capability, number):
    """After GELU, where rows are widest, and in the LayerNorm between two layers."""
    limit = 127.0 if number == "i8" else 448.0
    pointers = {"x": "*bf16", "values": f"*{number}", "scales": "*fp32"}
    to_norm = dict.fromkeys(("x", "weight", "bias", "total", "scales"), "*fp32")
    to_norm |= {"first": "*bf16", "second": "*bf16", "normed": f"*{number}"}
    for shape in (LARGE if capability == 90 else WIDEST).values():
        inner = 4 * shape.dim
        sizes = triton_kernels.sizes_to_quantise(inner, has_gelu=True, limit=limit)
        kernel = triton_kernels.quantise_token, pointers, sizes
        n_warps = triton_kernels.warps_to_quantise(inner)
        check_rows_of_tokens(capability, kernel, inner, num_warps=n_warps)
        sizes = triton_kernels.sizes_to_norm(
            shape.dim, 2, LAYER_NORM_EPS, keeps_total=True, limit=limit
        )
        kernel = triton_kernels.add_and_norm_token, to_norm, sizes
        check_rows_of_tokens(capability, kernel, shape.dim)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("capability", [80, 120])
def test_restored_rows_compile_for_every_gpu(capability):
    pointers = dict.fromkeys(("row_scales", "column_scales", "bias"), "*fp32")
    pointers |= {"product": "*i32", "out": "*bf16"}
    for shape in WIDEST.values():
        sizes = triton_kernels.sizes_to_restore(4 * shape.dim, has_bias=True)
        kernel = triton_kernels.restore_row, pointers, sizes
        check_rows_of_tokens(capability, kernel, shape.dim, **triton_kernels.OPTIONS)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("capability", [75, 80, 90, 100, 120])
def test_dnabert_s_attention_compiles(capability):
    pointers = {"qkv": "*fp32", "offsets": "*i32", "slopes": "*fp32", "out": "*fp32"}
    sizes = triton_kernels.sizes_to_attend(
        DNABERT_S.n_heads, DNABERT_S.dim // DNABERT_S.n_heads, has_tf32=capability >= 80
    )
    options = triton_kernels.OPTIONS_TO_ATTEND
    steps = compile_for(capability, triton_kernels.attend_sequence, pointers, sizes, options).asm
    check_machine_code(capability, steps)
    assert ("tf32" in steps["ptx"]) == (capability >= 80)
    assert not re.search(r"arith.muli .* : tensor<\d+x1xi32>", steps["ttir"]), "rows of a long text"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("capability", "head_dim"), [(80, 64), (90, 16), (90, 24), (90, 64), (100, 64), (120, 64)]
)
def test_attention_in_tiles_compiles(capability, head_dim):
    """With the rotation, which takes the most registers. Triton has no tensor cores before 8.0."""
    pointers = dict.fromkeys(("bounds", "starts"), "*i32") | dict.fromkeys(("cos", "sin"), "*fp32")
    pointers |= {"qkv": "*bf16", "out": "*bf16"}
    sizes = triton_tiles.sizes_to_attend_tiles(20, head_dim, rotates=True, block=TILE_ROWS)
    options = triton_kernels.OPTIONS_TO_ATTEND
    steps = compile_for(capability, triton_tiles.attend_tile, pointers, sizes, options).asm
    check_machine_code(capability, steps)
    # Rows of a large batch have 64 bits. Only positions in a sequence are multiplied in 32.
    by_position = r"arith.muli %turn\w*, .* : tensor<\d+x1xi32>"
    in_32_bits = r"arith.muli .* : tensor<\d+x1xi32>"
    assert len(re.findall(by_position, steps["ttir"])) == 4
    assert len(re.findall(in_32_bits, steps["ttir"])) == 4


class FeignedDriver:
    """Triton's driver for a simulated H100: kernels are compiled, and not launched."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, tuple[str, ...]]] = []  # kernel, and types of its pointers
        self.utils = self

    def get_current_target(self) -> object:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, *_: object) -> tuple[int, ...]:
        return 0, 0, 0, 0, 1024  # the last: threads of a program, at most

    def launcher_cls(self, source: Any, _: object) -> Callable[..., None]:
        kinds = tuple(kind for kind in source.signature.values() if kind != "constexpr")
        return lambda *_: self.launched.append((source.fn.__name__, kinds))


@pytest.fixture
def driver(cache, monkeypatch) -> FeignedDriver:
    feigned = FeignedDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", feigned)
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
    hand_kernels(monkeypatch)
    return feigned


def test_trial_binds_and_compiles(driver, monkeypatch):
    """All steps of a call except the launch, with the tensors of the call."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    answers: list[object] = []
    check._try(SimpleNamespace(send=answers.append), "cpu")
    assert answers == [dict.fromkeys(("fp8", "int8", *triton_kernels.KernelName), "")]
    floats = ("*fp32",) * 5
    assert list(dict.fromkeys(driver.launched)) == [
        ("rotate_token", ("*bf16", "*fp32", "*fp32")),
        ("add_and_norm_token", ("*fp32", "*bf16", "*bf16", *floats[:2], "*bf16", *floats[:2])),
        ("attend_sequence", ("*fp32", "*i32", "*fp32", "*fp32")),
        ("quantise_token", ("*bf16", "*fp8e4nv", "*fp32")),
        ("add_and_norm_token", (*floats, "*fp8e4nv", *floats[:2])),
        ("quantise_token", ("*bf16", "*i8", "*fp32")),
        ("add_and_norm_token", (*floats, "*i8", *floats[:2])),
        ("restore_row", ("*i32", "*fp32", "*fp32", "*fp32", "*bf16")),
    ]


def test_every_call_binds_and_compiles(driver):
    x = torch.zeros(33, 1280)
    branch = torch.zeros(33, 1280).bfloat16()
    norm = nn.LayerNorm(1280)
    in_8_bits = torch.empty(33, 1280, dtype=E4M3)
    scales = torch.empty(33, 1)
    with torch.inference_mode():
        triton_kernels.add_and_norm(x, [branch], norm, in_8_bits, None, scales)
        triton_kernels.add_and_norm(x, [branch] * 2, norm, x, None)
    floats = ("*fp32",) * 5
    assert driver.launched == [
        ("add_and_norm_token", ("*fp32", "*bf16", *floats[:3], "*fp8e4nv", *floats[:2])),
        ("add_and_norm_token", ("*fp32", "*bf16", "*bf16", *floats)),
    ]


def annotated(qkv: Any, cos, sin, n_pairs, half, row, block):
    """A kernel that Triton's interpreter runs, and its compiler refuses."""


@pytest.mark.usefixtures("cache")
def test_refusal_reason_excludes_the_source():
    pointers = {"qkv": "*bf16", "cos": "*fp32", "sin": "*fp32"}
    with pytest.raises(triton.CompilationError) as caught:
        sizes = triton_kernels.sizes_to_rotate(20, 16)
        compile_for(90, annotated, pointers, sizes, triton_kernels.OPTIONS)
    reason = triton_kernels.unavailable_reason(caught.value)
    assert reason.startswith('CompilationError: NameError("Cannot access global variable Any')
    assert reason.isprintable()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_machine_without_a_gpu_gives_reasons():
    refusals = {}
    for number in (*EIGHT_BITS.values(), torch.float32):
        refusals |= triton_kernels.unavailable_kernels(CPU, number)
    assert refusals.keys() == set(triton_kernels.KernelName)
    assert all(reason.startswith("RuntimeError: ") for reason in refusals.values())


# Results, by Triton's interpreter


convert_float = interpreter._convert_float


def converted_as_by_a_gpu(numbers: Any, before: Any, after: Any, rounding: Any) -> Any:
    """Convert as the interpreter does, except to e4m3, where it loses a carry."""
    if after != triton.language.float8e4nv:
        return convert_float(numbers, before, after, rounding)
    exact = torch.from_numpy(np.ascontiguousarray(numbers)).view(torch.float32)
    return exact.to(E4M3).view(torch.uint8).numpy()


@pytest.fixture
def interpreted(monkeypatch) -> None:
    """Run our kernels on the CPU unchanged, and the Triton functions that they call."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(interpreter, "_convert_float", converted_as_by_a_gpu)
    language = triton.language
    for module in (language, language.standard, triton_tiles):
        for name, function in list(vars(module).items()):
            if isinstance(function, triton.runtime.JITFunction):
                monkeypatch.setattr(module, name, triton.jit(function.fn))
    hand_kernels(monkeypatch)


U = torch.finfo(torch.float32).eps / 2
HEADS = [(4, 16), (3, 24), (3, 32), (2, 64), (1, 128)]
SOME = ["MKV", "MKXBUZO-J"]
PUBLISHED_HEADS = [(shape.n_heads, shape.head_dim) for shape in SHAPES.values()]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("n_heads", "head_dim", "dtype", "proteins"),
    [
        *((*heads, torch.bfloat16, SOME) for heads in (*HEADS, *PUBLISHED_HEADS)),
        *((3, 24, torch.float16, proteins) for proteins in (SOME, [""], [])),
    ],
)
def test_rotation_leaves_the_values(n_heads, head_dim, dtype, proteins):
    batch = RunLayout.from_batch(
        PackedBatch.from_sequences(["MKV", *proteins]), rotary_frequencies(head_dim)
    )
    n_tokens = sum(len(protein) + 2 for protein in proteins)
    cos = batch.cos[-n_tokens or 5 :]
    sin = batch.sin[-n_tokens or 5 :]
    qkv = torch.randn(n_tokens, 3, n_heads, head_dim).to(dtype)
    before = qkv.clone()
    tables = (table[:n_tokens, None, None].double() for table in (cos, sin))
    expected = rotate(qkv[:, :2].double(), *tables)
    triton_kernels.rotate_in_place(qkv, cos, sin)
    assert torch.equal(qkv[:, 2], before[:, 2])
    # each number is rounded once to 16 bits, or cut off, by the interpreter; where the sum of two
    # products nearly cancels, what float32 rounds off them is left
    size = float(before.abs().max()) if n_tokens else 0.0
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(qkv[:, :2].double(), expected, rtol=eps, atol=8 * U * size)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("dim", "n_tokens", "scale"),
    [
        *((dim, 3, 1.0) for dim in (8, 40, *(shape.dim for shape in SHAPES.values()))),
        *((72, n_tokens, 1.0) for n_tokens in (0, 1)),
        (72, 3, 1e-3),  # eps is the larger part
    ],
)
@pytest.mark.parametrize(("n_added", "keeps_total"), [(0, False), (1, False), (2, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_border_equals_pytorch_and_float64(dim, n_tokens, n_added, keeps_total, dtype, scale):
    number = torch.bfloat16 if dtype == torch.float32 else dtype
    norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
    norm.weight.data.normal_(1, 0.1)
    norm.bias.data.normal_()
    x = scale * (3 * torch.randn(n_tokens, dim) + 1)
    added = [scale * torch.randn(n_tokens, dim).to(number) for _ in range(n_added)]
    kept = x.clone()
    normed = torch.full((n_tokens, dim), torch.nan, dtype=dtype)
    total = torch.full((n_tokens, dim), torch.nan) if keeps_total else None
    with torch.inference_mode():
        triton_kernels.add_and_norm(x, added, norm, normed, total)
    expected = sum(added, kept)
    assert torch.equal(x, kept)
    assert total is None or torch.equal(total, expected)
    exact = F.layer_norm(
        expected.double(), (dim,), norm.weight.double(), norm.bias.double(), norm.eps
    )
    # A sum of dim numbers in float32, in halves, is off by log2(dim) u of their sizes at most, and
    # so is a mean of numbers or squares. By the first each number is off, by half of the second its
    # scale; root, its inverse (2 ulp) and four more operations add 8 u. Then one rounding, to the
    # nearest on a GPU; the interpreter cuts off what bf16 does not hold.
    if n_tokens:
        spread = expected.double().std(dim=1, correction=0, keepdim=True)
        size = expected.abs().amax(dim=1, keepdim=True) / spread * norm.weight.abs().max()
        slack = (1.5 * np.log2(dim) + 8) * U * (size + norm.bias.abs().max())
        rounding = torch.finfo(dtype).eps * exact.abs()
        assert ((normed.double() - exact).abs() <= rounding + slack).all()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("n_added", "keeps_total"), [(0, False), (1, False), (2, True)])
@pytest.mark.parametrize("branch_scale", [1.0, 0.5, (36 / 30) ** 0.5])
def test_border_scales_branches_of_esmc(n_added, keeps_total, branch_scale):
    """The last norm of ESM C has no bias, and the kernel then reads none."""
    dim = 960
    n_tokens = 3
    norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS, bias=False)
    norm.weight.data.normal_(1, 0.1)
    x = 3 * torch.randn(n_tokens, dim) + 1
    added = [torch.randn(n_tokens, dim).bfloat16() for _ in range(n_added)]
    normed = torch.full((n_tokens, dim), torch.nan)
    total = torch.full((n_tokens, dim), torch.nan) if keeps_total else None
    with torch.inference_mode():
        triton_kernels.add_and_norm(x, added, norm, normed, total, branch_scale=branch_scale)
    expected = x.clone()
    for branch in added:
        expected = torch.add(expected, branch, alpha=branch_scale)
    if total is not None:  # a product and a sum for each branch, each off by half a spacing
        torch.testing.assert_close(total, expected, rtol=4 * U, atol=4 * U)
    exact = F.layer_norm(expected.double(), (dim,), norm.weight.double(), eps=norm.eps)
    slack = (1.5 * np.log2(dim) + 8 + 4) * U * 8  # as above, with two more operations a branch
    assert ((normed.double() - exact).abs() <= slack).all()


def assert_nearly_in_8_bits(rows: Rows8, expected: Rows8, slack: float) -> None:
    """Check 8-bit rows: scales differ by at most this share.

    A few numbers between two 8-bit values may be rounded to the other one.
    """
    torch.testing.assert_close(rows.scales, expected.scales, rtol=slack, atol=0)
    found = rows.values.float()
    exact = expected.values.float()
    is_int8 = rows.values.dtype == torch.int8
    torch.testing.assert_close(found, exact, rtol=2**-3, atol=1 if is_int8 else 2**-9)
    assert (found != exact).sum() <= 1e-3 * found.numel() + 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dim", [40, 10_240])
@pytest.mark.parametrize("n_tokens", [0, 3])
@pytest.mark.parametrize("has_gelu", [False, True])
@pytest.mark.parametrize("number", EIGHT_BITS.values())
def test_8_bit_rows_equal_pytorch(dim, n_tokens, has_gelu, number):
    x = (torch.arange(n_tokens)[:, None] * torch.randn(n_tokens, dim)).bfloat16()  # the first: 0
    values = torch.empty(n_tokens, dim, dtype=number)
    scales = torch.full((n_tokens, 1), torch.nan)
    triton_kernels.quantise(x, values, scales, has_gelu=has_gelu)
    if has_gelu or number == torch.int8:
        # GELU is off by some u, and a number between two integers goes to either.
        rows = F.gelu(x.float()) if has_gelu else x.float()
        assert_nearly_in_8_bits(Rows8(values, scales), quantise(rows, number), 8 * U)
        return
    expected = quantise(x, E4M3)
    assert torch.equal(values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(scales, expected.scales)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("n_out", [1, 40, 5_000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_restored_rows_equal_our_c_code(n_out, has_bias):
    linear = nn.Linear(16, n_out, bias=has_bias, dtype=torch.bfloat16)
    layer = Linear8(linear, torch.int8)
    rows = quantise(torch.randn(3, 16), torch.int8)
    out = torch.empty(3, n_out)  # the interpreter truncates to bf16
    product = torch._int_mm(rows.values, layer.weight.t())
    with torch.inference_mode():
        triton_kernels.restore(product, rows.scales, layer.scales, layer.bias, out)
        expected = layer(rows)
    # Both multiply and add in float32, in another order, and round once.
    torch.testing.assert_close(out.bfloat16(), expected, rtol=2**-7, atol=1e-6)
    assert (out.bfloat16() != expected).sum() <= 1e-2 * out.numel()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("number", EIGHT_BITS.values())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_row_keeps_nan_in_8_bits(odd, number):
    """A run recognises NaN in the vector. Rounding must not make it finite."""
    x = torch.randn(3, 40)
    norm = nn.LayerNorm(40)
    x[1, 7] = odd
    for run in (
        lambda *rows: triton_kernels.quantise(x.bfloat16(), *rows, has_gelu=False),
        lambda *rows: triton_kernels.add_and_norm(x, [], norm, rows[0], None, rows[1]),
    ):
        rows = torch.empty(3, 40, dtype=number), torch.empty(3, 1)
        with torch.inference_mode():
            run(*rows)
        assert restore(Rows8(*rows)).isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("n_added", "keeps_total"), [(1, False), (2, True)])
@pytest.mark.parametrize("number", EIGHT_BITS.values())
def test_border_rounds_its_norm_to_8_bits(n_added, keeps_total, number):
    dim = 320
    n_tokens = 3
    norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
    norm.weight.data.normal_(1, 0.1)
    norm.bias.data.normal_()
    x = torch.randn(n_tokens, dim)
    added = [torch.randn(n_tokens, dim).bfloat16()] * n_added
    values = torch.empty(n_tokens, dim, dtype=number)
    scales = torch.full((n_tokens, 1), torch.nan)
    total = torch.empty(n_tokens, dim) if keeps_total else None
    with torch.inference_mode():
        triton_kernels.add_and_norm(x, added, norm, values, total, scales)
        rows = norm(sum(added, x))
    assert total is None or torch.equal(total, sum(added, x))
    slack = (1.5 * np.log2(dim) + 8) * U  # as of the LayerNorm in 16 bits
    assert_nearly_in_8_bits(Rows8(values, scales), quantise(rows, number), slack)


SHORT = {  # layers, heads and their dimensions
    16: ESM2Shape(n_layers=3, dim=64, n_heads=4),
    24: ESM2Shape(n_layers=3, dim=72, n_heads=3),
    64: ESM2Shape(n_layers=2, dim=128, n_heads=2),
}
PROTEINS = [random_protein(length) for length in (3, 1, 3)]  # 13 tokens: each runs for long


def attend_each(q: Tensor, k: Tensor, v: Tensor, batch: RunLayout) -> Tensor:
    """Compute attention protein by protein, on any device, in place of a CUDA kernel."""
    out = torch.full_like(v, torch.nan)
    for first, last in pairwise(batch.cu_seqlens.tolist()):
        q_, k_, v_ = (x[first:last].transpose(0, 1) for x in (q, k, v))
        out[first:last] = F.scaled_dot_product_attention(q_, k_, v_).transpose(0, 1)
    return out


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("head_dim", "kernel", "dtype"),
    [
        (16, attend_varlen_triton, torch.bfloat16),
        (24, attend_efficient_triton, torch.float16),
        (64, attend_varlen_triton, E4M3),
        (64, attend_varlen_triton, torch.int8),
        (16, attend_tiles_rotating, torch.float16),  # Triton interprets no bf16 product
    ],
)
def test_batch_through_kernels_equals_fair_esm(monkeypatch, tmp_path, head_dim, kernel, dtype):
    """Tokens that the caller has embedded give the same, and are not changed."""
    for name in ("flash_attention", "efficient_attention"):
        monkeypatch.setattr(attention, name, attend_each)
    shape = SHORT[head_dim]
    fair_esm = make_fair_esm(shape)
    path = save_fair_esm(fair_esm, tmp_path / "model.pt")
    for layer in (1, shape.n_layers):
        is_8_bits = dtype in EIGHT_BITS.values()
        model = load_esm2(path, layer, DTYPES["fp8"] if is_8_bits else dtype, CPU)
        if is_8_bits:
            model.quantise(CPU, dtype)
        model.attend = kernel
        batch = model.lay_out(PackedBatch.from_sequences(PROTEINS))
        embedded = model.token_rows()[batch.tokens]
        kept = embedded.clone()
        with torch.inference_mode():
            both = model(PackedBatch.from_sequences(PROTEINS)), model.transform(embedded, batch)
        expected = torch.cat(fair_esm_hidden(fair_esm, PROTEINS, layer))
        for hidden in both:
            assert worst_row(hidden, expected) < tolerance(layer, dtype) + 4 * U
        assert torch.equal(embedded, kept)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("layer", [1, 2])
def test_esmc_through_our_kernels(monkeypatch, layer):
    """Both methods round alike in bf16, so their distances from float32 are similar."""
    monkeypatch.setattr(attention, "flash_attention", attend_each)
    shape = ESMCShape(n_layers=2, dim=128, n_heads=2, inner=256)
    weights = random_esmc(shape, seed=3).state_dict()
    hidden = {}
    for name, dtype, kernel in (
        ("exact", torch.float32, attend_runs),
        ("pytorch", torch.bfloat16, attend_runs),
        ("triton", torch.bfloat16, attend_varlen_triton),
    ):
        model = ESMC(shape, layer, dtype, kernel).requires_grad_(False)
        model.load_state_dict({key: weights[key] for key in model.state_dict()})
        with torch.inference_mode():
            hidden[name] = model(PackedBatch.from_sequences(PROTEINS))
    explained = worst_row(hidden["pytorch"], hidden["exact"])
    assert 0 < explained < 0.05
    assert worst_row(hidden["triton"], hidden["exact"]) < MARGIN * explained


# The attention of DNABERT-S


def in_float64(qkv: Tensor, offsets: Tensor, slopes: Tensor) -> Tensor:
    """Compute attention with explicit scores, text by text."""
    out = torch.full_like(qkv[:, 0], torch.nan, dtype=torch.float64)
    for first, last in pairwise(offsets.tolist()):
        q, k, v = qkv[first:last].double().permute(1, 2, 0, 3)
        place = torch.arange(last - first, dtype=torch.float64)
        penalty = slopes[:, None, None].double() * (place[:, None] - place).abs()
        scores = q @ k.mT / q.shape[-1] ** 0.5 - penalty
        out[first:last] = (torch.softmax(scores, dim=-1) @ v).transpose(0, 1)
    return out


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("n_heads", "head_dim"), [(3, 64), (2, 4), (1, 24)])
@pytest.mark.parametrize("seqlens", [(1,), (1, 2, 31, 32, 33, 70), (64, 3), ()])
def test_dnabert_s_attention_equals_float64(n_heads, head_dim, seqlens):
    offsets = torch.tensor([0, *np.cumsum(seqlens)], dtype=torch.int32)
    qkv = torch.randn(int(offsets[-1]), 3, n_heads, head_dim)
    qkv[:, 0] *= 3  # some keys matter, most do not
    slopes = torch.tensor(alibi_slopes(n_heads))
    found = triton_kernels.attend_sequences(qkv, offsets, slopes, max(seqlens, default=0))
    expected = in_float64(qkv, offsets, slopes)
    # A score is a sum of head_dim products, and the penalty: it is off by (head_dim + 3) u of their
    # sizes at most. Its weight is off by as much of itself, and the result by twice that of the
    # largest value; the two sums over L keys add L u each.
    assert found.shape == expected.shape
    if seqlens:
        q, k, v = qkv.double().abs().unbind(1)
        products = (q.amax(dim=0) * k.amax(dim=0)).sum(dim=-1) / head_dim**0.5
        score = float(products.max()) + max(seqlens) * float(slopes.max())
        limit = 2 * ((head_dim + 3) * score + max(seqlens)) * U * float(v.max())
        assert limit < 1e-2
        assert ((found.double() - expected).abs() <= limit).all()
        wrong = triton_kernels.attend_sequences(qkv, offsets, slopes.flip(0), max(seqlens))
        is_alike = ((wrong.double() - expected).abs() <= limit).all()
        assert is_alike == (max(seqlens) == 1 or n_heads == 1), "slopes belong to heads"


# Attention in tiles


MIXED = (1, 2, 3, 20, 30, 52, 63, 64, 65, 130)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("head_dim", "seqlens", "kernel"),
    [
        *((head_dim, MIXED, attend_tiles_rotating) for head_dim in (16, 24, 64)),
        *((head_dim, (65, 20, 1, 2), attend_tiles_rotating) for head_dim in (20, 32)),
        (16, (300, *[50] * 3, 7, 7), attend_tiles_rotating),
        (24, (9, 1, 9), attend_tiles),
        (64, (1,), attend_tiles),
    ],
)
def test_attention_in_tiles_equals_float64(head_dim, seqlens, kernel):
    packed = PackedBatch.from_tokens(np.zeros(sum(seqlens), dtype=np.int64), np.array(seqlens))
    batch = RunLayout.from_batch(packed, rotary_frequencies(head_dim), has_tiles=True)
    qkv = torch.randn(sum(seqlens), 3, 2, head_dim).half()  # Triton interprets no bf16 product
    qkv[:, 0] *= 3  # some keys matter, most do not
    turned = qkv.clone()
    tables = batch.cos[:, None, None], batch.sin[:, None, None]
    turned[:, :2] = rotate(qkv[:, :2].float(), *tables).half()
    expected = in_float64(turned, batch.cu_seqlens, torch.zeros(2))
    found = kernel(qkv.clone(), batch)
    assert found.dtype == torch.float16
    # Rounding the weights to fp16, and then the result, each move it by 2^-11 of the largest value.
    # The sums in float32 add much less.
    limit = 2.1 * 2**-11 * float(qkv[:, 2].abs().max())
    assert ((found.double() - expected).abs() <= limit).all()
    without_mask = in_float64(turned, batch.cu_seqlens[[0, -1]], torch.zeros(2))
    is_alike = ((found.double() - without_mask).abs() <= limit).all()
    assert is_alike == (len(seqlens) == 1), "proteins do not attend to each other"


GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "dnabert_s"
# as of ``test_dnabert_s``
TOKEN = 2e-5
POOLED = 5e-6
INTERPRETED = {1, 2, 17, 33, 65}  # tokens of texts; longer ones take long


@pytest.mark.usefixtures("interpreted")
@pytest.mark.skipif(not GOLDEN.exists(), reason="the published code's values are not here")
def test_one_launch_equals_published_code(tmp_path):
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / name).symlink_to(GOLDEN / "tiny" / name)
    (tmp_path / "tokenizer.json").symlink_to(GOLDEN / "tokenizer.json")
    model, _ = load_dnabert(tmp_path, 3)
    model.kernel = attend_texts_triton
    stored = np.load(GOLDEN / "forward.npz")
    texts = [
        (stored["tokens"][a:b].astype(int).tolist(), stored["hidden"][a:b], pooled)
        for (a, b), pooled in zip(pairwise(stored["cu_seqlens"]), stored["pooled"], strict=True)
        if b - a in INTERPRETED
    ]
    assert len(texts) == len(INTERPRETED)
    batch, places = pack([tokens for tokens, _, _ in texts])
    with torch.inference_mode():
        hidden = model(torch.from_numpy(batch.tokens), batch)
        pooled = mean_pool(hidden, batch).numpy()
    for place, (tokens, expected, mean) in zip(places, texts, strict=True):
        first = batch.cu_seqlens[place]
        part = hidden[first : first + len(tokens)].numpy()
        assert np.abs(part - expected).max() < TOKEN
        assert np.abs(pooled[place] - mean).max() < POOLED


class Launches(TorchDispatchMode):
    """Counts the operators that a GPU would run as kernels, and our own launches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, _, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        returns = operator._schema.returns
        is_view = all(one.alias_info and not one.alias_info.is_write for one in returns)
        name = operator.overloadpacket.__name__
        if not is_view and not name.startswith(("empty", "new_empty")):
            self.names[name] += 1
        return out


class Recorder:
    """Stands for a compiled kernel, and counts its launches."""

    def __init__(self, launches: Launches, kernel: Any) -> None:
        self.launches = launches
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*_: object, **__: object) -> None:
            self.launches.names[self.kernel.__name__] += 1

        return launch


def launches_of(monkeypatch, kernel: dnabert_s.Kernel, seqlens: range) -> Counter[str]:
    """Return the launches in a batch of DNABERT-S, on tensors without numbers."""
    shape = dnabert_s.DNABERTShape(
        DNABERT_S.n_layers, DNABERT_S.dim, DNABERT_S.n_heads, inner=3072, n_words=4096
    )
    batch, _ = pack([[0] * seqlen for seqlen in seqlens])
    meta = torch.device("meta")
    with meta:
        model = dnabert_s.DNABERT(shape, shape.n_layers)
        tokens = torch.empty(len(batch.tokens), dtype=torch.int64)
    model.kernel = kernel
    with torch.inference_mode(), Launches() as launches:
        hand_kernels(monkeypatch, functools.partial(Recorder, launches))
        model(tokens, batch)
    return launches.names


def test_dnabert_s_one_launch_per_layer(monkeypatch):
    n_layers = DNABERT_S.n_layers
    by_runs = launches_of(monkeypatch, dnabert_s.attend_runs, range(60, 80))
    jagged = launches_of(monkeypatch, attend_texts_triton, range(60, 80))
    assert jagged["attend_sequence"] == n_layers
    assert not {name for name in jagged if "attention" in name}
    assert jagged == launches_of(monkeypatch, attend_texts_triton, range(60, 62))
    more = by_runs.total() - jagged.total()
    # each attention also launches a copy of its result, for 20 lengths in each layer
    assert more > 2 * 20 * n_layers - n_layers
