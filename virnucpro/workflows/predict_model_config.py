"""Resolve a prediction that embeds: models, head, classifier, and records to embed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from virnucpro.core.errors import InputMissingError, UnavailableError
from virnucpro.core.events import EventHandler
from virnucpro.core.logging import printable
from virnucpro.core.option_schema import convert_options
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import EmbeddingRule
from virnucpro.models.base import Model
from virnucpro.models.family import ModelFile
from virnucpro.models.lookup import find_model
from virnucpro.models.names import DEFAULT_MODEL, TINY_MODEL
from virnucpro.models.output_choice import OutputChoice
from virnucpro.models.torch_build import require_torch
from virnucpro.store.hdf5_check import check_connector
from virnucpro.store.manifest import Manifest
from virnucpro.viral.classifier_choice import choose_classifier
from virnucpro.viral.head import Head
from virnucpro.viral.options import ThresholdOptions
from virnucpro.workflows.model_config import open_models, prepare_encoders, resolve_engine
from virnucpro.workflows.options import name_anywhere
from virnucpro.workflows.predict_config import PredictConfig
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.run_config import make_recipe


def resolve_with_models(
    options: PredictOptions,
    names: Sequence[str],
    recorded: Manifest | None,
    on_event: EventHandler,
    *,
    is_default: bool = False,
) -> PredictConfig:
    """Resolve a run that computes vectors with the named models."""
    require_torch()
    check_connector(options.hdf5_vol_connector)
    if options.head and not options.head.is_file():
        raise InputMissingError(
            f"{printable(options.head)}: no such head file", hint="check the path"
        )
    models = open_models(
        options,
        names,
        recorded,
        on_event,
        is_default=is_default,
        check_head=partial(_refuse_head, options, names),
    )
    if options.regions and not options.region_model:
        assert options.model is not None, "a run that embeds has a model"
        options = replace(options, region_model=find_region_model(options.model))
    head = _load_head(options, models, on_event)
    rules = _choose_rules(options, recorded)
    classifier = choose_classifier(
        convert_options(options, ThresholdOptions), options.calls, head, list(rules)
    )
    engine = resolve_engine(options, models, recorded)
    encoders = prepare_encoders(options, engine, _choose_outputs(head, len(models)), on_event)
    chunk_size = classifier.chunk_size(options.chunk_size)
    shortest = classifier.min_length("nucleotide")
    keeps_vectors = options.keeps_vectors(
        recorded.recipe.keep_vectors if recorded and recorded.recipe.encoders else None,
        has_head=classifier.frame_head is not None,
    )
    recipe = make_recipe(
        options, encoders.specs, chunk_size, shortest, classifier.hashes, keep_vectors=keeps_vectors
    )
    announcements = _announce_options(
        options, list(rules), is_default=is_default, keeps_vectors=keeps_vectors
    )
    return PredictConfig(
        options=options,
        classifier=classifier,
        recipe=recipe,
        resources=engine.resources,
        min_protein_length=classifier.min_length("protein"),
        checkpoints=engine.checkpoints,
        weights=encoders.weights,
        announcements=(*announcements, *engine.announce(options, encoders)),
        compromises=engine.compromises,
        models=tuple(map(name_anywhere, names)),
        rules=rules,
    )


def _choose_outputs(head: Head | None, n_models: int) -> list[OutputChoice]:
    """Choose what each model computes: what the head reads, or else the defaults."""
    if head is None:
        return [OutputChoice()] * n_models
    return [OutputChoice((str(facts.layer),), (facts.pooling,)) for facts in head.facts.encoders]


def _refuse_head(options: PredictOptions, names: Sequence[str], dims: Sequence[int]) -> None:
    """Reject a head that cannot read vectors with these dimensions.

    Raises:
        UnavailableError: there is no head, or it was made for other models.
    """
    if options.head is None:
        if options.calls == "head" and len(names) == 1:
            raise _no_head(names[0])
        return
    facts = Head.load(options.head).facts
    if [encoder.dim for encoder in facts.encoders] != list(dims):
        made_for = printable(" and ".join(encoder.name for encoder in facts.encoders))
        raise UnavailableError(
            f"the head was made for the encoder {made_for}, not for {' and '.join(names)}",
            hint=with_options("set {model} to the encoder that the head was made for"),
        )


def _no_head(names: str) -> UnavailableError:
    return UnavailableError(
        f"no head comes with the model {names}",
        hint=with_options(
            "name one with {head}, or a model that has one ({model:{tiny}}, or one of `virnucpro "
            "train`), or get features without calls: `virnucpro extract`",
            tiny=TINY_MODEL,
        ),
    )


def find_region_model(model: str) -> Path | None:
    """Return the region model that belongs to ``--model``, or None to use the built-in one.

    Only a trained model that is named by its path has one. The model itself is not opened.

    Raises:
        UnavailableError: there is no such model.
    """
    if Path(model).name == model:
        return None
    path = find_model(model)
    folder = path if path.is_dir() else path.parent
    file = folder / ModelFile.REGIONS
    return file if (folder / ModelFile.HEAD).is_file() and file.is_file() else None


def _choose_rules(
    options: PredictOptions, recorded: Manifest | None
) -> Mapping[EmbeddingRule, int]:
    """Choose the rules by which the run embeds: the recorded ones plus any that this start adds."""
    rule = options.embed
    if recorded is None:
        return {rule or "all": 0}
    from_widest = get_args(EmbeddingRule)
    widest = min(map(from_widest.index, recorded.embed))
    if rule is None or widest <= from_widest.index(rule):
        return recorded.embed
    return {**recorded.embed, rule: recorded.n_generations}


def _announce_options(
    options: PredictOptions,
    rules: Sequence[EmbeddingRule],
    *,
    is_default: bool,
    keeps_vectors: bool,
) -> Iterator[str]:
    """Announce why a model runs if none was named, and how its vectors are used."""
    if is_default:
        flags = " and ".join(options.given_to_embed)
        calls = f"It changes no call: leave {flags} out to run without it and without a GPU."
        names_head = options.calls == "head" or options.head
        effect = "The head needs its vectors." if names_head else calls
        yield f"{DEFAULT_MODEL}, the default model, runs because of {flags}. {effect}"
    if rules[-1] != "all":
        yield f"embedded: records that --embed {' or '.join(rules)} chooses"
    elif options.embed not in (None, "all"):
        yield f"every record of this run is embedded, not only those of --embed {options.embed}"
    if options.region_model:
        yield f"regions by {printable(options.region_model)}"
    if not keeps_vectors and options.keep_vectors == "auto":
        yield "scores are kept, and no vectors; --keep-vectors yes keeps both"


def _load_head(
    options: PredictOptions, models: tuple[Model, ...], on_event: EventHandler
) -> Head | None:
    """Load the head that calls, if any: the head that the user named, or the model's own.

    The heads of the built-in ESM-2 and the default model call only on request.

    Raises:
        UnavailableError: the head is missing or damaged, or belongs to other models.
    """
    if options.calls == "scorer":
        return None
    path = options.head
    if path is None and len(models) > 1:  # a bundle
        from virnucpro.viral.legacy_head import find_head

        assert options.model is not None, "a run that embeds has a model"
        path = find_head(options.model, models, on_event)
    is_asked = options.calls == "head" or options.model not in (TINY_MODEL, DEFAULT_MODEL)
    if path is None and is_asked:
        path = models[0].head
    if path is None and options.calls == "auto":
        return None
    if path is None:
        raise _no_head(printable(" and ".join(model.name for model in models)))
    head = Head.load(path)
    head.facts.check_compatible(models)
    return head
