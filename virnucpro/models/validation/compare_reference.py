"""``models check``, and the trials in ``virnucpro devices``: find what works on a device.

``models check`` compares our encoder with its family's reference, with the same weights: fair-esm
for ESM-2, transformers for ESM C. Ours embeds a protein panel in the run's precision and in
batches, as a run does. The reference embeds it in float32, one protein at a time. The distance
between two vectors may be as large as the precision's roundings explain (``roundings``). The check
compares both the mean over the residues, which a run uses, and every residue: an error far from the
start of a protein, such as rotary angles in bf16, nearly vanishes in a mean.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch

from virnucpro.core.child_process import (
    ChildError,
    ChildProcess,
    Pipe,
    defer_interrupts,
    start_process,
)
from virnucpro.core.device_options import ComputeOptions
from virnucpro.core.errors import UnavailableError
from virnucpro.core.events import EventHandler, Progress
from virnucpro.core.logging import announce, printable
from virnucpro.core.model_outputs import HeadOutput, included_output, vector_name
from virnucpro.core.recipe import Alphabet, EncoderSpec, Footprint, Precision
from virnucpro.models import triton_kernels
from virnucpro.models.base import Encoder, Model, Rows, load_encoder
from virnucpro.models.device_choice import DeviceChoice, choose_precision, choose_tokens
from virnucpro.models.devices import choose_devices
from virnucpro.models.eight_bits import EIGHT_BITS, check_device
from virnucpro.models.lookup import open_model
from virnucpro.models.packing import PackedEncoder, use_device
from virnucpro.models.registry import find_family
from virnucpro.models.sample_proteins import SAMPLE_PROTEINS
from virnucpro.models.validation.compare_outputs import (
    CONTACT_LENGTHS,
    OutputDeviation,
    Outputs,
    ReferenceOutputs,
    Texts,
    add_masked,
    complete_spec,
    find_output_deviations,
    find_tolerances,
    include_spec,
    mask_each,
    masked_proteins,
    panel_spec,
)
from virnucpro.models.validation.roundings import Reference, largest_distance

# Our roundings differ from those behind the tolerance, but have the same size: the worst of thirty
# proteins is about as far off. In bf16, with 2, 6 and 12 layers, it was 0.8 to 1.1 times as far.
# Twice as far is allowed.
MARGIN = 2.0

Vectors = Mapping[str, Rows]  # by id: (n_residues, dim), or (1, dim) if pooled


@dataclass(frozen=True, slots=True)
class _Deviation:
    """A sequence's vector distances from the reference, relative to the vector length."""

    sequence: str  # id
    mean: float  # for the mean over its rows, L2
    row: float  # the largest over its rows, L2


@dataclass(frozen=True, slots=True)
class _Reference:
    """The reference's results, and the largest distances that roundings explain."""

    name: str
    rows: Vectors
    mean: float
    row: float
    tokens_per_second: float
    outputs: ReferenceOutputs
    tolerances: Mapping[str, float]  # by output


