"""Compile our Triton kernels for GPUs that this machine lacks, and count what they take.

Bytes are those that a kernel reads and writes for one token in one layer, each once. Keys and
values that several tiles read again come from the cache. Rotary tables are left out, because all
heads share them.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton

from virnucpro.models import triton_kernels, triton_tiles
from virnucpro.models.attention import TILE_ROWS
from virnucpro.models.checkpoint import LAYER_NORM_EPS
from virnucpro.models.esm2.config import ESM2Shape

_BYTES_OF_16_BITS = 2  # bytes
_BYTES_OF_32_BITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRow:
    """What a kernel takes on one kind of GPU."""

    kernel: str
    model: str
    capability: int  # 90: 9.0
    registers: int  # per thread
    spilled_bytes: int  # per thread
    shared_bytes: int  # per program
    threads: int  # per program
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class _Kernel:
    name: str
    function: Callable[..., None]
    pointers: Mapping[str, str]
    sizes: Mapping[str, Any]
    options: Mapping[str, Any]
    bytes_per_token: int


def count_resources(
    model: str, shape: ESM2Shape, capabilities: Sequence[int]
) -> Iterator[ResourceRow]:
    """Yield a row for each kernel of a run in bf16, and for each that no run uses."""
    for kernel in _kernels(shape):
        for capability in capabilities:
            compiled = compile_for(
                capability, kernel.function, kernel.pointers, kernel.sizes, kernel.options
            )
            used = read_resources(compiled.asm["cubin"])
            yield ResourceRow(
                kernel=kernel.name,
                model=model,
                capability=capability,
                registers=used["REG"],
                spilled_bytes=used["STACK"] + used["LOCAL"],
                shared_bytes=compiled.metadata.shared,
                threads=32 * compiled.metadata.num_warps,
                bytes_per_token=kernel.bytes_per_token,
            )


def _kernels(shape: ESM2Shape) -> Iterator[_Kernel]:
    dim = shape.dim
    tables = dict.fromkeys(("cos", "sin"), "*fp32")
    yield _Kernel(
        "rotation",
        triton_kernels.rotate_token,
        {"qkv": "*bf16", **tables},
        triton_kernels.sizes_to_rotate(shape.n_heads, shape.head_dim),
        triton_kernels.row_options(dim),
        2 * 2 * dim * _BYTES_OF_16_BITS,
    )
    norm = dict.fromkeys(("x", "weight", "bias", "total", "scales"), "*fp32")
    norm |= dict.fromkeys(("first", "second", "normed"), "*bf16")
    for name, n_added in (("residual + LayerNorm before MLP", 1), ("between layers", 2)):
        keeps_total = n_added == 2
        in_32_bits = 2 if keeps_total else 1
        yield _Kernel(
            name,
            triton_kernels.add_and_norm_token,
            norm,
            triton_kernels.sizes_to_norm(dim, n_added, LAYER_NORM_EPS, keeps_total=keeps_total),
            triton_kernels.row_options(dim),
            dim * (in_32_bits * _BYTES_OF_32_BITS + (n_added + 1) * _BYTES_OF_16_BITS),
        )
    integers = dict.fromkeys(("bounds", "starts"), "*i32")
    for name, rotates in (("attention in tiles", False), ("attention in tiles, rotation", True)):
        yield _Kernel(
            name,
            triton_tiles.attend_tile,
            {"qkv": "*bf16", "out": "*bf16", **integers, **tables},
            triton_tiles.sizes_to_attend_tiles(
                shape.n_heads, shape.head_dim, rotates=rotates, block=TILE_ROWS
            ),
            triton_kernels.OPTIONS_TO_ATTEND,
            4 * dim * _BYTES_OF_16_BITS,
        )


def compile_for(
    capability: int,
    kernel: Callable[..., None],
    pointers: Mapping[str, str],
    sizes: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:  # noqa: ANN401 - Triton's
    """Return what Triton makes of a kernel for a GPU that this machine may lack.

    Pointers are aligned to 16 bytes, as those of PyTorch tensors.
    """
    names = list(inspect.signature(kernel).parameters)
    assert set(names) == {*pointers, *sizes}
    source = triton.compiler.ASTSource(
        fn=triton.jit(kernel),
        signature={name: pointers.get(name, "constexpr") for name in names},
        constexprs=dict(sizes),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=dict(options))


def read_resources(cubin: bytes) -> dict[str, int]:
    """Return registers (REG) and bytes on the stack and in local memory (STACK, LOCAL).

    NVIDIA's cuobjdump reads the machine code. It comes with Triton.
    """
    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command: list[str | Path] = [reader, "--dump-resource-usage", file]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", report)}
