"""Options become a run that can begin: model, head, devices, precision, budget.

All that can be checked is checked here, before a file is read or a process is started.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from virnucpro import __version__
from virnucpro.config import EncoderSpec, InputType, Precision, Recipe, Resources
from virnucpro.devices import (
    Choice,
    choose_devices,
    choose_precision,
    choose_tokens,
    describe_compromises,
)
from virnucpro.encoders.learned.file import LearnedCheckpoint, inspect_learned, is_learned
from virnucpro.encoders.models import (
    Checkpoint,
    check_published,
    converted_folder,
    embedded_head,
    embedded_model,
    embedded_scorer,
    find_checkpoint,
    locate,
    prepare_weights,
)
from virnucpro.encoders.published import EMBEDDED, PUBLISHED
from virnucpro.errors import (
    InputMissingError,
    ResumeError,
    UnavailableError,
    UsageError,
)
from virnucpro.events import Progress, Telling
from virnucpro.log import printable
from virnucpro.options import ExtractOptions, PredictOptions, RunOptions
from virnucpro.run.folder import RunDir
from virnucpro.scorer.nets import load_scorer
from virnucpro.scoring.head import Head, load_head
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
    checkpoint: Path
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
    _check_before_fetching(options)
    scorer = _scorer(options)
    checkpoint = _find_model(options.model_name, on_event)
    head = _at_threshold(_load_head(options, checkpoint), options)
    choice = choose_devices(
        options.device,
        options.gpus,
        options.workers,
        options.cuda_visible_devices,
        model_bytes=2 * checkpoint.shape.n_parameters,
    )
    resources = Resources(
        devices=choice.devices,
        tokens_per_batch=_tokens_per_batch(options, choice, checkpoint),
        silence_seconds=options.worker_timeout,
    )
    request = _asked_precision(options)
    precision = choose_precision(request, choice)
    is_auto = (request == "auto", options.esm_batch_size == "auto")
    folder = options.converted or converted_folder()
    match checkpoint:
        case LearnedCheckpoint():
            weights, digest = checkpoint.path, checkpoint.encoder_id
        case _:
            weights, digest = prepare_weights(
                checkpoint,
                precision,
                folder,
                lambda stage, done, total: on_event(Progress(stage, done, total, "bytes")),
            )
            check_published(options.model_name, checkpoint, digest)
    recipe = _recipe(options, checkpoint, digest, head, precision)
    return RunConfig(
        options=options,
        recipe=recipe,
        resources=resources,
        checkpoint=checkpoint.path.resolve(),
        weights=(weights.resolve(),),
        scorer=scorer,
        announcements=_announcements(checkpoint, recipe, resources, choice),
        compromises=tuple(describe_compromises(choice, checkpoint.shape, is_auto)),
    ), head


def _find_model(model: str, on_event: OnEvent) -> Checkpoint | LearnedCheckpoint:
    """The checkpoint that ``--model`` names: an ESM-2, or an encoder that ``train`` has written.

    Raises:
        UnavailableError: there is no such thing.
    """
    if is_learned(Path(model)):
        return inspect_learned(Path(model).absolute())
    return find_checkpoint(
        model, lambda n, total: on_event(Progress("fetching the model", n, total, "bytes"))
    )


def _at_threshold(head: Head | None, options: RunOptions) -> Head | None:
    """The head with the threshold that the user named, if any."""
    if head is None or not isinstance(options, PredictOptions) or options.threshold is None:
        return head
    return replace(head, facts=replace(head.facts, threshold=options.threshold))


def _recipe(
    options: RunOptions,
    checkpoint: Checkpoint | LearnedCheckpoint,
    digest: str,
    head: Head | None,
    precision: Precision,
) -> Recipe:
    n_layers = checkpoint.n_layers
    match options:
        case ExtractOptions(layer=layer, pooling=pooling):
            layer = n_layers if layer is None else layer
        case _:
            assert head is not None, "predict has a head"
            (facts,) = head.facts.encoders
            layer, pooling = facts.layer, facts.pooling
    if not 1 <= layer <= n_layers:
        raise UsageError(
            f"layer {layer} of a model with {n_layers} layers", hint=f"--layer 1 to {n_layers}"
        )
    if isinstance(checkpoint, LearnedCheckpoint) and pooling != "mean":
        raise UsageError(
            f"--pooling {pooling}: {checkpoint.name} makes one vector of a frame",
            hint="leave --pooling out, or name an ESM-2 with --model",
        )
    return Recipe(
        command=options.command,
        input_type="nucleotide",
        chunk_size=_chunk_size(options, head),
        min_length=options.min_length,
        genetic_code=options.genetic_code,
        encoders=(
            EncoderSpec(
                family=checkpoint.family,
                reads=checkpoint.reads,
                model=checkpoint.name,
                sha256=digest,
                layer=layer,
                pooling=pooling,
                precision=precision,
                dim=checkpoint.dim,
            ),
        ),
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


def _check_before_fetching(options: RunOptions) -> None:
    """Refuse to resume with another model before gigabytes of it are fetched.

    Raises:
        ResumeError: the run began with another one.
    """
    model = options.model_name
    recorded = RunDir(options.output_dir).read_manifest() if options.resume else None
    if recorded is None or model not in PUBLISHED or locate(model).exists():
        return
    published, before = PUBLISHED[model], recorded.recipe
    digests = {published.sha256, published.folder_sha256}
    if not any(encoder.model == model or encoder.sha256 in digests for encoder in before.encoders):
        raise ResumeError(
            f"this folder holds a run with {printable(before.reader)}, not {model}",
            hint="use the old options, choose another --output-dir, or start again with --force",
        )


def _tokens_per_batch(
    options: RunOptions, choice: Choice, checkpoint: Checkpoint | LearnedCheckpoint
) -> int:
    request = options.esm_batch_size
    if request == "auto":
        return choose_tokens(choice, checkpoint.shape)
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
            return recorded.recipe.encoders[0].precision
    return options.precision


def _load_head(options: RunOptions, checkpoint: Checkpoint | LearnedCheckpoint) -> Head | None:
    if not isinstance(options, PredictOptions):
        return None
    path = options.head
    if path is None and checkpoint.path == embedded_model():
        path = embedded_head()
    if path is None:
        raise UnavailableError(
            f"no head comes with the model {printable(checkpoint.name)}",
            hint="name one with --head, or get features without calls: `virnucpro extract`",
        )
    if not path.is_file():
        raise InputMissingError(f"{printable(path)}: no such head file")
    head = load_head(path)
    facts = head.facts
    encoder = facts.encoders[0]
    if [one.encoder_id for one in facts.encoders] != [checkpoint.encoder_id]:
        made_for = " and ".join(f"{one.name} ({one.encoder_id})" for one in facts.encoders)
        raise UnavailableError(
            f"the head was made for the encoder {printable(made_for)}, "
            f"not for {printable(checkpoint.name)} ({checkpoint.encoder_id})",
            hint="give with --model the encoder that the head was made for",
        )
    has_layer = encoder.dim == checkpoint.dim and 1 <= encoder.layer <= checkpoint.n_layers
    if not has_layer or not 30 <= facts.chunk_size <= _LONGEST_CHUNK:
        raise UnavailableError(
            f"the head asks for layer {encoder.layer} of {encoder.dim} dimensions and chunks of "
            f"{facts.chunk_size} bases; the model has {checkpoint.n_layers} layers of "
            f"{checkpoint.dim}",
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
    checkpoint: Checkpoint | LearnedCheckpoint, recipe: Recipe, resources: Resources, choice: Choice
) -> tuple[str, ...]:
    shape, (encoder,) = checkpoint.shape, recipe.encoders
    match checkpoint:
        case LearnedCheckpoint(base=base):
            on_base = f" on {printable(base.name)}" if base is not None else ""
            what = f"{encoder.dim} dimensions{on_base}, {encoder.precision}"
        case _:
            what = (
                f"{shape.n_layers} layers, {shape.dim} dimensions, "
                f"{shape.n_parameters / 1e6:.1f} M parameters; layer {encoder.layer}, "
                f"{encoder.pooling} pooling, {encoder.precision}"
            )
    return (
        f"model {printable(checkpoint.name)}: {what}",
        *choice.descriptions,
        f"batches of {resources.tokens_per_batch} tokens",
    )