@dataclass(frozen=True, slots=True)
class _Check:
    """Our encoder on one device compared with the reference, worst sequence first."""

    spec: EncoderSpec
    oracle: _Reference
    device: str
    kernel: str
    deviations: list[_Deviation]
    tokens_per_second: float
    outputs: list[OutputDeviation]  # the worst one first

    def share(self, deviation: _Deviation) -> float:
        """Return a sequence's share of the explained distance. Above 1 is a failure."""
        oracle = self.oracle
        return max(deviation.mean / oracle.mean, deviation.row / oracle.row)

    @property
    def failures(self) -> list[_Deviation]:
        return [one for one in self.deviations if self.share(one) > 1]

    @property
    def output_failures(self) -> list[OutputDeviation]:
        return [one for one in self.outputs if one.share > 1]

    @property
    def has_failed(self) -> bool:
        return bool(self.failures or self.output_failures)

    def report_lines(self) -> list[str]:
        """Report distances, speeds and verdict as text."""
        spec = self.spec
        panel = make_panel(self.spec.reads)
        table = [
            f"{one.sequence:<14}{len(panel[one.sequence]):>7,}{one.mean:>10.1e}{one.row:>15.1e}"
            f"{self.share(one):>11.0%}"
            for one in self.deviations
        ]
        return [
            f"model: {printable(spec.model)}, layer {spec.layer}, {spec.pooling} pooling",
            f"oracle: {self.oracle.name} in float32, one sequence at a time, "
            f"{self.oracle.tokens_per_second:,.0f} tokens/s",
            "",
            "sequence      letters  mean, L2  worst row, L2  tolerance",
            *table,
            "",
            *self._output_lines(),
            "",
            f"virnucpro: {spec.precision} on {self.device}, {self.kernel}, "
            f"{self.tokens_per_second:,.0f} tokens/s",
            self.verdict(),
        ]

    def _output_lines(self) -> list[str]:
        """Report each kind of output as a line, with the worst of its layers."""
        worst: dict[str, OutputDeviation] = {}
        counts = Counter[str]()
        for one in self.outputs:
            kind = one.output.partition("_layer")[0]
            worst.setdefault(kind, one)
            counts[kind] += 1
        lines = [
            f"{kind:<24}{counts[kind]:>6}  {one.output:<24}{one.sequence:<14}"
            f"{one.distance:>10.1e}{one.share:>11.0%}"
            for kind, one in worst.items()
        ]
        return [
            "output                  arrays  worst array             sequence"
            "        distance  tolerance",
            *lines,
        ]

    def verdict(self) -> str:
        max_named = 3  # outputs in the verdict
        oracle = self.oracle
        worst = self.deviations[0]
        n = len(self.deviations)
        outcome = f"passed: all {n} sequences are within"
        if self.failures:
            outcome = f"failed: {len(self.failures)} of {n} sequences are beyond"
        if self.output_failures and not self.failures:
            names = ", ".join(one.output for one in self.output_failures[:max_named])
            outcome = f"failed: the outputs {names} are beyond"
        return (
            f"{outcome} what roundings in {self.spec.precision} explain with these weights "
            f"(mean {oracle.mean:.1e}, row {oracle.row:.1e}); worst {worst.sequence} "
            f"({self.share(worst):.0%} of the tolerance)"
        )


def check(model: str, options: ComputeOptions, on_event: EventHandler) -> list[_Check]:
    """Embed the panel with both programs, on every requested device.

    Raises:
        UsageError, UnavailableError: the model, the device or the precision is missing, the model
            belongs to another family, or a program does not run.
    """
    choice = choose_devices(options)
    is_emulated = options.precision == "fp8" and choice.kind == "cpu"
    precision = "fp8" if is_emulated else choose_precision(options.precision, choice)
    opened = open_model(model, on_event, options.hugging_face)
    return check_on(choice, opened, precision, on_event)


def check_on(
    choice: DeviceChoice, model: Model, precision: Precision, on_event: EventHandler
) -> list[_Check]:
    """Embed the panel on existing devices. Raises as ``check``."""
    precision = model.precision_on(choice.kind, precision)
    if not find_family(model.family).reference:
        raise UnavailableError(
            f"{printable(model.name)} cannot be checked: no other program computes the vectors of "
            f"the family {printable(model.family)}",
            hint="check another model; `predict` and `extract` take this one",
        )
    weights, digest = model.prepare(precision, on_event)
    spec = model.spec(sha256=digest, precision=precision)
    for description in choice.descriptions:
        announce(description)
    devices = tuple(dict.fromkeys(choice.devices))  # all CPU workers are one device
    n_tokens = choose_tokens(choice, model.footprint, precision)
    panel = Panel.for_model(model)
    oracle = _run_reference(spec, model, panel, devices[0], on_event)
    checks = []
    for device in devices:
        use_device(torch.device(device))
        stage = f"virnucpro, {precision}, {device}"
        with report_unavailable(f"virnucpro in {precision}", device):
            ours = _run_encoder(spec, model, weights, panel, n_tokens, device, stage, on_event)
            encoder = load_encoder(spec, weights, torch.device(device))
            embedded, rate = _embed(encoder, panel.usual, n_tokens, stage, on_event)
        rows = ours[_row_name(model)]
        (means,) = embedded.values()
        deviations = find_deviations(means, rows, oracle.rows)
        outputs = find_output_deviations(ours, oracle.outputs, oracle.tolerances, panel.texts)
        outcome = _Check(spec, oracle, device, encoder.kernel, deviations, rate, outputs)
        deviations.sort(key=outcome.share, reverse=True)
        checks.append(outcome)
    return checks


