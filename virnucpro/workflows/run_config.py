"""Resolve options into a run that can begin: model, head, devices, precision, budget.

Everything that can be checked is checked here, before a file is read or a process started.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast, get_args

from virnucpro.core.atomic_io import HEAD_FILE, REGIONS_FILE
from virnucpro.core.errors import (
    InputMissingError,
    ResumeError,
    UnavailableError,
    UsageError,
)
from virnucpro.core.events import OnEvent
from virnucpro.core.logging import counted, printable
from virnucpro.core.option_schema import carry
from virnucpro.core.recipe import (
    Embed,
    EncoderSpec,
    Footprint,
    InputType,
    Precision,
    Reads,
    Recipe,
    join_footprints,
)
from virnucpro.engine.base import Resources
from virnucpro.engine.options import EngineOptions, WorkOptions
from virnucpro.models.base import Model
from virnucpro.models.devices import (
    Choice,
    choose_devices,
    choose_precision,
    choose_tokens,
    count_workers,
    require_torch,
    usable_cores,
)
from virnucpro.models.registry import EMBEDDED
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.translate import GeneticCode
from virnucpro.store.manifest import Manifest
from virnucpro.viral.classifier import Caller, caller_of
from virnucpro.viral.head import EncoderFacts, Head
from virnucpro.viral.options import CutOptions
from virnucpro.workflows.options import (
    ExtractOptions,
    PredictOptions,
    RunOptions,
    name_anywhere,
    options_of_tables,
)
from virnucpro.workflows.rethreshold import lost_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One ``predict`` or ``extract``: its options and what they resolve to.

    Complete and checked, except for what depends on the inputs.
    """

    options: RunOptions
    caller: Caller
    recipe: Recipe  # of nucleotides; see ``recipe_for``
    resources: Resources
    checkpoints: tuple[Path, ...] = ()
    weights: tuple[Path, ...] = ()  # checkpoints, or their converted forms, for the workers to load
    announcements: tuple[str, ...] = ()  # lines about the choices for the encoder
    compromises: tuple[str, ...] = ()  # warnings about the costs of these choices
    models: tuple[str, ...] = ()  # names or paths by which other machines open the encoders
    rules: Mapping[Embed, int] = field(default_factory=lambda: {"all": 0})  # see ``Manifest.embed``

    @property
    def output(self) -> Path:
        return self.options.output_dir

    def recipe_for(self, input_type: InputType) -> Recipe:
        """The recipe for this type. Proteins are neither cut nor translated."""
        if input_type == "nucleotide":
            return self.recipe
        shortest = max(self.options.min_length, self.caller.shortest(input_type))
        return replace(
            self.recipe,
            input_type=input_type,
            chunk_size=0,
            genetic_code=11,
            min_length=shortest,
        )


def resolve(options: RunOptions, on_event: OnEvent) -> RunConfig:
    """Resolve everything that a run needs, or raise the first error.

    Raises:
        VirnucproError: see ``errors``.
    """
    rundir = open_run_dir(options.output_dir)
    if rundir.root.is_dir():
        with rundir.locked():
            rundir.check_free(resume=options.resume, force=options.force)
    recorded = rundir.read_manifest() if options.resume else None
    for path in () if lost_inputs(options, rundir, recorded) else options.input:
        InputFile.all_of(path)
    GeneticCode.of(options.genetic_code)
    if options.asks_for_vectors or (recorded is not None and recorded.models == (EMBEDDED,)):
        from virnucpro.models.lookup import model_names

        return _resolve_engine(options, model_names(options.model_name), recorded, on_event)
    options.check_without_engine()
    return _resolve_scorer(options)


def _resolve_scorer(options: RunOptions) -> RunConfig:
    """Resolve a run without vectors: all cores are for the parent and its helpers."""
    caller = _caller(options, None, ())
    n_helpers = count_workers(options.workers, model_bytes=0) - 1
    return RunConfig(
        options=options,
        caller=caller,
        recipe=_recipe(options, (), caller),
        resources=Resources(devices=("cpu",), tokens_per_batch=1, n_helpers=n_helpers),
    )


