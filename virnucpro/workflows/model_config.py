"""Resolve the models of a run that embeds, with their devices, precision and batch size."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from virnucpro.core.errors import ResumeError, UnavailableError, UsageError
from virnucpro.core.events import EventHandler
from virnucpro.core.logging import printable
from virnucpro.core.machine import count_workers, read_machine
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import EncoderSpec, Footprint, Precision, join_footprints
from virnucpro.engine.base import Resources
from virnucpro.models.base import Model
from virnucpro.models.device_choice import DeviceChoice, choose_precision, choose_tokens
from virnucpro.models.devices import choose_devices
from virnucpro.models.lookup import find_published, open_default, open_model
from virnucpro.models.output_choice import OutputChoice, choose_outputs
from virnucpro.store.manifest import Manifest
from virnucpro.workflows.options import RunOptions


def open_models(
    options: RunOptions,
    names: Sequence[str],
    recorded: Manifest | None,
    on_event: EventHandler,
    *,
    is_default: bool,
    check_head: Callable[[Sequence[int]], None] = lambda _: None,
) -> tuple[Model, ...]:
    """Open a run's models, and download missing ones.

    Conditions that would make a download useless are rejected before it starts.

    Args:
        is_default: neither the options nor an earlier start named the model.
        check_head: raises an error if no head can read vectors with these dimensions.

    Raises:
        ResumeError: the run began with another model.
        UnavailableError: a model or a device is not on this machine.
        UsageError: the engine options are wrong.
    """
    published = [find_published(name, options.hugging_face) for name in names]
    missing = [model for model in published if model is not None and model.missing]
    for model in missing:
        _refuse_other_run(model.name, recorded)
    if missing:
        check_head([model.published.dim for model in published if model])
        footprint = join_footprints([model.footprint for model in missing])
        choice = _choose_devices(options, footprint)
        precision = _precision(options, _asked_precision(options, recorded), choice)
        _resources(options, choice, footprint, precision)
    if is_default:
        return (open_default(on_event, options.hugging_face),)
    return tuple(open_model(name, on_event, options.hugging_face) for name in names)


def _refuse_other_run(name: str, recorded: Manifest | None) -> None:
    """Reject a model that the recorded run does not use.

    Raises:
        ResumeError: the run began with another model.
    """
    if recorded is not None and name not in recorded.models:
        raise ResumeError(
            f"the run in this folder used {printable(recorded.recipe.reader)}, not {name}",
            hint=with_options(
                "use the old options, choose another {output_dir}, or start again with {force}"
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoders:
    """A run's prepared encoders, in order."""

    specs: tuple[EncoderSpec, ...]
    weights: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """A run's models, with their devices and precision."""

    models: tuple[Model, ...]
    choice: DeviceChoice
    precision: Precision
    resources: Resources
    compromises: tuple[str, ...]  # warnings about the costs of these choices

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        return tuple(model.path.resolve() for model in self.models)

    def announce(self, options: RunOptions, encoders: Encoders) -> tuple[str, ...]:
        """Describe the models and, if this machine embeds, its devices, one line each."""
        lines = [
            f"model {printable(model.name)}{_notice(model)}: {model.describe(spec)}"
            for model, spec in zip(self.models, encoders.specs, strict=True)
        ]
        if options.embeds_here:
            batches = f"batches of {self.resources.tokens_per_batch} tokens"
            lines += [*self.choice.descriptions, batches]
        return tuple(lines)


def _notice(model: Model) -> str:
    return f" ({model.notice})" if model.notice else ""


def resolve_engine(
    options: RunOptions, models: tuple[Model, ...], recorded: Manifest | None
) -> EngineConfig:
    """Choose the devices, the precision and the batch size for these models.

    Raises:
        UnavailableError, UsageError: a requested device or precision is not possible.
    """
    footprint = join_footprints([model.footprint for model in models])
    choice = _choose_devices(options, footprint)
    request = _asked_precision(options, recorded)
    precision = _precision(options, request, choice)
    is_auto = (request == "auto", options.esm_batch_size == "auto")
    return EngineConfig(
        models=models,
        choice=choice,
        precision=precision,
        resources=_resources(options, choice, footprint, precision),
        compromises=tuple(choice.mixed_gpu_warnings(footprint, precision, is_auto)),
    )


