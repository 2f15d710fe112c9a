"""Tokens per second of the encoder on one device, beside fair-esm's own extract loop.

Measured is what turns proteins in memory into one mean vector each, with the same synthetic
weights and proteins in turn: fair-esm 2.0.0 as its extract script runs it (float32, sorted by
length, batches of 4,096 tokens), and this package in each precision. Tokens are residues and two
more per protein; padding does not count. Median of the repeats after one warm-up: CPU seconds of
one core, or seconds on the clock of a GPU. The error is the largest relative L2 distance of a
vector from fair-esm's.

    python benchmarks/encoder.py --json benchmarks/results/encoder_0.1.0.json
    python benchmarks/encoder.py --device cuda --models 650M,3B --proteins 20000
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import esm
import numpy as np
import torch

from virnucpro import __version__
from virnucpro.esm2.model import ESM2, ESM2Shape, mean_pool
from virnucpro.esm2.packing import EXTRA_TOKENS, PackedBatch, plan_batches
from virnucpro.esm2.weights import load_esm2

SHAPES = {
    "8M": ESM2Shape(6, 320, 20),
    "35M": ESM2Shape(12, 480, 20),
    "150M": ESM2Shape(30, 640, 20),
    "650M": ESM2Shape(33, 1280, 20),
    "3B": ESM2Shape(36, 2560, 40),
}
PRECISIONS = {
    "cpu": {"fp32": torch.float32, "bf16": torch.bfloat16},
    "cuda": {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16},
}
FAIR_TOKENS = 4096
Embed = Callable[[list[str]], torch.Tensor]


def random_proteins(n: int, seed: int) -> list[str]:
    """Proteins of 50 to 166 residues: stop-free frames of chunks of 150 to 500 bases."""
    rng = np.random.default_rng(seed)
    return [
        "".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), length))
        for length in rng.integers(50, 167, n)
    ]


def our_tokens(device: str, shape: ESM2Shape) -> int:
    """The budget that a run would choose on a large GPU, or on a CPU."""
    return 32_768 * 1280 // shape.dim if device == "cuda" else 2048


def seconds_of(device: str, work: Callable[[], object]) -> float:
    """CPU seconds of this process, or seconds until the GPU has done it all."""
    if device == "cpu":
        started = time.process_time()
        work()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def fair_esm_loop(model: esm.ESM2, shape: ESM2Shape, device: str) -> Embed:
    """fair-esm's way: sort, pad, convert, run, average sequence by sequence."""
    convert = model.alphabet.get_batch_converter()

    def embed(proteins: list[str]) -> torch.Tensor:
        data = esm.FastaBatchedDataset([str(i) for i in range(len(proteins))], proteins)
        vectors = torch.empty(len(proteins), shape.dim)
        with torch.no_grad():
            for batch in data.get_batch_indices(FAIR_TOKENS, extra_toks_per_seq=1):
                _, texts, tokens = convert([data[i] for i in batch])
                out = model(tokens.to(device), repr_layers=[shape.n_layers], return_contacts=False)
                hidden = out["representations"][shape.n_layers]
                for row, (i, text) in enumerate(zip(batch, texts, strict=True)):
                    vectors[i] = hidden[row, 1 : len(text) + 1].mean(0).clone().cpu()
        return vectors

    return embed


def our_way(model: ESM2, shape: ESM2Shape, device: str) -> Embed:
    def embed(proteins: list[str]) -> torch.Tensor:
        vectors = torch.empty(len(proteins), shape.dim)
        for rows in plan_batches([len(p) for p in proteins], our_tokens(device, shape)):
            batch = PackedBatch.of([proteins[i] for i in rows])
            vectors[rows] = mean_pool(model(batch), batch).cpu()
        return vectors

    return embed


def make_ways(shape: ESM2Shape, seed: int, device: str) -> dict[str, Embed]:
    """The same random weights in fair-esm's model and in ours."""
    torch.manual_seed(seed)
    reference = esm.ESM2(shape.n_layers, shape.dim, shape.n_heads).eval()
    ways = {"fair-esm fp32": fair_esm_loop(reference.to(device), shape, device)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        torch.save({"model": reference.state_dict()}, path)
        for name, dtype in PRECISIONS[device].items():
            model = load_esm2(path, shape.n_layers, dtype, torch.device(device))
            ways[f"virnucpro {name}"] = our_way(model, shape, device)
    return ways


def measure(
    size: str, proteins: list[str], repeats: int, seed: int, device: str
) -> list[dict[str, object]]:
    """One row per way: figures, every repeat, and the ratio to the first."""
    shape = SHAPES[size]
    n_tokens = sum(len(protein) + EXTRA_TOKENS for protein in proteins)
    ways = make_ways(shape, seed, device)
    vectors = {name: embed(proteins) for name, embed in ways.items()}  # the warm-up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, embed in ways.items():
            seconds[name].append(seconds_of(device, partial(embed, proteins)))
    first = next(iter(ways))
    reference = vectors[first]
    rows: list[dict[str, object]] = []
    for name, taken in seconds.items():
        distance = (vectors[name] - reference).norm(dim=1) / reference.norm(dim=1)
        rows.append(
            {
                "model": size,
                "way": name,
                "tokens_per_second": round(n_tokens / statistics.median(taken)),
                "ratio": round(statistics.median(seconds[first]) / statistics.median(taken), 2),
                "largest_error": float(distance.max()),
                "seconds": [round(value, 3) for value in taken],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=list(PRECISIONS), default="cpu")
    parser.add_argument("--models", default="8M,35M")
    parser.add_argument("--proteins", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    proteins = random_proteins(given.proteins, given.seed)
    rows = []
    for size in given.models.split(","):
        for row in measure(size, proteins, given.repeats, given.seed, given.device):
            rows.append(row)
            print(
                f"{row['model']:<4} {row['way']:<15} {row['tokens_per_second']:>8,} tok/s  "
                f"{row['ratio']:>5} x  error {row['largest_error']:.1e}"
            )
    if given.json:
        facts = {
            "command": "python " + " ".join(sys.argv),
            "date": time.strftime("%Y-%m-%d"),
            "machine": _device_name(given.device),
            "versions": {
                "virnucpro": __version__,
                "torch": torch.__version__,
                "fair-esm": "2.0.0",
                "python": platform.python_version(),
            },
            "seed": given.seed,
            "proteins": given.proteins,
            "rows": rows,
        }
        given.json.write_text(json.dumps(facts, indent=2) + "\n")


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {_cpu_name()}, one core"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "?")


if __name__ == "__main__":
    main()
