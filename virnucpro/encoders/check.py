"""The story of ``models check``: our encoder beside fair-esm, with the same weights on this device.

Ours embeds the panel in the run's precision, in batches, as a run does. fair-esm embeds it in
float32, one protein at a time: it is the oracle. A vector may be as far from the oracle's as the
roundings of the precision explain, see ``rounding``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from virnucpro.config import EncoderSpec
from virnucpro.devices import choose_devices, choose_precision, choose_tokens
from virnucpro.encoders import fair_esm
from virnucpro.encoders.base import Encoder, Rows, load_encoder
from virnucpro.encoders.models import (
    Checkpoint,
    check_published,
    converted_folder,
    find_checkpoint,
    prepare_weights,
)
from virnucpro.encoders.panel import make_panel
from virnucpro.encoders.rounding import add_roundings
from virnucpro.errors import UnavailableError
from virnucpro.events import Progress, Telling
from virnucpro.log import announce, printable
from virnucpro.options import CheckOptions

# Our roundings are other ones than those that the tolerance is measured with, of the same size:
# the worst of some thirty vectors, of hundreds of numbers, is within twice the worst of these.
MARGIN = 2.0
_N_SHOWN = 3  # proteins named in the verdict

Vectors = Mapping[str, Rows]  # by the id of the protein
OnEvent = Callable[[Telling], None]


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far the vector of a protein is from the oracle's."""

    protein: str
    n_residues: int
    cosine: float  # distance: 1 - cos
    distance: float  # L2, relative to the length of the oracle's vector
    largest: float  # of a number of the vector, relative to their root mean square


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """What our encoder gave on one device; the worst protein first."""

    device: str
    kernel: str
    deviations: tuple[Deviation, ...]
    tokens_per_second: float

    @property
    def worst(self) -> Deviation:
        return self.deviations[0]


@dataclass(frozen=True, slots=True)
class Check:
    """A model, checked on each of the devices."""

    spec: EncoderSpec
    tolerance: float  # of ``Deviation.distance``
    tokens_per_second: float  # of fair-esm
    devices: tuple[DeviceCheck, ...]

    def failures(self, device: DeviceCheck) -> list[Deviation]:
        return [one for one in device.deviations if one.distance > self.tolerance]

    @property
    def has_passed(self) -> bool:
        return not any(map(self.failures, self.devices))


def check(options: CheckOptions, on_event: OnEvent) -> Check:
    """Embed the panel with both programs, on every device that is asked for.

    Raises:
        UsageError, UnavailableError: the check cannot be made: the model, the device or the
            precision is not there, or one of the programs does not run.
    """
    choice = choose_devices(
        options.device, options.gpus, None, options.cuda_visible_devices, model_bytes=0
    )
    precision = choose_precision(options.precision, choice)
    checkpoint = find_checkpoint(
        options.model, lambda n, total: on_event(Progress("fetching the model", n, total, "bytes"))
    )
    weights, digest = prepare_weights(
        checkpoint,
        precision,
        converted_folder(),
        lambda stage, done, total: on_event(Progress(stage, done, total, "bytes")),
    )
    check_published(options.model, checkpoint, digest)
    shape = checkpoint.shape
    spec = EncoderSpec(
        model=checkpoint.name,
        sha256=digest,
        layer=shape.n_layers,
        pooling="mean",
        precision=precision,
        dim=shape.dim,
    )
    for description in choice.descriptions:
        announce(description)
    devices = tuple(dict.fromkeys(choice.devices))  # the workers of a CPU are one device
    n_tokens = choose_tokens(choice, shape)
    oracle = _ask_oracle(spec, checkpoint, devices[0], on_event)
    checks = []
    for device in devices:
        with _told(f"virnucpro in {precision}", device):
            encoder = load_encoder(spec, weights, torch.device(device))
            vectors, rate = _embed(encoder, n_tokens, f"virnucpro, {precision}, {device}", on_event)
        deviations = compare(vectors, oracle.vectors)
        checks.append(DeviceCheck(device, encoder.kernel, deviations, rate))
    return Check(spec, oracle.tolerance, oracle.tokens_per_second, tuple(checks))


@dataclass(frozen=True, slots=True)
class _Oracle:
    vectors: Vectors
    tolerance: float
    tokens_per_second: float


def _ask_oracle(
    spec: EncoderSpec, checkpoint: Checkpoint, device: str, on_event: OnEvent
) -> _Oracle:
    """
    Raises:
        UnavailableError: fair-esm does not run here, or the precision does not hold its numbers.
    """
    spec, precision = replace(spec, family="fair-esm", precision="fp32"), spec.precision
    with _told("fair-esm in float32", device):
        encoder = fair_esm.load(spec, checkpoint.path, torch.device(device))
        vectors, rate = _embed(encoder, 1, f"fair-esm, float32, {device}", on_event)
        longest = max(map(encoder.count_tokens, ([len(text)] for text in make_panel().values())))
        add_roundings(encoder.model, precision, longest)
        rounded, _ = _embed(encoder, 1, f"what {precision} rounds off, {device}", on_event)
    explained = compare(rounded, vectors)[0].distance
    if not math.isfinite(explained):
        raise UnavailableError(
            f"{precision} cannot hold the numbers of {printable(checkpoint.name)}",
            hint="give --precision bf16 or fp32, here and in every run with this model",
        )
    return _Oracle(vectors, MARGIN * explained, rate)


