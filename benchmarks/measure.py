"""Measure a part of VirNucPro and print JSON lines: the command and machine, then each row at once.
This is for developers; users have ``virnucpro bench``.

    python benchmarks/measure.py full --models 650M   (NVIDIA GPU)
    python benchmarks/measure.py files --models 8M,35M
    python benchmarks/measure.py front-end --bases 90000000 --helpers 2
    python benchmarks/measure.py coordinator --workers 1,4,16,64
    python benchmarks/measure.py cluster --workers 1,4,16,64 --bases 30000000 --reads 100000000
    python benchmarks/measure.py peers --models 8M,35M
    python benchmarks/measure.py variants --models 650M,3B   (NVIDIA GPU with bf16)
    python benchmarks/measure.py eight-bits --models 8M,650M
    python benchmarks/measure.py kernels --models 8M,650M
    python benchmarks/measure.py tiles --input reads.fa contigs.fa
    python benchmarks/measure.py poison
    python benchmarks/measure.py simulated --input reads --devices 1,2 --helpers 2 --dilation 10
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from card import FullRow, fill_card
from cluster import ClusterRow, simulate_clusters
from coordinator import CoordinatorRow, time_coordinator
from eight_bits import EightBitRow, compare_smoothing
from file_to_file import FileRow, FileRun, time_extract
from front_end import FrontEndRow, measure_front_end
from peers import peer_ways
from poison import PoisonRow, measure_poison
from simulated import SimulatedRow, simulate
from tiles import TileRow, count_tiles
from timing import (
    PROFILES,
    Comparison,
    EncoderRow,
    Setting,
    compare_ways,
    layouts,
    our_ways,
    proteins_of,
)
from variants import WAYS, BudgetRow, KernelRow, compare_variants, profile_kernels, try_budgets

from virnucpro.core.device_options import ComputeOptions
from virnucpro.core.errors import VirnucproError
from virnucpro.core.machine import read_machine
from virnucpro.models.device_choice import choose_precision, choose_tokens
from virnucpro.models.devices import choose_devices
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.model_files import estimate_memory
from virnucpro.models.validation.bench import describe_versions, machine_facts
from virnucpro.models.validation.random_weights import MODELS, write_checkpoint

Row = (
    FullRow
    | FileRow
    | FrontEndRow
    | CoordinatorRow
    | ClusterRow
    | EncoderRow
    | PoisonRow
    | SimulatedRow
    | KernelRow
    | BudgetRow
    | TileRow
    | EightBitRow
)
_Device = Literal["auto", "cuda", "cpu", "mps"]
_N_BATCHES = {"cuda": 120, "cpu": 15}  # batches of a run, per process
_N_BATCHES_OF_VARIANTS = 3.9
_N_BATCHES_OF_FULL = 4


SHAPES = {**MODELS, "tiny": ESM2Shape(n_layers=2, dim=64, n_heads=4)}  # the last: to try a script


def setting_of(model: str, device: _Device, folder: Path = Path()) -> Setting:
    """The setting of a model on a device. The checkpoint need not exist."""
    choice = choose_devices(
        ComputeOptions(device=device, cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    )
    shape = SHAPES[model]
    return Setting(
        checkpoint=folder / f"{model}.pt",
        shape=shape,
        device=choice.devices[0],
        tokens_per_batch=choose_tokens(
            choice, estimate_memory(shape), choose_precision("auto", choice)
        ),
    )


@contextmanager
def made_up(model: str, device: _Device, seed: int) -> Iterator[Setting]:
    """Make a checkpoint with random weights for the ``with`` block."""
    with TemporaryDirectory(prefix="virnucpro-measure-") as folder:
        setting = setting_of(model, device, Path(folder))
        where = torch.device(setting.device)
        write_checkpoint(setting.checkpoint, setting.shape, seed, where)
        yield setting


def full(options: argparse.Namespace) -> Iterator[Row]:
    for model in options.models:
        with made_up(model, options.device, options.seed) as setting:
            n_tokens = options.tokens or _N_BATCHES_OF_FULL * setting.tokens_per_batch
            yield fill_card(setting, model, n_tokens, options.free)


def files(options: argparse.Namespace) -> Iterator[Row]:
    for model in options.models:
        with made_up(model, options.device, options.seed) as setting:
            n_processes = options.workers if setting.device == "cpu" else 1
            n_batches = _N_BATCHES["cpu" if setting.device == "cpu" else "cuda"] * n_processes
            n_tokens = options.tokens or n_batches * setting.tokens_per_batch
            yield time_extract(
                FileRun(
                    model=model,
                    profile=options.profile,
                    proteins=proteins_of(options.profile, n_tokens, options.seed),
                    setting=setting,
                    n_workers=options.workers,
                    cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
                )
            )


def variants(options: argparse.Namespace) -> Iterator[Row]:
    for model in options.models:
        setting = setting_of(model, options.device)
        n_tokens = options.tokens or _N_BATCHES_OF_VARIANTS * setting.tokens_per_batch
        proteins = proteins_of(options.profile, int(n_tokens), options.seed)
        rows = compare_variants(setting, options.profile, proteins, options.seconds, options.ways)
        yield from islice(rows, 2)  # float32, and the precision of a run
        for precision in ("bf16", "fp8"):
            yield profile_kernels(setting, model, options.profile, proteins, precision)
        yield from rows
        yield from try_budgets(setting, model, options.budgets)


def peers(options: argparse.Namespace) -> Iterator[Row]:
    for model in options.models:
        with made_up(model, options.device, options.seed) as setting:
            is_cpu = setting.device == "cpu"
            n_threads = read_machine({}).cores
            choice = choose_devices(ComputeOptions(device=options.device))
            n_tokens = options.tokens or _N_BATCHES_OF_VARIANTS * setting.tokens_per_batch
            comparison = Comparison(
                profile=options.profile,
                proteins=proteins_of(options.profile, int(n_tokens), options.seed),
                repeats=options.repeats,
                one_by_one=not is_cpu,
            )
            precisions = [choose_precision("auto", choice)]
            precisions += ["int8"] if choice.has_int8 else []
            ours = our_ways(precisions, setting)
            ways = [*peer_ways(setting, has_bf16=choice.has_bf16), *ours]
            with layouts(setting, n_threads, len(ways)) as places:
                yield from compare_ways(comparison, ways, places)


def eight_bits(options: argparse.Namespace) -> Iterator[Row]:
    for model in options.models:
        for outlier in options.outliers:
            yield from compare_smoothing(model, SHAPES[model], options.tokens, outlier)


def kernels(options: argparse.Namespace) -> Iterator[Row]:
    resources = importlib.import_module("kernel_resources")  # imports Triton
    for model in options.models:
        yield from resources.count_resources(model, SHAPES[model], options.capabilities)


def tiles(options: argparse.Namespace) -> Iterator[Row]:
    return count_tiles(options.input)


def front_end(options: argparse.Namespace) -> Iterator[Row]:
    return measure_front_end(options.bases, options.repeats, options.seed, options.helpers)


def coordinator(options: argparse.Namespace) -> Iterator[Row]:
    return map(time_coordinator, options.workers)


def cluster(options: argparse.Namespace) -> Iterator[Row]:
    return simulate_clusters(
        options.bases,
        options.reads,
        options.speed,
        options.workers,
        dim=options.dim,
        keep_vectors=options.keep_vectors,
    )


def poison(options: argparse.Namespace) -> Iterator[Row]:
    return measure_poison(options.proteins, options.poisoned, options.length, options.workers)


def simulated(options: argparse.Namespace) -> Iterator[Row]:
    rows = [
        SimulatedRow(
            input=options.input,
            n_bases=options.bases,
            n_devices=n_devices,
            n_helpers=options.helpers,
            speed=options.speed,
            dilation=options.dilation,
            dim=options.dim,
            tokens_per_batch=options.budget,
            keep_vectors=options.keep_vectors,
        )
        for n_devices in options.devices
    ]
    return simulate(options.input, options.bases, rows)


def model_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        raise argparse.ArgumentTypeError(f"unknown size of ESM-2: {', '.join(unknown)}")
    return names


def way_name(text: str) -> str:
    name = text.replace("-", " ")
    if name not in WAYS:
        raise argparse.ArgumentTypeError(f"unknown way: {text}")
    return name


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parts = parser.add_subparsers(required=True)
    model_commands = {"files": files, "peers": peers, "variants": variants, "full": full}
    for name, measure in model_commands.items():
        part = parts.add_parser(name)
        part.set_defaults(measure=measure)
        part.add_argument("--models", type=model_names, default=["8M"])
        part.add_argument("--profile", choices=PROFILES, default="six-frame-500")
        part.add_argument("--tokens", type=int, help="tokens of one run or pass")
        part.add_argument("--seed", type=int, default=1)
        part.add_argument("--device", choices=["auto", "cuda", "mps", "cpu"], default="auto")
        if measure is files:
            part.add_argument("--workers", type=int, default=read_machine({}).cores)
        elif measure is peers:
            part.add_argument("--repeats", type=int, default=5)
        elif measure is full:
            part.add_argument("--free", type=int, default=5 << 29, help="free bytes on the GPU")
        else:
            part.add_argument("--seconds", type=float, default=3.0, help="seconds per way")
            part.add_argument(
                "--budgets", type=numbers, default=[8192, 16384, 32768, 65536], help="tokens"
            )
            part.add_argument(
                "--ways",
                nargs="+",
                type=way_name,
                default=[],
                help="besides those of a run, with hyphens for spaces (all)",
            )
    part = parts.add_parser("front-end")
    part.set_defaults(measure=front_end)
    part.add_argument("--bases", type=int, default=4_000_000)
    part.add_argument("--repeats", type=int, default=5)
    part.add_argument("--helpers", type=int, default=0, help="also measure with helper processes")
    part.add_argument("--seed", type=int, default=1)
    part = parts.add_parser("eight-bits")
    part.set_defaults(measure=eight_bits)
    part.add_argument("--models", type=model_names, default=["8M"])
    part.add_argument("--tokens", type=int, default=700)
    part.add_argument("--outliers", type=numbers, default=[1, 32])
    part = parts.add_parser("kernels")
    part.set_defaults(measure=kernels)
    part.add_argument("--models", type=model_names, default=["8M", "650M"])
    part.add_argument("--capabilities", type=numbers, default=[80, 90, 100, 120], help="90: 9.0")
    part = parts.add_parser("tiles")
    part.set_defaults(measure=tiles)
    part.add_argument("--input", type=Path, nargs="+", required=True, help="FASTA files")
    part = parts.add_parser("coordinator")
    part.set_defaults(measure=coordinator)
    part.add_argument("--workers", type=numbers, default=[1, 4, 16, 64])
    part = parts.add_parser("cluster")
    part.set_defaults(measure=cluster)
    part.add_argument("--workers", type=numbers, default=[1, 4, 16, 64])
    part.add_argument("--bases", type=int, default=22_000_000, help="bases of reads to run here")
    part.add_argument("--reads", type=int, default=100_000_000, help="reads of the larger input")
    part.add_argument("--speed", type=float, default=100_000, help="tokens/s of a device")
    part.add_argument("--dim", type=int, default=1280, help="length of a vector")
    part.add_argument("--keep-vectors", action="store_true", help="write feature files")
    part = parts.add_parser("poison")
    part.set_defaults(measure=poison)
    part.add_argument("--proteins", type=int, default=10_000)
    part.add_argument("--poisoned", type=int, default=10, help="proteins that crash a worker")
    part.add_argument("--length", type=int, default=160, help="residues of each protein")
    part.add_argument("--workers", type=int, default=2)
    part = parts.add_parser("simulated")
    part.set_defaults(measure=simulated)
    part.add_argument("--input", choices=["contigs", "reads"], default="contigs")
    part.add_argument("--bases", type=int, default=15_000_000)
    part.add_argument("--devices", type=numbers, default=[1])
    part.add_argument("--speed", type=float, default=300_000, help="tokens/s of a device")
    part.add_argument("--dilation", type=float, default=1, help="how many times slower devices are")
    part.add_argument(
        "--helpers", type=int, default=0, help="processes that make shards and tables"
    )
    part.add_argument("--dim", type=int, default=1280, help="length of a vector")
    part.add_argument("--budget", type=int, default=32_768, help="tokens of a batch")
    part.add_argument("--keep-vectors", action="store_true", help="write feature files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    facts = {
        "command": shlex.join(["benchmarks/measure.py", *(arguments or sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine_facts(),  # with its load before the measurement
        "versions": describe_versions(),
    }
    _tell(facts)
    for row in options.measure(options):
        _tell(asdict(row))


def _tell(content: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()  # the process may be killed before the next row


if __name__ == "__main__":
    try:
        main()
    except VirnucproError as error:
        sys.exit(f"error: {error}")
