"""Options become a run that can begin: model, head, devices, precision, budget.

All that can be checked is checked here, before a file is read or a process is started.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from virnucpro import __version__
from virnucpro.config import (
    EncoderSpec,
    Footprint,
    InputType,
    Precision,
    Recipe,
    Resources,
    join_footprints,
)
from virnucpro.devices import (
    Choice,
    choose_devices,
    choose_precision,
    choose_tokens,
    describe_compromises,
)
from virnucpro.encoders.base import Model
from virnucpro.encoders.bundles import open_models
from virnucpro.encoders.published import EMBEDDED
from virnucpro.errors import (
    InputMissingError,
    ResumeError,
    UnavailableError,
    UsageError,
)
from virnucpro.events import Telling
from virnucpro.log import printable
from virnucpro.options import ExtractOptions, PredictOptions, RunOptions
from virnucpro.run.folder import RunDir
from virnucpro.scorer.nets import embedded_scorer, load_scorer
from virnucpro.scoring.head import EncoderFacts, Head, load_head
from virnucpro.scoring.original_head import find_head
from virnucpro.sequences.genetic_code import genetic_code
from virnucpro.sequences.inputs import list_sources

OnEvent = Callable[[Telling], None]
_DEFAULT_CHUNK = 500
_LONGEST_CHUNK = 1_000_000_000  # bases


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerConfig:
    """The scorer of nucleotides, used in place of an encoder."""

    path: Path
    recipe: Recipe
    announcement: str  # line for the log and the summary


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One ``predict`` or ``extract``: its options, and what they resolve to.

    Complete and checked, but for what the inputs tell.
    """

    options: RunOptions
    recipe: Recipe  # recipe of nucleotides with an encoder; see ``recipe_for``
    resources: Resources
    checkpoints: tuple[Path, ...]
    weights: tuple[Path, ...]  # checkpoints that the workers load, or their converted forms
    scorer: ScorerConfig | None = None  # used for nucleotides in place of the encoder
    announcements: tuple[str, ...] = ()  # lines about the choices for the encoder
    compromises: tuple[str, ...] = ()  # warnings about their costs

    @property
    def output(self) -> Path:
        return self.options.output_dir

    @property
    def input_type(self) -> InputType | None:
        """The type that the user named; None if the letters of the input decide."""
        input_type = self.options.input_type
        return None if input_type == "auto" else input_type

    def scorer_for(self, input_type: InputType) -> ScorerConfig | None:
        """The scorer for an input of this type, if it is scored without an encoder."""
        return self.scorer if input_type == "nucleotide" else None

    def recipe_for(self, input_type: InputType) -> Recipe:
        """The recipe for this type. Proteins are neither cut nor translated."""
        if scorer := self.scorer_for(input_type):
            return scorer.recipe
        if input_type == "nucleotide":
            return self.recipe
        return replace(self.recipe, input_type=input_type, chunk_size=0, genetic_code=11)


def resolve(options: RunOptions, on_event: OnEvent) -> tuple[RunConfig, Head | None]:
    """Resolve all that a run needs, or raise the first error.

    Raises:
        VirnucproError: see ``errors``.
    """
    rundir = RunDir(options.output_dir)
    if rundir.root.is_dir():
        with rundir.locked():
            rundir.check_free(resume=options.resume, force=options.force)
    for path in options.input:
        list_sources(path)
    genetic_code(options.genetic_code)
    scorer = _scorer(options)
    models = open_models(options.model_name, on_event, partial(_check_before_fetching, options))
    footprint = join_footprints([model.footprint for model in models])
    head = _at_threshold(_load_head(options, models, on_event), options)
    choice = choose_devices(
        options.device,
        options.gpus,
        options.workers,
        options.cuda_visible_devices,
        model_bytes=footprint.weight_bytes,
    )
    resources = Resources(
        devices=choice.devices,
        tokens_per_batch=_tokens_per_batch(options, choice, footprint),
        silence_seconds=options.worker_timeout,
    )
    request = _asked_precision(options)
    precision = choose_precision(request, choice)
    is_auto = (request == "auto", options.esm_batch_size == "auto")
    prepared = [model.prepare(precision, options.converted, on_event) for model in models]
    made_for = head.facts.encoders if head else [None] * len(models)
    encoders = tuple(
        _spec(options, model, digest, facts, model.precision_on(choice.kind, precision))
        for model, (_, digest), facts in zip(models, prepared, made_for, strict=True)
    )
    recipe = _recipe(options, encoders, head)
    return RunConfig(
        options=options,
        recipe=recipe,
        resources=resources,
        checkpoints=tuple(model.path.resolve() for model in models),
        weights=tuple(weights.resolve() for weights, _ in prepared),
        scorer=scorer,
        announcements=_announcements(models, recipe, resources, choice),
        compromises=tuple(describe_compromises(choice, footprint, is_auto)),
    ), head


