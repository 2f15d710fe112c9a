"""Encoders with one small fault each, as families with ``load``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from virnucpro.models.attention import Kernel, RunLayout
from virnucpro.models.base import Pending
from virnucpro.models.packing import PackedBatch
from virnucpro.models.pooling import Pool, bos_pool
from virnucpro.models.registry import FAMILIES
from virnucpro.models.transformer_encoder import TransformerEncoder

Fault = Callable[[Any], None]


@contextmanager
def crooked(fault: Fault, family: str = "esm2") -> Iterator[None]:
    """Give the fault to every encoder of the family that is loaded in this block."""
    before = FAMILIES[family]

    def load(*arguments: object) -> object:
        encoder = before.implementation.load(*arguments)
        fault(encoder)
        return encoder

    sys.modules["crooked_encoder"] = SimpleNamespace(
        load=load, inspect=before.implementation.inspect
    )
    FAMILIES[family] = replace(before, module="crooked_encoder")
    try:
        yield
    finally:
        FAMILIES[family] = before
        del sys.modules["crooked_encoder"]


def scale_a_norm(encoder: TransformerEncoder) -> None:
    encoder.model.layers[0].mlp_norm.weight.mul_(1.0001)


def scale_a_norm_much(encoder: TransformerEncoder) -> None:
    encoder.model.layers[0].mlp_norm.weight.mul_(1.1)


def scale_rotary(encoder: TransformerEncoder) -> None:
    encoder.model.inv_freq.mul_(1.0001)


def round_rotary(encoder: TransformerEncoder) -> None:
    encoder.model.inv_freq.copy_(encoder.model.inv_freq.bfloat16())


def change_a_weight(encoder: TransformerEncoder) -> None:
    down = encoder.model.layers[-1].down
    weight = down.weight.to_dense() if down.weight.is_mkldnn else down.weight.clone()
    weight[3].mul_(1.001)
    down.weight = torch.nn.Parameter(weight, requires_grad=False)


def forget_the_last_norm(encoder: TransformerEncoder) -> None:
    encoder.model.final_norm = torch.nn.Identity()


def take_an_earlier_layer(encoder: TransformerEncoder) -> None:
    iter_states = encoder.model.iter_states
    last = len(encoder.model.layers)

    def iter_earlier(
        batch: RunLayout, numbers: set[int], attend: Kernel
    ) -> Iterator[tuple[int, torch.Tensor]]:
        earlier = None
        for number, hidden in iter_states(batch, {*numbers, last - 1}, attend):
            if number in numbers:
                yield number, earlier if number == last else hidden
            earlier = hidden

    encoder.model.iter_states = iter_earlier


def scale_lm_head(encoder: TransformerEncoder) -> None:
    if encoder.outputs.heads is not None:
        encoder.outputs.heads.lm.norm.weight.mul_(1.001)


def scale_contact_head(encoder: TransformerEncoder) -> None:
    if encoder.outputs.heads is not None and encoder.outputs.heads.contacts is not None:
        encoder.outputs.heads.contacts.weight.mul_(1.01)


def pool_first(encoder: TransformerEncoder, pool: Pool) -> None:
    """Pool the first output in another way, if it is a mean."""
    if encoder.spec.pooling == "mean":
        encoder.outputs.pools[encoder.spec.layer][encoder.outputs.names[0]] = pool


def pool_the_start(encoder: TransformerEncoder) -> None:
    pool_first(encoder, bos_pool)


def pool_all_tokens(encoder: TransformerEncoder) -> None:
    def pool(hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        sequences = hidden.split((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).tolist())
        return torch.stack([tokens.mean(dim=0) for tokens in sequences])

    pool_first(encoder, pool)


def read_j_as_leucine(encoder: TransformerEncoder) -> None:
    start = encoder.start
    encoder.start = lambda proteins: start([text.replace("J", "L") for text in proteins])


def exchange_two_rows(encoder: TransformerEncoder) -> None:
    def start(proteins: Sequence[str]) -> Pending:
        outputs = TransformerEncoder.start(encoder, proteins).outputs()
        for rows in outputs:
            rows[:2] = rows[1::-1] if len(rows) > 1 else rows[:2]
        return Pending(lambda: outputs[0], lambda: outputs[1:])

    encoder.start = start


def give_nan(encoder: TransformerEncoder) -> None:
    encoder.model.layers[0].down.bias[0] = torch.nan


def have_no_kernel(encoder: TransformerEncoder) -> None:
    def attend(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel image is available for execution on the device")

    encoder.model.attend = attend


def have_no_room(encoder: TransformerEncoder) -> None:
    def attend(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    encoder.model.attend = attend


def take_bf16_angles(encoder: TransformerEncoder) -> None:
    iter_states = encoder.model.iter_states

    def iter_turned(
        batch: RunLayout, numbers: set[int], attend: Kernel
    ) -> Iterator[tuple[int, torch.Tensor]]:
        starts = batch.cu_seqlens[:-1].repeat_interleave(batch.cu_seqlens.diff())
        positions = (torch.arange(len(batch.tokens)) - starts).bfloat16()
        angles = positions[:, None] * encoder.model.inv_freq.bfloat16()
        turned = replace(batch, cos=angles.cos().float().repeat(1, 2), sin=angles.sin().float())
        yield from iter_states(turned, numbers, attend)

    encoder.model.iter_states = iter_turned
