"""The rotation in Triton compiles for every GPU, and turns as PyTorch does; no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from virnucpro.encoders.esm2 import rotary_triton
from virnucpro.encoders.esm2.attention import rotate
from virnucpro.encoders.esm2.checkpoint import ESM2Shape
from virnucpro.encoders.esm2.family import shape_of
from virnucpro.encoders.esm2.model import rotary_frequencies
from virnucpro.encoders.esm2.packing import PackedBatch, StagedBatch
from virnucpro.encoders.families import FAMILIES

triton = pytest.importorskip("triton", reason="Triton has no build for this system")

SHAPES = {name: shape_of(published) for name, published in FAMILIES["esm2"].published.items()}
# FlashAttention, which the rotation goes with, takes GPUs from 8.0 on; 7.5 has no bf16
GPUS = [
    *((75, number) for number in ("fp16", "fp32")),
    *((capability, number) for capability in (80, 90, 100, 120) for number in ("bf16", "fp16")),
]


def compile_for(capability: int, number: str, kernel: Any, shape: ESM2Shape) -> dict[str, Any]:
    """What Triton makes of a kernel, step by step, for a GPU that need not be here."""
    pointers = {"qkv": f"*{number}", "cos": "*fp32", "sin": "*fp32"}
    sizes = rotary_triton.sizes_of(shape.n_heads, shape.head_dim)
    names = ("n_pairs", "half", "row", "block")
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={**pointers, **dict.fromkeys(names, "constexpr")},
        constexprs=dict(zip(names, sizes, strict=True)),
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=rotary_triton.OPTIONS).asm


@pytest.mark.parametrize(("capability", "number"), GPUS)
def test_the_rotation_compiles_for_every_gpu_and_published_model(
    monkeypatch, tmp_path, capability, number
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = triton.jit(rotary_triton.rotate_token)
    for name, shape in SHAPES.items():
        steps = compile_for(capability, number, kernel, shape)
        assert f".target sm_{capability}" in steps["ptx"], name
        assert len(steps["cubin"]) > 1000, name


def annotated(qkv: Any, cos, sin, n_pairs, half, row, block):
    """A kernel that Triton's interpreter runs, and its compiler refuses."""


def test_the_reason_of_a_refusal_is_the_error_and_not_the_source_of_the_kernel(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(triton.CompilationError) as caught:
        compile_for(90, "bf16", triton.jit(annotated), SHAPES["esm2_t6_8M_UR50D"])
    reason = rotary_triton.reason_of(caught.value)
    assert reason.startswith('CompilationError: NameError("Cannot access global variable Any')
    assert reason.isprintable()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_refuses_the_rotation_with_a_reason():
    assert rotary_triton.why_refused(torch.device("cpu")).startswith("RuntimeError: ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_heads", "head_dim"), [(4, 16), (3, 24), (3, 32), (2, 64), (1, 128)])
def test_the_rotation_in_triton_turns_queries_and_keys_and_leaves_the_values(
    monkeypatch, n_heads, head_dim, dtype
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # on a CPU, as it stands
    monkeypatch.setattr(rotary_triton, "_KERNEL", triton.jit(rotary_triton.rotate_token))
    batch = StagedBatch.of(PackedBatch.of(["MKV", "MKXBUZO-J"]), rotary_frequencies(head_dim))
    qkv = torch.randn(len(batch.tokens), 3, n_heads, head_dim).to(dtype)
    before = qkv.clone()
    expected = rotate(
        qkv[:, :2].double(), batch.cos[:, None, None].double(), batch.sin[:, None, None].double()
    )
    rotary_triton.rotate_in_place(qkv, batch.cos, batch.sin)
    assert torch.equal(qkv[:, 2], before[:, 2])
    # each number is rounded once to 16 bits; where the sum of two products nearly cancels, what
    # float32 rounds off them is left
    eps, size = torch.finfo(dtype).eps, float(before[:, :2].abs().max())
    slack = 4 * torch.finfo(torch.float32).eps * size
    torch.testing.assert_close(qkv[:, :2].double(), expected, rtol=eps, atol=slack)