def _caller(options: RunOptions, head: Head | None, rules: Iterable[Embed]) -> Caller:
    """Choose the caller of a run that embeds by these rules."""
    match options:
        case PredictOptions(calls=calls):
            return caller_of(carry(options, CutOptions), calls, head, list(rules))
    return Caller()


def _resolve_engine(
    options: RunOptions, names: Sequence[str], recorded: Manifest | None, on_event: OnEvent
) -> RunConfig:
    """Resolve a run that makes vectors with the models of these names."""
    from virnucpro.models.lookup import open_model

    require_torch()
    if isinstance(options, PredictOptions) and options.head and not options.head.is_file():
        raise InputMissingError(
            f"{printable(options.head)}: no such head file", hint="check the path"
        )
    _refuse_to_fetch_in_vain(options, names, recorded)
    models = tuple(open_model(name, on_event) for name in names)
    if isinstance(options, PredictOptions) and options.regions and not options.region_model:
        options = replace(options, region_model=find_region_model(options.model_name))
    head = _load_head(options, models, on_event)
    rules = _rules(options, recorded, models)
    caller = _caller(options, head, rules)
    footprint = join_footprints([model.footprint for model in models])
    choice = _choose_devices(options, footprint)
    request = _asked_precision(options, recorded)
    precision = _precision(options, request, choice)
    resources = _resources(options, choice, footprint, precision)
    is_auto = (request == "auto", options.esm_batch_size == "auto")
    prepared = [model.prepare(precision, on_event) for model in models]
    kind = choice.kind if options.embeds_here else "cuda"
    made_for = head.facts.encoders if head else [None] * len(models)
    encoders = tuple(
        _spec(options, model, digest, facts, model.precision_on(kind, precision))
        for model, (_, digest), facts in zip(models, prepared, made_for, strict=True)
    )
    announcements = [*_announce_options(options, recorded, list(rules))]
    for model, encoder in zip(models, encoders, strict=True):
        announcements.append(f"model {printable(model.name)}: {model.describe(encoder)}")
    if options.embeds_here:
        batches = f"batches of {resources.tokens_per_batch} tokens"
        announcements += [*choice.descriptions, batches]
    return RunConfig(
        options=options,
        caller=caller,
        recipe=_recipe(options, encoders, caller, max(model.shortest for model in models)),
        resources=resources,
        checkpoints=tuple(model.path.resolve() for model in models),
        weights=tuple(weights.resolve() for weights, _ in prepared),
        announcements=tuple(announcements),
        compromises=tuple(choice.compromises(footprint, precision, is_auto)),
        models=tuple(map(name_anywhere, names)),
        rules=rules,
    )


def _refuse_to_fetch_in_vain(
    options: RunOptions, names: Sequence[str], recorded: Manifest | None
) -> None:
    """Refuse a model that is not here and would be of no use.

    Raises:
        ResumeError: the run began with another model.
        UnavailableError: a head is to call, and none comes with it.
    """
    from virnucpro.models.lookup import locate

    for name in (one for one in names if not locate(one).exists()):
        if recorded is not None and name_anywhere(name) not in recorded.models:
            raise ResumeError(
                f"this folder holds a run with {printable(recorded.recipe.reader)}, not {name}",
                hint="use the old options, choose another --output-dir, or start again with "
                "--force",
            )
        match options:
            case PredictOptions(calls="head", head=None) if len(names) == 1:
                raise _no_head(name)


def _no_head(names: str) -> UnavailableError:
    return UnavailableError(
        f"no head comes with the model {names}",
        hint="name one with --head, or get features without calls: `virnucpro extract`",
    )


def find_region_model(model: str) -> Path | None:
    """Path of the region model that belongs to ``--model``; None: use VirNucPro's own.

    Only a trained model, named by path, has one. The model itself is not opened.

    Raises:
        UnavailableError: there is no such model.
    """
    from virnucpro.models.lookup import locate

    if Path(model).name == model:
        return None
    path = locate(model)
    folder = path if path.is_dir() else path.parent
    file = folder / REGIONS_FILE
    return file if (folder / HEAD_FILE).is_file() and file.is_file() else None