def prepare_encoders(
    options: RunOptions,
    engine: EngineConfig,
    choices: Sequence[OutputChoice],
    on_event: EventHandler,
) -> Encoders:
    """Prepare each model's weights, and specify how it turns sequences into vectors.

    Raises:
        UsageError: a model lacks a layer, a pooling or a head.
    """
    prepared = [model.prepare(engine.precision, on_event) for model in engine.models]
    kind = engine.choice.kind if options.embeds_here else "cuda"
    specs: list[EncoderSpec] = []
    paths: list[Path] = []
    for model, (weights, digest), choice in zip(engine.models, prepared, choices, strict=True):
        spec = model.spec(
            sha256=digest,
            precision=model.precision_on(kind, engine.precision),
            store=options.store,
            **choose_outputs(choice, model, options.store)._asdict(),
        )
        if spec.needs_head:
            weights, heads_digest = model.prepare_heads(spec, weights)
            spec = replace(spec, heads_sha256=heads_digest)
        specs.append(spec)
        paths.append(weights.resolve())
    return Encoders(specs=tuple(specs), weights=tuple(paths))


def _choose_devices(options: RunOptions, footprint: Footprint) -> DeviceChoice:
    """Choose the devices that embed. If other machines embed, use the CPU, so no GPU is needed."""
    if not options.embeds_here:
        options = replace(options, device="cpu", gpus=None, workers=1)
    return choose_devices(options, options.workers, footprint.weight_bytes("bf16"))


def _resources(
    options: RunOptions, choice: DeviceChoice, footprint: Footprint, precision: Precision
) -> Resources:
    """Choose batch size and helper count.

    Raises:
        UsageError: the batch size is not a number.
    """
    request = options.esm_batch_size
    if request != "auto" and not re.fullmatch("[1-9][0-9]{0,17}", request):
        raise UsageError(
            with_options(
                "{esm_batch_size} is {request}; it must be auto, or 1 token or more",
                request=f"{printable(request)!r}",
            ),
            hint="leave it out to size batches to the device",
            option="esm_batch_size",
        )
    machine = read_machine(options.slurm)
    is_auto = request == "auto"
    n_helpers = choice.count_helpers(machine.cores)
    if not options.embeds_here:  # no worker needs the cores
        n_helpers = count_workers(options.workers, 0, machine) - 1
    return Resources(
        devices=choice.devices,
        tokens_per_batch=choose_tokens(choice, footprint, precision) if is_auto else int(request),
        silence_seconds=options.worker_timeout,
        n_helpers=n_helpers,
        memory=machine.memory_total,
    )


def _precision(options: RunOptions, request: str, choice: DeviceChoice) -> Precision:
    """Choose the run precision for the local devices, unless other machines embed.

    Raises:
        UnavailableError: the devices do not support the requested precision.
        UsageError: other machines embed, and no precision was given.
    """
    is_for_gpus = options.no_embed or options.device != "cpu"
    if not options.embeds_here and is_for_gpus and request != "auto":
        return cast(Precision, request)
    if not (options.embeds_here or options.no_embed) and options.device != "cpu":
        raise UsageError(
            "the plan fixes the precision of the run, and other machines embed",
            hint=with_options(
                "add {precision:bf16} (GPUs from Ampere on, such as A100 or H100), "
                "{precision:fp16} (older ones), or {precision:fp32} (CPUs)"
            ),
            option="precision",
        )
    try:
        return choose_precision(request, choice)
    except UnavailableError as error:
        if request == options.precision:
            raise
        raise UnavailableError(  # the precision is recorded in the run, not an option of this start
            f"the run computes in {request}, and {choice.descriptions[0]} does not",
            hint=with_options(
                "use devices that do, or start again with {force} and another {precision}"
            ),
        ) from error


def _asked_precision(options: RunOptions, recorded: Manifest | None) -> str:
    """Return the requested precision. On resume, ``auto`` means the precision of the run.

    It determines the precisions of the encoders: see ``Model.precision_on``.
    """
    if options.precision != "auto" or recorded is None or not recorded.recipe.encoders:
        return options.precision
    precisions = {encoder.precision for encoder in recorded.recipe.encoders}
    if coarse := precisions & {"bf16", "fp16", "fp8", "int8"}:
        return min(coarse)
    return "bf16" if "bf16x2" in precisions else "fp32"
