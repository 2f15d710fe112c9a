"""Resolve the options of ``extract``: model, outputs, devices, and records to embed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from virnucpro.core.errors import UsageError
from virnucpro.core.events import EventHandler
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import USUAL_CHUNK_SIZE
from virnucpro.models.lookup import model_names
from virnucpro.models.output_choice import OutputChoice
from virnucpro.models.torch_build import require_torch
from virnucpro.store.hdf5_check import check_connector
from virnucpro.store.manifest import Manifest
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.model_config import open_models, prepare_encoders, resolve_engine
from virnucpro.workflows.options import name_anywhere
from virnucpro.workflows.run_config import (
    RunConfig,
    check_inputs,
    make_recipe,
    match_recorded,
    name_model,
    part_options,
    read_recorded,
    takes_default,
)

if TYPE_CHECKING:
    from virnucpro.engine.work_options import WorkOptions


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExtractConfig(RunConfig):
    """One resolved ``extract``."""

    options: ExtractOptions


def resolve_extract(options: ExtractOptions, on_event: EventHandler) -> ExtractConfig:
    """Resolve everything that an extraction needs, or raise the first error.

    Raises:
        VirnucproError: see ``errors``.
    """
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
        recipe=make_recipe(options, encoders.specs, chunk_size, keep_vectors=True),
        resources=engine.resources,
        checkpoints=engine.checkpoints,
        weights=encoders.weights,
        announcements=engine.announce(options, encoders),
        compromises=engine.compromises,
        models=tuple(map(name_anywhere, names)),
        rules={"all": 0} if recorded is None else recorded.embed,
    )
