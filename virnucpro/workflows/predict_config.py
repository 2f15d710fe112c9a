"""Resolve the options of ``predict``: also the classifier, its head, and what is embedded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from virnucpro.core.atomic_io import HEAD_FILE, REGIONS_FILE
from virnucpro.core.errors import InputMissingError, UnavailableError
from virnucpro.core.events import OnEvent
from virnucpro.core.logging import printable
from virnucpro.core.machine import read_machine
from virnucpro.core.option_schema import carry
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import Embed, Reads
from virnucpro.engine.base import Resources
from virnucpro.engine.options import WorkOptions
from virnucpro.models.base import Model
from virnucpro.models.devices import count_workers, require_torch
from virnucpro.models.registry import EMBEDDED
from virnucpro.sequences.translate import GeneticCode
from virnucpro.store.manifest import Manifest
from virnucpro.viral.classifier import Caller, caller_of
from virnucpro.viral.head import Head
from virnucpro.viral.options import CutOptions
from virnucpro.workflows.options import name_anywhere
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.rethreshold import find_lost_inputs
from virnucpro.workflows.run_config import (
    LayerChoice,
    RunConfig,
    check_inputs,
    fit_to_recorded,
    make_recipe,
    open_models,
    options_of_part,
    prepare_encoders,
    read_recorded,
    resolve_engine,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictConfig(RunConfig):
    """One ``predict``: with or without encoders."""

    options: PredictOptions
    classifier: Caller


def resolve_predict(options: PredictOptions, on_event: OnEvent) -> PredictConfig:
    """Resolve everything that a prediction needs, or raise the first error.

    Raises:
        VirnucproError: see ``errors``.
    """
    recorded = read_recorded(options)
    if find_lost_inputs(options, recorded):
        GeneticCode.of(options.genetic_code)
    else:
        check_inputs(options)
    if options.asks_for_vectors or (recorded is not None and recorded.models == (EMBEDDED,)):
        from virnucpro.models.lookup import model_names

        return _resolve_with_models(options, model_names(options.model_name), recorded, on_event)
    options.check_without_engine()
    return _resolve_scorer_alone(options)


def resolve_predict_part(
    options: WorkOptions, stored: Mapping[str, Any], recorded: Manifest, on_event: OnEvent
) -> PredictConfig:
    """Resolve everything that a part of a recorded prediction needs on this machine.

    ``stored`` is ``run.json``, with the options that change the tables.

    Raises:
        UnavailableError, ResumeError: as ``fit_to_recorded`` and ``restore_options``.
    """
    of_run = options_of_part(PredictOptions, options, stored)
    if recorded.recipe.encoders:
        config = _resolve_with_models(of_run, recorded.models, recorded, on_event)
    else:
        config = _resolve_scorer_alone(of_run)
    return fit_to_recorded(config, recorded)


def _resolve_scorer_alone(options: PredictOptions) -> PredictConfig:
    """Resolve a run without vectors: all cores are for the parent and its helpers."""
    classifier = caller_of(carry(options, CutOptions), options.calls, None, [])
    machine = read_machine(options.slurm)
    n_helpers = count_workers(options.workers, 0, machine) - 1
    chunk_size = classifier.chunk_size(options.chunk_size)
    shortest = classifier.shortest("nucleotide")
    return PredictConfig(
        options=options,
        classifier=classifier,
        recipe=make_recipe(options, (), chunk_size, shortest, classifier.hashes),
        resources=Resources(
            devices=("cpu",),
            tokens_per_batch=1,
            n_helpers=n_helpers,
            memory=machine.memory_total,
        ),
        min_protein_length=classifier.shortest("protein"),
    )


def _resolve_with_models(
    options: PredictOptions, names: Sequence[str], recorded: Manifest | None, on_event: OnEvent
) -> PredictConfig:
    """Resolve a run that makes vectors with the models of these names."""
    require_torch()
    if options.head and not options.head.is_file():
        raise InputMissingError(
            f"{printable(options.head)}: no such head file", hint="check the path"
        )
    _refuse_headless_model(options, names, recorded)
    models = open_models(names, recorded, on_event)
    if options.regions and not options.region_model:
        options = replace(options, region_model=find_region_model(options.model_name))
    head = _load_head(options, models, on_event)
    rules = _choose_rules(options, recorded, models)
    classifier = caller_of(carry(options, CutOptions), options.calls, head, list(rules))
    engine = resolve_engine(options, models, recorded)
    layers = [LayerChoice(None, None)] * len(models)
    if head is not None:
        layers = [LayerChoice(facts.layer, facts.pooling) for facts in head.facts.encoders]
    encoders = prepare_encoders(options, engine, layers, on_event)
    announced = _announce_options(options, recorded, list(rules))
    chunk_size = classifier.chunk_size(options.chunk_size)
    shortest = max(classifier.shortest("nucleotide"), *(model.shortest for model in models))
    return PredictConfig(
        options=options,
        classifier=classifier,
        recipe=make_recipe(options, encoders.specs, chunk_size, shortest, classifier.hashes),
        resources=engine.resources,
        min_protein_length=classifier.shortest("protein"),
        checkpoints=engine.checkpoints,
        weights=encoders.weights,
        announcements=(*announced, *engine.announce(options, encoders)),
        compromises=engine.compromises,
        models=tuple(map(name_anywhere, names)),
        rules=rules,
    )


def _refuse_headless_model(
    options: PredictOptions, names: Sequence[str], recorded: Manifest | None
) -> None:
    """Refuse to download a model for its head if it has none.

    Raises:
        UnavailableError: a head is to call, and none comes with the model.
    """
    from virnucpro.models.lookup import locate

    if options.calls != "head" or options.head is not None or len(names) != 1:
        return
    [name] = names
    is_of_another_run = recorded is not None and name_anywhere(name) not in recorded.models
    if not is_of_another_run and not locate(name).exists():
        raise _no_head(name)


def _no_head(names: str) -> UnavailableError:
    return UnavailableError(
        f"no head comes with the model {names}",
        hint=with_options(
            "name one with {head}, or get features without calls: `virnucpro extract`"
        ),
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


def _choose_rules(
    options: PredictOptions, recorded: Manifest | None, models: Sequence[Model]
) -> Mapping[Embed, int]:
    """The rules by which the run embeds: the recorded ones and any that this start adds.

    An encoder of chunks is there for the calls: by default it reads what a preset may call virus.
    """
    rule = options.embed
    if rule is None and options.calls == "auto" and recorded is None:
        rule = "viral" if models[0].reads is Reads.CHUNK else "all"
    if recorded is None:
        return {rule or "all": 0}
    from_widest = get_args(Embed)
    widest = min(map(from_widest.index, recorded.embed))
    if rule is None or widest <= from_widest.index(rule):
        return recorded.embed
    return {**recorded.embed, rule: recorded.n_generations}


def _announce_options(
    options: PredictOptions, recorded: Manifest | None, rules: Sequence[Embed]
) -> Iterator[str]:
    """Announce why the bundled ESM-2 runs if no model was named, and what the model is used for."""
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


def _load_head(
    options: PredictOptions, models: tuple[Model, ...], on_event: OnEvent
) -> Head | None:
    """Load the head that calls, if any: the head that the user named, or the model's own.

    The head of the bundled ESM-2 calls only on request.

    Raises:
        UnavailableError: there is none, it is damaged, or it belongs to other models.
    """
    if options.calls == "scorer":
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