def _at_threshold(head: Head | None, options: RunOptions) -> Head | None:
    """The head with the threshold that the user named, if any."""
    if head is None or not isinstance(options, PredictOptions) or options.threshold is None:
        return head
    return replace(head, facts=replace(head.facts, threshold=options.threshold))


def _spec(
    options: RunOptions,
    model: Model,
    digest: str,
    facts: EncoderFacts | None,
    precision: Precision,
) -> EncoderSpec:
    """An encoder of the run: as its head asks, or the user.

    Raises:
        UsageError: the model has no such layer, or makes no such vectors.
    """
    n_layers = model.n_layers
    match options:
        case ExtractOptions(layer=layer, pooling=pooling):
            layer = n_layers if layer is None else layer
        case _:
            assert facts is not None, "a prediction has a head"
            layer, pooling = facts.layer, facts.pooling
    if not 1 <= layer <= n_layers:
        raise UsageError(
            f"layer {layer} of a model with {n_layers} layers", hint=f"--layer 1 to {n_layers}"
        )
    if pooling not in model.poolings:
        raise UsageError(
            f"--pooling {pooling}: {printable(model.name)} makes one vector of a frame",
            hint="leave --pooling out, or name an ESM-2 with --model",
        )
    return EncoderSpec(
        family=model.family,
        reads=model.reads,
        model=model.name,
        sha256=digest,
        layer=layer,
        pooling=pooling,
        precision=precision,
        dim=model.dim,
    )


def _recipe(options: RunOptions, encoders: tuple[EncoderSpec, ...], head: Head | None) -> Recipe:
    return Recipe(
        command=options.command,
        input_type="nucleotide",
        chunk_size=_chunk_size(options, head),
        min_length=options.min_length,
        genetic_code=options.genetic_code,
        encoders=encoders,
        head_sha256=head.sha256 if head else "",
    )


def _scorer(options: RunOptions) -> ScorerConfig | None:
    """The scorer of nucleotides, if the user named no model and no head.

    Raises:
        UnavailableError: its file is missing or damaged.
        UsageError: chunks of another size are asked for.
    """
    match options:
        case PredictOptions(model=None, head=None, input_type="auto" | "nucleotide"):
            pass
        case _:
            return None
    path = embedded_scorer()
    scorer = load_scorer(path)
    if options.chunk_size not in (None, scorer.piece_size):
        raise UsageError(
            f"the scorer reads pieces of {scorer.piece_size} bases, not of {options.chunk_size}",
            hint=f"leave --chunk-size out, or name a model and a head: --model {EMBEDDED}",
        )
    recipe = Recipe(
        command=options.command,
        input_type="nucleotide",
        chunk_size=scorer.piece_size,
        min_length=max(options.min_length, scorer.shortest),
        genetic_code=options.genetic_code,
        encoders=(),
        scorer_sha256=scorer.sha256,
    )
    announcement = (
        f"called by the scorer of VirNucPro {__version__}, on one core and without a language "
        f"model (calls and vectors by ESM-2: --model {EMBEDDED})"
    )
    return ScorerConfig(path=path, recipe=recipe, announcement=announcement)


