"""Measure the memory of a training: on a GPU, by derivation, and in each process on this machine.

    python benchmarks/train_memory.py
    python benchmarks/train_memory.py vectors --ranks 1,2,4
    python benchmarks/train_memory.py fsdp --ranks 2,4 --shape 150M

Without an argument, two steps of ``virnucpro train`` (forward, backward, AdamW, bf16) run on
tensors without content, and the bytes alive at the peak are counted. Attention counts with its
scores in memory, which a GPU avoids, so the figures are upper bounds. CUDA's own memory, about half
a GiB, and the fragmentation of the allocator come on top.

``vectors`` trains a head on vectors in files, as with ``--features``, in processes on the CPU.
``fsdp`` divides an encoder over processes on the CPU, as with ``--fsdp``. Both print, for each
process, its own memory (USS), this with its part of shared memory (PSS), and the highest rise of
its memory: first as VirNucPro does it, then, for comparison, if each process holds everything. On
Linux, these include pages of mapped files, which the system may drop at any time.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from virnucpro.core.types import FastaRecord
from virnucpro.models.attention import attend_to_train
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.model import ESM2
from virnucpro.models.frame_networks import FrameNetwork
from virnucpro.models.packing import PackedBatch
from virnucpro.training.distributed import Ranks, run_on
from virnucpro.training.frame_dataset import FrameStore, balanced_weights, write_frames
from virnucpro.training.labelled_data import Labelled, LabelledRecord
from virnucpro.training.networks import Classifier, FrameClassifier, FrameLabels, add_adapters
from virnucpro.training.options import TrainOptions
from virnucpro.training.trainer import Trainer

SHAPES = {
    "35M": ESM2Shape(12, 480, 20),
    "150M": ESM2Shape(30, 640, 20),
    "650M": ESM2Shape(33, 1280, 20),
    "3B": ESM2Shape(36, 2560, 40),
}
# of chunks of 500 bases
N_FRAMES = 32
N_RESIDUES = 166
SIZE = 500
GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all living storages, and keeps the maximum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.see(tree_leaves(result))
        return result

    def see(self, values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage not in self._known:
                    self._known[storage] = n_bytes = storage.nbytes()
                    self.now += n_bytes
                    weakref.finalize(storage, self._forget, n_bytes)
        self.most = max(self.most, self.now)

    def _forget(self, n_bytes: int) -> None:
        self.now -= n_bytes


def peak_gib(shape: ESM2Shape, *, rank: int, forgets: bool) -> float:
    """The peak of the memory of a step with a batch of ``N_FRAMES``."""
    batch = PackedBatch.from_sequences(["M" * N_RESIDUES] * N_FRAMES)
    peak = Peak()
    with FakeTensorMode(allow_non_fake_inputs=True):
        encoder = ESM2(shape, shape.n_layers, torch.float32, attend_to_train)
        add_adapters(encoder, rank, None, None)
        if forgets:
            encoder.forget_activations()
        module = FrameClassifier(FrameNetwork(encoder, shape.dim), Classifier(shape.dim, 128, 0.3))
        optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad])
        peak.see(module.parameters())
        with peak:
            for _ in range(2):  # AdamW's moments exist from the second step on
                with torch.autocast("cpu", torch.bfloat16):
                    pooled = module.reader(batch)
                    loss = module.classifier(pooled, torch.zeros(N_FRAMES, 336)).float().sum()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return peak.most / GIB


def print_peaks() -> None:
    rows: list[tuple[str, ...]] = [("", "whole", "checkpointed", "LoRA 8", "checkpointed")]
    for name, shape in SHAPES.items():
        ways = [(rank, forgets) for rank in (0, 8) for forgets in (False, True)]
        peaks = (peak_gib(shape, rank=rank, forgets=forgets) for rank, forgets in ways)
        rows.append((name, *(f"{peak:.1f} GiB" for peak in peaks)))
    sys.stdout.writelines("".join(f"{cell:>14}" for cell in row) + "\n" for row in rows)


def make_vectors(folder: Path, n_frames: int, dim: int) -> None:
    """Write frames of records, half of them viral, and a file with a random vector for each."""
    write_frames(folder / "frames", _records(n_frames), [SIZE])
    n = len(FrameStore.open(folder / "frames").all)
    draws = np.random.default_rng(1)
    blocks = range(0, n, 1024)
    with (folder / "vectors").open("wb") as out:
        for first in blocks:
            draws.standard_normal((min(1024, n - first), dim), dtype=np.float32).tofile(out)
    files = {"dim": dim, "store": "float32", "files": [(str(folder / "vectors"), 0, n)]}
    (folder / "frames/vectors.json").write_text(json.dumps(files))
    np.save(folder / "frames/vector_rows.npy", np.arange(n))


def _records(n_frames: int) -> Iterator[Labelled]:
    """Yield records of one chunk without T or stops on either strand: all six frames are open."""
    draws = random.Random(1)
    for number in range(n_frames // 6):
        name = f"r{number}"
        is_virus = number % 2 == 0
        bases = "".join(draws.choices("ACG", k=SIZE))
        yield LabelledRecord(name, is_virus, f"g{number % 40}"), FastaRecord(name, name, bases)


def train_head(folder: Path, is_held: bool, ranks: Ranks) -> None:
    """Train a head on the vectors of all frames, as ``virnucpro train --features`` does."""
    begun = resident()
    out = folder / f"training_{is_held}_{ranks.world_size}"
    torch.set_num_threads(1)
    frames = FrameStore.open(folder / "frames").all
    if is_held:
        held = frames.vectors(np.arange(len(frames)))
        frames = replace(frames, all_vectors=held)
    classifier = Classifier(frames.dim, 128, 0.3)
    settings = TrainOptions(
        data=folder, output_dir=folder, precision="fp32", epochs=2, batch_size=128
    )
    module = FrameClassifier(FrameNetwork(None, 0), classifier)
    held_out = frames.select(np.arange(0, len(frames), 10))
    objective = FrameLabels(frames, held_out, balanced_weights)
    out.mkdir(exist_ok=True)
    Trainer(module, objective, settings, ranks, out).run()
    report(ranks, begun)


def cut_encoder(shape: ESM2Shape, is_held: bool, ranks: Ranks) -> None:
    """Divide an encoder over processes; first, one process holds it, or each process does."""
    begun = resident()
    torch.set_num_threads(1)
    with torch.device("cpu" if is_held or ranks.is_first else "meta"):
        encoder = ESM2.create(shape)
        encoder.forget_activations()
        module = FrameClassifier(FrameNetwork(encoder, shape.dim), Classifier(shape.dim, 128, 0.3))
    ranks.wrap(module, is_cut=True)
    report(ranks, begun)


def report(ranks: Ranks, begun: int) -> None:
    """Print the memory of all ranks while all of them are running."""
    ranks.wait()
    now = psutil.Process().memory_full_info()
    peak = resource.getrusage(resource.RUSAGE_SELF)
    rose = peak.ru_maxrss * KIB - begun
    found = ranks.gather((now.uss, now.pss, rose))
    if ranks.is_first:
        cells = (" ".join(f"{n / MIB:6,.0f}" for n in each) for each in zip(*found, strict=True))
        names = ("USS", "PSS", "peak of RSS above the start")
        sys.stdout.write("   ".join(map(" ".join, zip(names, cells, strict=True))) + "\n")


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def print_ranks(given: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        if given.what == "vectors":
            make_vectors(Path(folder), given.frames, given.dim)
            n_bytes = (Path(folder) / "vectors").stat().st_size
        else:
            n_bytes = 4 * SHAPES[given.shape].n_parameters
        sys.stdout.write(f"{given.what}: {n_bytes / MIB:,.0f} MiB; MiB of each process\n")
        for n_ranks in given.ranks.split(","):
            for way, is_held in (("as it is", ""), ("held whole", "held")):
                sys.stdout.write(f"{n_ranks} ranks, {way:<10}  ")
                sys.stdout.flush()
                words = [given.what, folder, given.shape, is_held, n_ranks]
                subprocess.run([sys.executable, __file__, "of", *words], check=True)


def run_ranks(what: str, folder: str, shape: str, held: str, n_ranks: str) -> None:
    work = partial(train_head, Path(folder), bool(held))
    if what == "fsdp":
        work = partial(cut_encoder, SHAPES[shape], bool(held))
    run_on(["cpu"] * int(n_ranks), work, lambda _: None)


def main() -> None:
    if sys.argv[1:2] == ["of"]:
        run_ranks(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=["vectors", "fsdp"])
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--frames", type=int, default=48_000)
    parser.add_argument("--dim", type=int, default=1280)
    parser.add_argument("--shape", choices=list(SHAPES), default="150M")
    given = parser.parse_args()
    print_ranks(given) if given.what else print_peaks()


if __name__ == "__main__":
    from train_memory import main  # other processes find functions by the name of their module

    main()
