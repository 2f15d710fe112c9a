"""Resolve options into a run that can start: models, devices, precision and batch size.

All checks that are possible happen here, before a file is read or a process started.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from virnucpro.core.errors import ResumeError, UnavailableError, UsageError
from virnucpro.core.events import EventHandler
from virnucpro.core.logging import printable
from virnucpro.core.machine import read_machine
from virnucpro.core.option_schema import convert_options
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import (
    USUAL_CHUNK_SIZE,
    EmbeddingRule,
    EncoderSpec,
    Footprint,
    InputType,
    Precision,
    Recipe,
    join_footprints,
)
from virnucpro.engine.base import Resources
from virnucpro.engine.options import EngineOptions, WorkOptions
from virnucpro.models.base import Model
from virnucpro.models.device_choice import DeviceChoice, choose_precision, choose_tokens
from virnucpro.models.devices import choose_devices, count_workers
from virnucpro.models.output_choice import OutputChoice, choose_outputs
from virnucpro.models.registry import DEFAULT_MODEL, current_name
from virnucpro.models.torch_build import require_torch
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.sequences.inputs import InputFile
from virnucpro.store.hdf5_check import check_connector
from virnucpro.store.manifest import Manifest
from virnucpro.store.merged_features import MAX_BYTES
from virnucpro.workflows.options import ExtractOptions, RunOptions, name_anywhere, restore_options


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One resolved ``predict`` or ``extract``.

    Complete and checked, except for what depends on the inputs.
    """

    options: RunOptions
    recipe: Recipe  # for nucleotides; see ``recipe_for``
    resources: Resources
    min_protein_length: int = 0  # residues
    checkpoints: tuple[Path, ...] = ()
    weights: tuple[Path, ...] = ()  # checkpoints, or converted ones, that workers load
    announcements: tuple[str, ...] = ()  # lines about the encoder choices
    compromises: tuple[str, ...] = ()  # warnings about the costs of these choices
    models: tuple[str, ...] = ()  # names or paths by which other machines open the encoders
    rules: Mapping[EmbeddingRule, int] = field(
        default_factory=lambda: {"all": 0}
    )  # see ``Manifest.embed``
    max_merged_bytes: int = MAX_BYTES  # see ``merged_features``

    @property
    def output(self) -> Path:
        return self.options.output_dir

    def recipe_for(self, input_type: InputType) -> Recipe:
        """Return the recipe for this input type. Proteins are neither cut nor translated."""
        if input_type == "nucleotide":
            return self.recipe
        return replace(
            self.recipe,
            input_type=input_type,
            chunk_size=0,
            genetic_code=11,
            min_length=max(self.options.min_length, self.min_protein_length),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractConfig(RunConfig):
    """One resolved ``extract``."""

    options: ExtractOptions


_Config = TypeVar("_Config", bound=RunConfig)


def resolve_extract(options: ExtractOptions, on_event: EventHandler) -> ExtractConfig:
    """Resolve everything that an extraction needs, or raise the first error.

    Raises:
        VirnucproError: see ``errors``.
    """
    from virnucpro.models.lookup import model_names

    recorded = read_recorded(options)
    check_inputs(options)
    named = name_model(options, recorded)
    assert named.model is not None, "an extraction has a model"
    names = model_names(named.model)
    is_default = takes_default(options, recorded)
    return _resolve_extract(named, names, recorded, on_event, is_default=is_default)


def resolve_extract_part(
    options: WorkOptions, stored: Mapping[str, Any], recorded: Manifest, on_event: EventHandler
) -> ExtractConfig:
    """Resolve everything that one part of a recorded extraction needs on this machine.

    Args:
        stored: ``run.json``, including the options that change the tables.

    Raises:
        UnavailableError, ResumeError: as ``match_recorded`` and ``restore_options``.
    """
    run_options = name_model(part_options(ExtractOptions, options, stored), recorded)
    config = _resolve_extract(run_options, recorded.models, recorded, on_event)
    return match_recorded(config, recorded)


def _resolve_extract(
    options: ExtractOptions,
    names: Sequence[str],
    recorded: Manifest | None,
    on_event: EventHandler,
    *,
    is_default: bool = False,
) -> ExtractConfig:
    require_torch()
    check_connector(options.hdf5_vol_connector)
    models = open_models(options, names, recorded, on_event, is_default=is_default)
    engine = resolve_engine(options, models, recorded)
    choice = OutputChoice(options.layers, options.pooling, options.include)
    encoders = prepare_encoders(options, engine, [choice] * len(models), on_event)
    if options.format == "pt" and any(spec.extra for spec in encoders.specs):
        raise UsageError(
            with_options("{format:pt} has one vector per sequence, and this run several outputs"),
            hint=with_options("use {format:npz} or {format:parquet}, or ask for one output"),
            option="format",
        )
    chunk_size = USUAL_CHUNK_SIZE if options.chunk_size is None else options.chunk_size
    return ExtractConfig(
        options=options,
        recipe=make_recipe(options, encoders.specs, chunk_size),
        resources=engine.resources,
        checkpoints=engine.checkpoints,
        weights=encoders.weights,
        announcements=engine.announce(options, encoders),
        compromises=engine.compromises,
        models=tuple(map(name_anywhere, names)),
        rules={"all": 0} if recorded is None else recorded.embed,
    )


# Steps that predict shares


def read_recorded(options: RunOptions) -> Manifest | None:
    """Read the run to resume, if any. Reject a folder that is not free.

    An existing folder is already locked, so nobody changes what is read here.

    Raises:
        OutputError, UsageError, ResumeError: as ``RunDir.check_free`` and ``read_manifest``.
    """
    run_dir = open_run_dir(options.output_dir)
    run_dir.check_free(resume=options.resume, force=options.force)
    return run_dir.read_manifest() if options.resume else None


def check_inputs(options: RunOptions) -> None:
    """Check that the inputs and the genetic code exist.

    Raises:
        InputError, InputMissingError, UsageError: one of them does not exist.
    """
    for path in options.input:
        InputFile.complete(path)
    GeneticCode.from_number(options.genetic_code)


_Options = TypeVar("_Options", bound=RunOptions)


def name_model(options: _Options, recorded: Manifest | None) -> _Options:
    """Set the model if the options leave it open. It stays None if nothing is embedded.

    A resumed run keeps its model. A new run takes the default if its options require a model.

    Raises:
        ResumeError: as ``_recorded_bundle``.
    """
    if options.model is not None:
        return replace(options, model=current_name(options.model))
    if recorded is not None and recorded.recipe.encoders:
        models = recorded.models
        name = models[0] if len(models) == 1 else _recorded_bundle(options.output_dir)
        return replace(options, model=name)
    return replace(options, model=DEFAULT_MODEL if options.asks_for_vectors else None)


def takes_default(options: RunOptions, recorded: Manifest | None) -> bool:
    """Return True if neither the options nor an earlier start named the model."""
    has_model = recorded is not None and bool(recorded.recipe.encoders)
    return options.model is None and not has_model


def _recorded_bundle(output_dir: Path) -> str:
    """Return the recorded bundle's name. Models do not identify it: two bundles share them.

    Raises:
        ResumeError: ``run.json`` lacks the name.
    """
    model = open_run_dir(output_dir).read_facts().get("tables", {}).get("model")
    if not isinstance(model, str):
        raise ResumeError(
            f"{printable(output_dir)}: run.json does not name the model of the run",
            hint=with_options("name it with {model}"),
        )
    return model


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
    from virnucpro.models.lookup import find_published, open_default, open_model

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


def make_recipe(
    options: RunOptions,
    encoders: tuple[EncoderSpec, ...],
    chunk_size: int,
    shortest: int = 0,
    hashes: Mapping[str, str] | None = None,
) -> Recipe:
    """Build the recipe for nucleotides.

    Args:
        shortest: bases of the shortest record that the classifier can read.
        hashes: field name -> SHA-256 of the head and the scorer.
    """
    return convert_options(  # recipe fields have the names of their options
        options,
        Recipe,
        input_type="nucleotide",
        chunk_size=chunk_size,
        min_length=max(options.min_length, shortest),
        encoders=encoders,
        **(hashes or {}),
    )


def part_options(kind: type[_Options], options: WorkOptions, stored: Mapping[str, Any]) -> _Options:
    """Combine a recorded run's options with the engine options from ``work``.

    Raises:
        ResumeError: ``run.json`` lacks the options.
    """
    engine_options = {item.name: getattr(options, item.name) for item in fields(EngineOptions)}
    return replace(restore_options(kind, options.folder, stored), **engine_options)


def match_recorded(config: _Config, recorded: Manifest) -> _Config:
    """Return the configuration with the recorded recipe.

    Raises:
        UnavailableError: the model, head or scorer of the run is not on this machine.
    """
    from virnucpro.store.recipe_changes import list_changed_files

    if changes := list_changed_files(recorded, config.recipe):
        raise UnavailableError(
            f"this machine has other files than the run: {'; '.join(changes)}",
            hint="use the version of VirNucPro, the model and the head that the run was planned "
            "with",
        )
    return replace(config, recipe=recorded.recipe)


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
    if not options.embeds_here and is_for_gpus and request in ("bf16", "fp16", "fp32", "fp8"):
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
    if coarse := precisions & {"bf16", "fp16", "fp8"}:
        return min(coarse)
    return "bf16" if "bf16x2" in precisions else "fp32"