def _rules(
    options: RunOptions, recorded: Manifest | None, models: Sequence[Model]
) -> Mapping[Embed, int]:
    """The rules by which the run embeds: the recorded ones and any that this start adds.

    An encoder of chunks is there for the calls: by default it reads what a preset may call virus.
    """
    rule: Embed | None = "all"
    match options:
        case PredictOptions(embed=None, calls="auto") if recorded is None:
            rule = "viral" if models[0].reads is Reads.CHUNK else "all"
        case PredictOptions(embed=rule):
            pass
    if recorded is None:
        return {rule or "all": 0}
    from_widest = get_args(Embed)
    widest = min(map(from_widest.index, recorded.embed))
    if rule is None or widest <= from_widest.index(rule):
        return recorded.embed
    return {**recorded.embed, rule: recorded.n_generations}


def _announce_options(
    options: RunOptions, recorded: Manifest | None, rules: Sequence[Embed]
) -> Iterator[str]:
    """Announce why the bundled ESM-2 runs if no model was named, and what the model is used for."""
    if not isinstance(options, PredictOptions):
        return
    if options.model is None and recorded is None:
        given = " and ".join(options.given_to_embed)
        calls = (
            f"it changes no call: leave {given} out to run without it, or add --model "
            "cnn_virnucpro to find more unknown viruses in short records (it may lose known ones)"
        )
        names_head = options.calls == "head" or options.head
        effect = "the head needs its vectors" if names_head else calls
        yield f"the small ESM-2 runs because of {given}; {effect}"
    if rules[-1] != "all":
        yield f"embedded: records that --embed {' or '.join(rules)} chooses"
    elif options.embed not in (None, "all"):
        yield f"every record of this run is embedded, not only those of --embed {options.embed}"
    if options.region_model:
        yield f"regions by {printable(options.region_model)}"


def resolve_work(
    options: WorkOptions, stored: Mapping[str, Any], recorded: Manifest, on_event: OnEvent
) -> RunConfig:
    """Resolve everything that a part of a recorded run needs on this machine.

    ``stored`` is ``run.json``, with the options that change the tables.

    Raises:
        UnavailableError: its model, head or scorer is not here, or no device computes in its
            precision.
        ResumeError: an older version planned it.
    """
    of_engine = {one.name: getattr(options, one.name) for one in fields(EngineOptions)}
    of_run = options_of_tables(recorded.recipe.command, options.folder, stored)
    of_run = replace(of_run, **of_engine)
    if recorded.recipe.encoders:
        config = _resolve_engine(of_run, recorded.models, recorded, on_event)
    else:
        config = _resolve_scorer(of_run)
    if changes := recorded.changed_files(config.recipe):
        raise UnavailableError(
            f"this machine has other files than the run: {'; '.join(changes)}",
            hint="use the version of VirNucPro, the model and the head that the run was planned "
            "with",
        )
    return replace(config, recipe=recorded.recipe)


def _choose_devices(options: RunOptions, footprint: Footprint) -> Choice:
    """The devices that embed; the CPU if other machines embed, so that no GPU is needed."""
    if not options.embeds_here:
        options = replace(options, device="cpu", gpus=None, workers=1)
    return choose_devices(options, options.workers, footprint.weight_bytes("bf16"))


def _resources(
    options: RunOptions, choice: Choice, footprint: Footprint, precision: Precision
) -> Resources:
    """
    Raises:
        UsageError: the batch size is not a number.
    """
    request = options.esm_batch_size
    if request != "auto" and not re.fullmatch("[1-9][0-9]{0,17}", request):
        raise UsageError(
            f"--esm-batch-size is {printable(request)!r}; it must be auto, or 1 token or more",
            hint="leave it out to size batches to the device",
        )
    is_auto, n_helpers = request == "auto", choice.count_helpers(usable_cores())
    if not options.embeds_here:  # no worker needs the cores
        n_helpers = count_workers(options.workers, model_bytes=0) - 1
    return Resources(
        devices=choice.devices,
        tokens_per_batch=choose_tokens(choice, footprint, precision) if is_auto else int(request),
        silence_seconds=options.worker_timeout,
        n_helpers=n_helpers,
    )


