"""The resolved configuration of a run, and the steps of resolving one that every run shares.

All checks that are possible happen here, before a file is read or a process started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from virnucpro.core.errors import ResumeError, UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.option_schema import convert_options
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import EmbeddingRule, EncoderSpec, InputType, Recipe
from virnucpro.engine.base import Resources
from virnucpro.engine.options import EngineOptions
from virnucpro.models.names import DEFAULT_MODEL, current_name
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.sequences.inputs import InputFile
from virnucpro.store.manifest import Manifest
from virnucpro.workflows.options import RunOptions, restore_options

if TYPE_CHECKING:
    from virnucpro.engine.work_options import WorkOptions


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
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
    max_merged_bytes: int | None = None  # None: the limit of ``merged_features``

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


_Config = TypeVar("_Config", bound=RunConfig)


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
        InputFile.check(path)
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


def make_recipe(
    options: RunOptions,
    encoders: tuple[EncoderSpec, ...],
    chunk_size: int,
    shortest: int = 0,
    hashes: Mapping[str, str] | None = None,
    *,
    keep_vectors: bool,
) -> Recipe:
    """Build the recipe for nucleotides.

    Args:
        shortest: bases of the shortest record that the classifier can read.
        hashes: field name -> SHA-256 of the head and the scorer.
        keep_vectors: False: only the scores of a head are kept.
    """
    return convert_options(  # recipe fields have the names of their options
        options,
        Recipe,
        input_type="nucleotide",
        chunk_size=chunk_size,
        min_length=max(options.min_length, shortest),
        encoders=encoders,
        keep_vectors=keep_vectors,
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