def _embed(
    encoder: Encoder, tokens_per_batch: int, stage: str, on_event: OnEvent
) -> tuple[Vectors, float]:
    """The vectors of the panel, and tokens per second, without the first, short batch."""
    panel = make_panel()
    ids, proteins = list(panel), list(panel.values())
    lengths = [len(protein) for protein in proteins]
    n_tokens = _count_tokens(encoder, lengths)
    vectors: dict[str, Rows] = {}
    n_done = 0
    encoder.start([min(proteins, key=len)]).rows()  # what is loaded at first use
    started = time.perf_counter()
    for rows in encoder.plan(lengths, tokens_per_batch):
        batch = encoder.start([proteins[i] for i in rows]).rows()
        vectors |= {ids[i]: row for i, row in zip(rows, batch, strict=True)}
        n_done += _count_tokens(encoder, [lengths[i] for i in rows])
        on_event(Progress(stage, n_done, n_tokens, "tokens"))
    return vectors, n_tokens / (time.perf_counter() - started)


def _count_tokens(encoder: Encoder, lengths: Sequence[int]) -> int:
    """Without the padding between sequences."""
    return sum(encoder.count_tokens([length]) for length in lengths)


def compare(vectors: Vectors, oracle: Vectors) -> tuple[Deviation, ...]:
    """How far vectors are from the oracle's, by id; the worst first. What is no number is worst."""
    assert vectors.keys() == oracle.keys() == make_panel().keys()
    lengths = {name: len(protein) for name, protein in make_panel().items()}
    deviations = [
        _compare_one(name, lengths[name], vectors[name], oracle[name]) for name in vectors
    ]
    return tuple(sorted(deviations, key=lambda one: -one.distance))


def _compare_one(name: str, n_residues: int, vector: Rows, oracle: Rows) -> Deviation:
    a, b = vector.astype(np.float64), oracle.astype(np.float64)
    if not np.isfinite(a).all():
        return Deviation(name, n_residues, math.inf, math.inf, math.inf)
    length = np.linalg.norm(b)
    return Deviation(
        protein=name,
        n_residues=n_residues,
        cosine=max(0.0, float(1 - a @ b / (np.linalg.norm(a) * length))),
        distance=float(np.linalg.norm(a - b) / length),
        largest=float(np.abs(a - b).max() / (length / math.sqrt(len(b)))),
    )


@contextmanager
def _told(program: str, device: str) -> Iterator[None]:
    """
    Raises:
        UnavailableError: what was called has no room on the device, or no kernel for it.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UnavailableError(
            f"{program} does not fit into the memory of {device}: {printable(error)}",
            hint="free the GPU (`nvidia-smi` shows who uses it), or check with --device cpu",
        ) from error
    except (RuntimeError, ImportError) as error:
        raise UnavailableError(
            f"{program} does not run on {device}: {printable(error)}",
            hint="other kernels run with --precision fp32, another device with --device cpu; "
            "`virnucpro devices` shows what torch was built for",
        ) from error


def report_lines(check: Check) -> list[str]:
    """The distances, the verdict and the speeds, for people."""
    spec = check.spec
    lines = [
        f"model: {printable(spec.model)}, layer {spec.layer}, {spec.pooling} pooling",
        f"oracle: fair-esm in float32, one protein at a time, "
        f"{check.tokens_per_second:,.0f} tokens/s",
    ]
    for device in check.devices:
        lines += ["", f"{'protein':<14}residues   cosine distance   distance   largest deviation"]
        lines += [
            f"{one.protein:<14}{one.n_residues:>8,}{one.cosine:>18.1e}{one.distance:>11.1e}"
            f"{one.largest:>20.1e}"
            for one in device.deviations
        ]
        lines += [
            "",
            f"virnucpro: {spec.precision} on {device.device}, {device.kernel}, "
            f"{device.tokens_per_second:,.0f} tokens/s",
            verdict(check, device),
        ]
    return lines


def verdict(check: Check, device: DeviceCheck) -> str:
    """One line on one device."""
    limit = f"what roundings in {check.spec.precision} explain ({check.tolerance:.1e})"
    failures, n = check.failures(device), len(device.deviations)
    if failures:
        worst = ", ".join(f"{one.protein} ({one.distance:.1e})" for one in failures[:_N_SHOWN])
        return f"failed: {len(failures)} of {n} proteins are beyond {limit}; worst {worst}"
    worst = f"{device.worst.protein} ({device.worst.distance:.1e})"
    return f"passed: all {n} proteins are within {limit}; worst {worst}"
