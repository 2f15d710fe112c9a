"""The memory that a training takes on one GPU, counted on tensors without content.

Two steps of ``virnucpro train`` (forward, backward, AdamW, bf16) run on fake tensors, and what is
alive at the peak is counted. Attention is counted with its scores written out,
which a GPU does not do: the figures are upper bounds. What CUDA itself takes, about half a GiB, and
what the allocator cannot use come on top.

    python benchmarks/train_memory.py
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from virnucpro.encoders.esm2.attention import attend_to_train
from virnucpro.encoders.esm2.checkpoint import ESM2Shape
from virnucpro.encoders.esm2.model import ESM2
from virnucpro.encoders.esm2.packing import PackedBatch
from virnucpro.encoders.readers import MeanReader
from virnucpro.learning.training.networks import (
    Classifier,
    FrameClassifier,
    adapt,
    forget_activations,
)

SHAPES = {
    "35M": ESM2Shape(12, 480, 20),
    "150M": ESM2Shape(30, 640, 20),
    "650M": ESM2Shape(33, 1280, 20),
    "3B": ESM2Shape(36, 2560, 40),
}
N_FRAMES, N_RESIDUES = 32, 166  # of chunks of 500 bases
GIB = 1 << 30


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are alive, and keeps the most."""

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
    """The peak of one step with a batch of ``N_FRAMES``."""
    batch = PackedBatch.of(["M" * N_RESIDUES] * N_FRAMES)
    peak = Peak()
    with FakeTensorMode(allow_non_fake_inputs=True):
        encoder = ESM2(shape, shape.n_layers, torch.float32, attend_to_train)
        adapt(encoder, rank, None, None)
        if forgets:
            forget_activations(encoder)
        module = FrameClassifier(MeanReader(encoder, shape.dim), Classifier(shape.dim, 128, 0.3))
        optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad])
        peak.see(module.parameters())
        with peak:
            for _ in range(2):  # the moments are there from the second step on
                with torch.autocast("cpu", torch.bfloat16):
                    pooled = module.reader(batch)
                    loss = module.classifier(pooled, torch.zeros(N_FRAMES, 336)).float().sum()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return peak.most / GIB


def main() -> None:
    rows: list[tuple[str, ...]] = [("", "whole", "checkpointed", "LoRA 8", "checkpointed")]
    for name, shape in SHAPES.items():
        ways = [(rank, forgets) for rank in (0, 8) for forgets in (False, True)]
        peaks = (peak_gib(shape, rank=rank, forgets=forgets) for rank, forgets in ways)
        rows.append((name, *(f"{peak:.1f} GiB" for peak in peaks)))
    sys.stdout.writelines("".join(f"{cell:>14}" for cell in row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