def _precision(options: RunOptions, request: str, choice: Choice) -> Precision:
    """The precision of the run: chosen for the devices here, unless other machines embed.

    Raises:
        UnavailableError: the devices cannot compute in the requested precision.
        UsageError: other machines embed, and no precision was given.
    """
    is_for_gpus = options.no_embed or options.device != "cpu"
    if not options.embeds_here and is_for_gpus and request in ("bf16", "fp16", "fp32", "fp8"):
        return cast(Precision, request)
    if not (options.embeds_here or options.no_embed) and options.device != "cpu":
        raise UsageError(
            "the plan fixes the precision of the run, and other machines embed",
            hint="add --precision bf16 (GPUs from Ampere on, such as A100 or H100), --precision "
            "fp16 (older ones), or --precision fp32 (CPUs)",
        )
    try:
        return choose_precision(request, choice)
    except UnavailableError as error:
        if request == options.precision:
            raise
        raise UnavailableError(  # not an option of this start: recorded in the run
            f"the run computes in {request}, and {choice.descriptions[0]} does not",
            hint="use devices that do, or start anew with --force and another --precision",
        ) from error


def _spec(
    options: RunOptions,
    model: Model,
    digest: str,
    facts: EncoderFacts | None,
    precision: Precision,
) -> EncoderSpec:
    """An encoder of the run: as the head or the user asks; by default means of the last layer.

    Raises:
        UsageError: the model lacks this layer or this pooling.
    """
    layer, pooling, n_layers = None, model.poolings[0], model.n_layers
    if isinstance(options, ExtractOptions):
        layer, pooling = options.layer, options.pooling
    elif facts is not None:
        layer, pooling = facts.layer, facts.pooling
    layer = n_layers if layer is None else layer
    if not 1 <= layer <= n_layers:
        raise UsageError(
            f"there is no layer {layer}: the model has {counted(n_layers, 'layer')}",
            hint="leave --layer out for the last one",
        )
    if pooling not in model.poolings:
        raise UsageError(
            f"--pooling {pooling}: {printable(model.name)} makes one vector per {model.reads.unit}",
            hint="leave --pooling out, or name an ESM-2 with --model",
        )
    return model.spec(
        sha256=digest, layer=layer, pooling=pooling, precision=precision, store=options.store
    )


def _recipe(
    options: RunOptions, encoders: tuple[EncoderSpec, ...], caller: Caller, shortest: int = 0
) -> Recipe:
    """The recipe of nucleotides; ``shortest``: bases of a record that the encoders read.

    Raises:
        UsageError: ``--chunk-size`` is not a size that the caller can work on.
    """
    return carry(  # fields of a recipe have the names of their options
        options,
        Recipe,
        input_type="nucleotide",
        chunk_size=caller.chunk_size(options.chunk_size),
        min_length=max(options.min_length, caller.shortest("nucleotide"), shortest),
        encoders=encoders,
        **caller.hashes,
    )


def _asked_precision(options: RunOptions, recorded: Manifest | None) -> str:
    """The precision to resolve; on resume, ``auto`` is the precision of the run.

    The precisions of its encoders follow from it: see ``Model.precision_on``.
    """
    if options.precision != "auto" or recorded is None or not recorded.recipe.encoders:
        return options.precision
    precisions = {encoder.precision for encoder in recorded.recipe.encoders}
    if coarse := precisions & {"bf16", "fp16", "fp8"}:
        return min(coarse)
    return "bf16" if "bf16x2" in precisions else "fp32"


def _load_head(options: RunOptions, models: tuple[Model, ...], on_event: OnEvent) -> Head | None:
    """Load the head that calls, if any: the head that the user named, or the model's own.

    The head of the bundled ESM-2 calls only on request.

    Raises:
        UnavailableError: there is none, it is damaged, or it belongs to other models.
    """
    if not isinstance(options, PredictOptions) or options.calls == "scorer":
        return None
    path = options.head
    if path is None and len(models) > 1:  # a bundle
        from virnucpro.viral.legacy_head import find_head

        path = find_head(options.model_name, models, on_event)
    if path is None and (options.calls == "head" or options.model_name != EMBEDDED):
        path = models[0].head
    if path is None and options.calls == "auto":
        return None
    if path is None:
        raise _no_head(printable(" and ".join(model.name for model in models)))
    head = Head.load(path)
    head.facts.check_made_for(models)
    return head