def _check_before_fetching(options: RunOptions, model: str, digests: frozenset[str]) -> None:
    """Refuse to resume with another model before gigabytes of it are fetched.

    Raises:
        ResumeError: the run began with another one.
    """
    recorded = RunDir(options.output_dir).read_manifest() if options.resume else None
    if recorded is None:
        return
    before = recorded.recipe
    if not any(encoder.model == model or encoder.sha256 in digests for encoder in before.encoders):
        raise ResumeError(
            f"this folder holds a run with {printable(before.reader)}, not {model}",
            hint="use the old options, choose another --output-dir, or start again with --force",
        )


def _tokens_per_batch(options: RunOptions, choice: Choice, footprint: Footprint) -> int:
    request = options.esm_batch_size
    if request == "auto":
        return choose_tokens(choice, footprint)
    if not re.fullmatch("[0-9]{1,18}", request):
        raise UsageError(
            f"--esm-batch-size is {printable(request)!r}; it must be auto or a number of tokens",
            hint="leave it out to have it sized to the device",
        )
    return int(request)


def _asked_precision(options: RunOptions) -> str:
    """The precision to resolve; on resume, ``auto`` is the precision of the run."""
    if options.precision == "auto" and options.resume:
        recorded = RunDir(options.output_dir).read_manifest()
        if recorded is not None and recorded.recipe.encoders:
            return _precision_behind({one.precision for one in recorded.recipe.encoders})
    return options.precision


def _precision_behind(precisions: Set[Precision]) -> Precision:
    """The precision of a run whose encoders have these; see ``Model.precision_on``."""
    if coarse := precisions & {"bf16", "fp16"}:
        return min(coarse)
    return "bf16" if "bf16x2" in precisions else "fp32"


def _load_head(options: RunOptions, models: tuple[Model, ...], on_event: OnEvent) -> Head | None:
    if not isinstance(options, PredictOptions):
        return None
    names = printable(" and ".join(model.name for model in models))
    path = options.head
    if path is None:
        path = find_head(options.model_name, models, on_event)
    if path is None:
        raise UnavailableError(
            f"no head comes with the model {names}",
            hint="name one with --head, or get features without calls: `virnucpro extract`",
        )
    if not path.is_file():
        raise InputMissingError(f"{printable(path)}: no such head file")
    head = load_head(path)
    facts = head.facts
    if [one.encoder_id for one in facts.encoders] != [model.encoder_id for model in models]:
        made_for = " and ".join(f"{one.name} ({one.encoder_id})" for one in facts.encoders)
        ids = " and ".join(model.encoder_id for model in models)
        raise UnavailableError(
            f"the head was made for the encoder {printable(made_for)}, not for {names} ({ids})",
            hint="give with --model the encoder that the head was made for",
        )
    for encoder, model in zip(facts.encoders, models, strict=True):
        has_layer = encoder.dim == model.dim and 1 <= encoder.layer <= model.n_layers
        if not has_layer or not 30 <= facts.chunk_size <= _LONGEST_CHUNK:
            raise UnavailableError(
                f"the head asks for layer {encoder.layer} of {encoder.dim} dimensions and chunks "
                f"of {facts.chunk_size} bases; the model has {model.n_layers} layers of "
                f"{model.dim}",
                hint="the head is damaged: get it again",
            )
    return head


def _chunk_size(options: RunOptions, head: Head | None) -> int:
    if head is None:
        return _DEFAULT_CHUNK if options.chunk_size is None else options.chunk_size
    if options.chunk_size not in (None, head.facts.chunk_size):
        raise UsageError(
            f"the head was made for chunks of {head.facts.chunk_size} bases, "
            f"not of {options.chunk_size}",
            hint="leave --chunk-size out, or give a head made for that size",
        )
    return head.facts.chunk_size


def _announcements(
    models: tuple[Model, ...], recipe: Recipe, resources: Resources, choice: Choice
) -> tuple[str, ...]:
    return (
        *(
            f"model {printable(model.name)}: {model.describe(encoder)}"
            for model, encoder in zip(models, recipe.encoders, strict=True)
        ),
        *choice.descriptions,
        f"batches of {resources.tokens_per_batch} tokens",
    )
