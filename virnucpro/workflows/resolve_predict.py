"""Resolve the options of ``predict``, with or without models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from virnucpro.core.events import EventHandler
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.store.manifest import Manifest
from virnucpro.workflows.lost_inputs import find_lost_inputs
from virnucpro.workflows.predict_config import PredictConfig, resolve_scorer_alone
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.run_config import (
    check_inputs,
    match_recorded,
    name_model,
    part_options,
    read_recorded,
    takes_default,
)

if TYPE_CHECKING:
    from virnucpro.engine.work_options import WorkOptions


def resolve_predict(options: PredictOptions, on_event: EventHandler) -> PredictConfig:
    """Resolve everything that a prediction needs, or raise the first error.

    Raises:
        VirnucproError: see ``errors``.
    """
    recorded = read_recorded(options)
    if find_lost_inputs(options, recorded):
        GeneticCode.from_number(options.genetic_code)
    else:
        check_inputs(options)
    named = name_model(options, recorded)
    if named.model is None:
        options.check_without_engine()
        return resolve_scorer_alone(options)
    from virnucpro.models.lookup import model_names
    from virnucpro.workflows.predict_model_config import resolve_with_models

    names = model_names(named.model)
    is_default = takes_default(options, recorded)
    return resolve_with_models(named, names, recorded, on_event, is_default=is_default)


def resolve_predict_part(
    options: WorkOptions, stored: Mapping[str, Any], recorded: Manifest, on_event: EventHandler
) -> PredictConfig:
    """Resolve everything that one part of a recorded prediction needs on this machine.

    Args:
        stored: ``run.json``, including the options that change the tables.

    Raises:
        UnavailableError, ResumeError: as ``match_recorded`` and ``restore_options``.
    """
    run_options = name_model(part_options(PredictOptions, options, stored), recorded)
    if not recorded.recipe.encoders:
        return match_recorded(resolve_scorer_alone(run_options), recorded)
    from virnucpro.workflows.predict_model_config import resolve_with_models

    config = resolve_with_models(run_options, recorded.models, recorded, on_event)
    return match_recorded(config, recorded)