def _row_name(model: Model) -> str:
    """Name the output with the most rows for each sequence, after the last layer."""
    return vector_name(model.poolings[-1], model.n_layers)


@dataclass(frozen=True, slots=True)
class Panel:
    """The sequences that both programs read."""

    usual: Texts
    texts: Texts  # with one that has masks, if the model reads masks
    with_contacts: Texts  # not too long for the reference
    short: Texts  # for the pseudo-perplexity
    masked: Texts  # the short ones, with each residue masked in turn

    @classmethod
    def for_model(cls, model: Model) -> Panel:
        usual = make_panel(model.reads)
        has_masks = bool(model.includes)
        contacts = {name: text for name, text in usual.items() if len(text) in CONTACT_LENGTHS}
        return cls(
            usual=usual,
            texts=add_masked(usual) if has_masks else usual,
            with_contacts=contacts if "contacts" in model.includes else {},
            short={name: usual[name] for name in masked_proteins(usual)} if has_masks else {},
            masked=mask_each(usual) if "perplexity" in model.includes else {},
        )


def _run_encoder(
    spec: EncoderSpec,
    model: Model,
    weights: Path,
    panel: Panel,
    n_tokens: int,
    device: str,
    stage: str,
    on_event: EventHandler,
) -> Outputs:
    """Compute all outputs with our encoder, in batches as in a run."""
    here = torch.device(device)
    complete = complete_spec(spec, model)
    if complete.needs_head:
        weights, _ = model.prepare_heads(complete, weights)
    encoder = load_encoder(complete, weights, here)
    # The outputs of all layers are on the device at once.
    n_tokens = max(Footprint.min_tokens, n_tokens // model.n_layers)
    outputs, _ = _embed(encoder, panel.texts, n_tokens, f"{stage}, all outputs", on_event)
    if not panel.masked:
        return outputs
    encoder = load_encoder(include_spec(spec, model, "perplexity"), weights, here)
    masked, _ = _embed(encoder, panel.short, n_tokens, f"{stage}, perplexity", on_event)
    return {**masked, **outputs}


def _run_reference(
    spec: EncoderSpec, model: Model, panel: Panel, device: str, on_event: EventHandler
) -> _Reference:
    """Embed the panel with the reference.

    Raises:
        UnavailableError: the reference is missing, does not run here, or its numbers overflow the
            precision.
    """
    measured = _measure_reference(spec, model, panel, device, on_event)
    rows = {name: measured.exact.panel[_row_name(model)][name] for name in panel.usual}
    rounded = {name: measured.rounded.panel[_row_name(model)][name] for name in panel.usual}
    explained = find_deviations(_mean_vectors(rounded), rounded, rows)
    outputs = [output.name for output in complete_spec(spec, model).outputs]
    outputs += [HeadOutput.PERPLEXITY] if panel.masked else []
    distances = find_tolerances(measured.exact, measured.rounded, outputs, panel.texts)
    tolerances = {output: MARGIN * distance for output, distance in distances.items()}
    largest = MARGIN * max(one.row for one in explained)
    if not math.isfinite(max(largest, *tolerances.values())):
        raise UnavailableError(
            f"{spec.precision} cannot hold the numbers of {printable(model.name)}",
            hint="give --precision bf16 or fp32, here and in every run with this model",
        )
    return _Reference(
        name=measured.name,
        rows=rows,
        mean=MARGIN * max(one.mean for one in explained),
        row=largest,
        tokens_per_second=measured.tokens_per_second,
        outputs=measured.exact,
        tolerances=tolerances,
    )


class _Measured(NamedTuple):
    """The reference's outputs in float32, and with the roundings of the precision."""

    name: str
    exact: ReferenceOutputs
    rounded: ReferenceOutputs
    tokens_per_second: float


def _measure_reference(
    spec: EncoderSpec, model: Model, panel: Panel, device: str, on_event: EventHandler
) -> _Measured:
    """Compute all outputs with the reference, first in float32. Raises as ``_run_reference``."""
    precision = spec.precision
    exact_spec = panel_spec(replace(spec, precision="fp32"), model)
    if "contacts" in model.includes:  # so that their head is loaded
        contacts = included_output("contacts", model.n_tokens, spec.store)
        exact_spec = replace(exact_spec, extra=(*exact_spec.extra, contacts))
    with report_unavailable("the reference in float32", device):
        reference = _load_reference(exact_spec, model.path, device)
        name = reference.name
        encoder = reference.encoder
        longest = max(encoder.count_tokens([len(text)]) for text in panel.texts.values())
        stage = f"{name}, float32, {device}"
        exact, rate = _read_reference(reference, exact_spec, model, panel, stage, on_event)
        reference.add_roundings(precision, longest)
        stage = f"what {precision} rounds off, {device}"
        rounded, _ = _read_reference(reference, exact_spec, model, panel, stage, on_event)
    return _Measured(name, exact, rounded, rate)


def _read_reference(
    reference: Reference,
    spec: EncoderSpec,
    model: Model,
    panel: Panel,
    stage: str,
    on_event: EventHandler,
) -> tuple[ReferenceOutputs, float]:
    """Compute all outputs with the reference, one sequence at a time.

    Returns:
        The outputs, and the tokens per second of the panel without contacts.
    """
    encoder = reference.encoder
    plain = replace(spec, extra=tuple(o for o in spec.extra if o.kind != "pairwise"))
    outputs, rate = _embed(with_outputs(encoder, plain), panel.texts, 1, stage, on_event)
    contacts: Outputs = {}
    masked: Outputs = {}
    if panel.with_contacts:
        asked = include_spec(spec, model, "contacts")
        stage_of = f"{stage}, contacts"
        contacts, _ = _embed(
            with_outputs(encoder, asked), panel.with_contacts, 1, stage_of, on_event
        )
    if panel.masked:
        asked = include_spec(spec, model, "logits")
        masked, _ = _embed(
            with_outputs(encoder, asked), panel.masked, 1, f"{stage}, masks", on_event
        )
    return ReferenceOutputs(outputs, contacts, masked), rate


def with_outputs(encoder: Encoder, spec: EncoderSpec) -> Encoder:
    """Return a reference's encoder with other outputs."""
    return encoder.with_outputs(spec) if isinstance(encoder, PackedEncoder) else encoder


def _load_reference(spec: EncoderSpec, path: Path, device: str) -> Reference:
    """Load a family's reference."""
    use_device(torch.device(device))
    module = import_module(find_family(spec.family).reference)
    reference: Reference = module.load_reference(spec, path, torch.device(device))
    return reference


def _mean_vectors(residues: Vectors) -> Vectors:
    return {
        name: rows.mean(axis=0, keepdims=True, dtype=np.float64) for name, rows in residues.items()
    }


def _embed(
    encoder: Encoder, texts: Texts, tokens_per_batch: int, stage: str, on_event: EventHandler
) -> tuple[Outputs, float]:
    """Embed sequences. -> each output, and tokens per second without the first, short batch"""
    ids = list(texts)
    proteins = list(texts.values())
    lengths = np.array([len(protein) for protein in proteins])
    # one by one, without padding
    counts = [encoder.count_tokens([length]) for length in lengths.tolist()]
    outputs: dict[str, dict[str, Rows]] = {spec.name: {} for spec in encoder.spec.outputs}
    n_done = 0
    encoder.start([min(proteins, key=len)]).rows()  # loads everything that is loaded at first use
    started = time.perf_counter()
    for batch in encoder.plan(lengths.tolist(), tokens_per_batch):
        arrays = encoder.start([proteins[i] for i in batch]).outputs()
        for spec, rows in zip(encoder.spec.outputs, arrays, strict=True):
            n_rows = spec.count_rows(lengths[batch])
            parts = np.split(rows, np.cumsum(n_rows)[:-1])
            outputs[spec.name] |= {ids[i]: part for i, part in zip(batch, parts, strict=True)}
        n_done += sum(counts[i] for i in batch)
        on_event(Progress(stage, n_done, sum(counts), "tokens"))
    return outputs, n_done / (time.perf_counter() - started)


def find_deviations(means: Vectors, rows: Vectors, oracle: Vectors) -> list[_Deviation]:
    """Return distances of means and rows from the reference, by id."""
    deviations = []
    exact = _mean_vectors(oracle)
    for name in oracle:
        mean = largest_distance(means[name], exact[name])
        row = largest_distance(rows[name], oracle[name])
        deviations.append(_Deviation(name, mean, row))
    return deviations


@contextmanager
def report_unavailable(program: str, device: str) -> Iterator[None]:
    """Turn errors into one that names program, device and remedy.

    Raises:
        UnavailableError: the device lacks memory, or a kernel.
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


# Trials in ``virnucpro devices``: 8-bit products and our kernels. Each GPU is tried in a separate
# process, so that this one never starts CUDA.

_MAX_SECONDS = 60.0  # for all trials: kernels may have to be compiled


def try_gpus(devices: Iterable[str]) -> dict[str, dict[str, str]]:
    """Try GPUs, by their torch names. -> why each lacks fp8, int8 or one of our kernels

    The keys are "fp8", "int8" and the kernel names. The reason is empty if it works.
    """
    with defer_interrupts():
        children = {device: start_process(_try, device) for device in devices}
    try:
        end = time.monotonic() + _MAX_SECONDS
        return {device: _outcome(child, end) for device, child in children.items()}
    finally:
        for child in children.values():  # and the compilers that they started
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
        ChildProcess.kill_all(list(children.values()))


def _outcome(child: ChildProcess, end: float) -> dict[str, str]:
    reason = f"no answer within {_MAX_SECONDS:.0f} s"
    try:
        if child.pipe.poll(max(0.0, end - time.monotonic())):
            answer = child.pipe.recv()
            if not isinstance(answer, ChildError):
                return dict(answer)
            reason = answer.reason
    except (EOFError, OSError):
        reason = f"its process ended: {child.exit_reason(5)}"
    return dict.fromkeys((*EIGHT_BITS, *triton_kernels.KernelName), reason)


def _try(pipe: Pipe, name: str) -> None:
    os.setsid()  # so that all processes that it starts can be killed with it
    device = torch.device(name)
    use_device(device)
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    numbers = [torch.bfloat16 if has_bf16 else torch.float16, torch.float32]
    refusals = {}
    for precision, number in EIGHT_BITS.items():
        refusals[precision] = _why_unavailable(device, precision)
        if not refusals[precision]:
            numbers.append(number)
    for number in numbers:
        refusals.update(triton_kernels.unavailable_kernels(device, number))
    pipe.send(refusals)


def _why_unavailable(device: torch.device, precision: str) -> str:
    try:
        check_device(device, precision)
    except UnavailableError as error:
        return str(error)
    return ""


# The panel: the same proteins on every machine, with 1 to 1,022 residues, the longest in ESM-2's
# training. Only ``random.Random.random`` promises the same numbers in every Python version.


def make_panel(reads: Alphabet = Alphabet.PROTEIN) -> dict[str, str]:
    """Build proteins or bases by id: known, random, with odd letters, and in lower case."""
    every = 5  # every fifth letter in a usual sequence becomes an odd one
    lengths = (1, 2, 3, 5, 9, 16, 33, 50, 63, 64, 100, 128, 166, 167, 257, 400, 512, 777, 1022)
    if reads is Alphabet.PROTEIN:
        panel = dict(SAMPLE_PROTEINS)
        usual = "ACDEFGHIKLMNPQRSTVWY"
        odd = "XBZUOJ.-*"  # J and * have no token: they become <unk>
    else:
        panel = {}
        usual = "ACGT"
        odd = "NRU-"
    rng = Random(1)
    for length in lengths:
        letters = [usual[int(rng.random() * len(usual))] for _ in range(length)]
        panel[f"random_{length}"] = "".join(letters)
    base = panel.get("ubiquitin", panel["random_400"])
    for letter in odd:
        letters = list(base)
        letters[::every] = letter * len(letters[::every])
        panel[f"odd_{letter}"] = "".join(letters)
    panel["odd_all"] = 7 * odd
    panel[f"only_{odd[0]}"] = 40 * odd[0]
    panel["lower_case"] = base.lower()
    return panel
