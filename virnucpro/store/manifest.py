"""Read and write ``run.json``: the recipe and the inputs that a resume needs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from virnucpro._version import __version__
from virnucpro.core.atomic_io import disk_error, read_bounded
from virnucpro.core.errors import ResumeError, UsageError
from virnucpro.core.json_checksum import add_checksum, parse_checked
from virnucpro.core.logging import printable
from virnucpro.core.option_text import OptionName, join_texts, join_words, with_options
from virnucpro.core.recipe import SHARD_FORMAT, EmbeddingRule, EncoderSpec, Recipe
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import FastaRecord
from virnucpro.models.registry import REMOVED_MODELS, current_name, removed_model_hint
from virnucpro.sequences.fasta import Block, Span, StreamCache, parse_block
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.samples import RunIds
from virnucpro.sequences.taken_names import NONE_TAKEN, TakenNames, find_taken_names


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``run.json`` that a resume needs."""

    recipe: Recipe
    inputs: tuple[InputFile, ...]
    replaced: tuple[str, ...] = ()  # failed record ids that a later input replaces
    is_qualified: bool = False  # ids are written as FILE:ID
    refused: tuple[InputFile, ...] = ()  # unreadable files
    models: tuple[str, ...] = ()  # encoder models: a name or an absolute path
    cut: str = ""  # calling rule, in words
    # --embed rule -> first input generation at or after the rule; each rule selects records that
    # no earlier rule selects
    embed: Mapping[EmbeddingRule, int] = field(default_factory=lambda: {"all": 0})
    # derived names that are ids in the run; recomputed at each start
    taken: TakenNames = field(default=NONE_TAKEN, compare=False)

    def __post_init__(self) -> None:
        numbers = {file.generation for file in self.inputs}
        if numbers and numbers != set(range(len(numbers))):
            raise ValueError("the generations of the inputs have gaps")
        if not all(isinstance(record_id, str) for record_id in self.replaced):
            raise TypeError("a replaced record is named by its id")
        if not isinstance(self.is_qualified, bool):
            raise TypeError("ids are written with their file, or they are not")
        if not self.embed or not self.embed.keys() <= set(get_args(EmbeddingRule)):
            raise ValueError("no rule says which records are embedded")

    @property
    def ids(self) -> RunIds:
        added = frozenset(file.sample for file in self.inputs if file.generation)
        return RunIds(self.is_qualified, frozenset(self.replaced), added)

    @property
    def n_generations(self) -> int:
        return len({file.generation for file in self.inputs})

    @property
    def embed_rules(self) -> str:
        """Return the run's --embed rules for messages, or "" if every record is embedded."""
        return "" if "all" in self.embed else " or ".join(self.embed)

    @property
    def series(self) -> list[tuple[int, int]]:
        """List the generation and rule index of each series of shards, in order of appearance.

        Each series is cut separately, so no later generation or rule changes it.
        """
        arrivals = []
        for rule_index, first in enumerate(self.embed.values()):
            for generation in range(self.n_generations):
                is_earlier = generation < first  # the inputs came before the rule
                time = 2 * first - 1 if is_earlier else 2 * generation
                arrivals.append((time, rule_index, generation))
        return [(generation, rule_index) for _, rule_index, generation in sorted(arrivals)]

    def blocks(self, spans: Iterable[tuple[int, Span]], streams: StreamCache) -> Iterator[Block]:
        """Read the records in spans of inputs, with their run ids.

        Raises:
            InputError, InputMissingError: as ``InputFile.blocks``.
        """
        for index, span in spans:
            yield from self.ids.blocks(self.inputs[index], span, streams)

    def with_taken_names(self) -> Manifest:
        """Return the same manifest with the derived names that are ids in the run.

        The inputs are read only if one of them may have such an id.

        Raises:
            InputError, InputMissingError: as ``InputFile.blocks``.
        """
        has_derived = self.recipe.input_type == "nucleotide"
        if not (has_derived and any(file.may_take_names for file in self.inputs)):
            return self
        blocks = chain.from_iterable(parse_block(self.ids.blocks(file)) for file in self.inputs)
        return replace(self, taken=find_taken_names(blocks))

    def check_same_recipe(self, recipe: Recipe) -> None:
        """Check that this is the run's recipe.

        Raises:
            ResumeError: the recipes differ. The message lists the differences.
        """
        if changes := self.changes(recipe):
            raise ResumeError(
                with_options(
                    "this folder holds a run with other settings: {changes}",
                    changes=join_texts("; ", changes),
                ),
                hint=with_options(
                    "use the old options ({resume} without {model} keeps the model) and the same "
                    "version of VirNucPro, choose another {output_dir}, or start again with "
                    "{force}"
                ),
            )

    def changes(self, recipe: Recipe) -> list[str]:
        """List the differences from the run's recipe, such as "--layer was 6, now 3"."""
        return [change for _, change in self._changes(recipe)]

    def changed_files(self, recipe: Recipe) -> list[str]:
        """List the differences that come from files on this machine, not from options."""
        return [change for name, change in self._changes(recipe) if name in _FILES]

    def _changes(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        """Yield the name of each field that differs, and the difference in words."""
        old_recipe = self.recipe
        old_families = [encoder.family for encoder in old_recipe.encoders]
        if old_families != [encoder.family for encoder in recipe.encoders]:
            was, now = _encoder_names(old_recipe, recipe)
            yield "encoders", f"it has {was}, not {now}"
            yield from _changed_fields(old_recipe, recipe, _FILES)
            return
        yield from _changed_fields(old_recipe, recipe, ("encoders",))
        for old, new in zip(old_recipe.encoders, recipe.encoders, strict=True):
            owner = f" of {new.model}" if len(recipe.encoders) > 1 else ""
            left_out = [*new.implied, "extra"]  # its types follow from other fields
            if old.extra or new.extra:
                left_out += ["layer", "pooling"]
                yield from _changed_outputs(old, new, owner)
            yield from _changed_fields(old, new, left_out, owner)

    def latest(self) -> dict[str, int]:
        """Map each replaced record to the last generation that has it."""
        replaced = frozenset(self.replaced)
        later = [file for file in self.inputs if file.generation] if replaced else []
        latest: dict[str, int] = {}
        for file in sorted(later, key=lambda file: file.generation):
            for record in self.ids.read(file):
                if record.id in replaced:
                    latest[record.id] = file.generation
        return latest

    def records(self, inputs: Sequence[InputFile]) -> Iterator[FastaRecord]:
        """Yield each record in these inputs once, in table order."""
        latest = self.latest()
        for file in sorted(inputs, key=lambda file: file.generation):
            for record in self.ids.read(file):
                if latest.get(record.id, file.generation) == file.generation:
                    yield record


def read_manifest(path: Path, copies: Path) -> Manifest | None:
    """Read the manifest, if the file exists. ``copies`` is the folder of copied inputs.

    Raises:
        ResumeError: it is corrupt, or from another version.
        OutputError, StorageError: it cannot be read now.
    """
    if not path.exists():
        return None
    if not path.is_file():  # reading a pipe would never end
        raise _corrupt_manifest_error(path, "it is not a plain file")
    version: object = __version__
    try:
        stored = parse_checked(read_bounded(path))
        version = stored["virnucpro_version"]
        if stored["recipe"].get("shard_format") != SHARD_FORMAT:
            raise _of_another_version(path.parent, version)
        facts = {name: {**stored.get(name, {})} for name in ("counts", "cut")}
        encoders = tuple(_encoder_spec(one, path.parent) for one in stored["recipe"]["encoders"])
        recipe = Recipe(**{**stored["recipe"], "encoders": encoders})
        if recipe.fingerprint != stored["fingerprint"]:
            raise ValueError("its recipe does not have the fingerprint that was stored with it")
        return Manifest(
            recipe=recipe,
            inputs=tuple(_from_json(file, copies) for file in stored["inputs"]),
            replaced=tuple(stored["replaced"]),
            is_qualified=stored.get("qualified", False),
            refused=tuple(_from_json(file, copies) for file in stored.get("refused", ())),
            models=tuple(current_name(str(name)) for name in stored.get("models", ())),
            cut=str(facts["counts"].get("cut", "")),
            embed={rule: int(first) for rule, first in stored.get("embed", [("all", 0)])},
        )
    except OSError as error:
        raise disk_error(error, path) from error
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        if version != __version__:
            raise _of_another_version(path.parent, version) from error
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise _corrupt_manifest_error(path, why) from error


def write_manifest(path: Path, copies: Path, manifest: Manifest, facts: Mapping[str, Any]) -> None:
    """Write the manifest, and facts about the run that a resume does not need."""
    content = {
        **facts,
        "virnucpro_version": __version__,
        "fingerprint": manifest.recipe.fingerprint,
        "recipe": asdict(manifest.recipe),
        "inputs": [_to_json(file, copies) for file in manifest.inputs],
        "replaced": manifest.replaced,
        "qualified": manifest.is_qualified,
        "refused": [_to_json(file, copies) for file in manifest.refused],
        "models": manifest.models,
        "embed": list(manifest.embed.items()),
    }
    SafeDir(path.parent).write_file(path, add_checksum(content))


def _encoder_spec(stored: Mapping[str, Any], folder: Path) -> EncoderSpec:
    """Read an encoder. A name from an earlier version becomes the present one.

    Raises:
        ResumeError: VirNucPro no longer has the encoder.
    """
    if removed := REMOVED_MODELS.get(stored["family"]):
        raise ResumeError(
            f"{printable(folder)} contains a run with the model {removed}, which VirNucPro no "
            "longer has",
            hint=join_texts(". ", [_ANOTHER_FOLDER, removed_model_hint()]),
        )
    spec = EncoderSpec(**stored)
    return replace(spec, model=current_name(spec.model))


def _to_json(file: InputFile, copies: Path) -> dict[str, Any]:
    """Convert an input to JSON. Copies get relative paths, so that the run folder can be moved."""
    path = Path(file.path)
    folder = copies.resolve()
    if path.parent == folder:
        path = path.relative_to(folder.parent)
    fields = {**asdict(file), "path": str(path)}
    del fields["stamp"]  # only valid for this start
    return fields


def _from_json(stored: Mapping[str, Any], copies: Path) -> InputFile:
    path = copies.parent.resolve() / stored["path"]
    if b"\0" in os.fsencode(path):
        raise ValueError("no file can have the name of an input")
    return InputFile(**{**stored, "path": str(path)})


def _corrupt_manifest_error(manifest: Path, why: object) -> ResumeError:
    return ResumeError(
        f"{printable(manifest)} is damaged: {printable(why)}",
        hint=with_options(
            "restore a copy of it, start again with {force}, or choose another {output_dir}"
        ),
    )


def _of_another_version(folder: Path, version: object) -> ResumeError:
    program = f"another version of virnucpro, {printable(version)}"
    if version == __version__:
        program = f"an earlier state of virnucpro {__version__}"
    return ResumeError(
        f"{printable(folder)} holds a run of {program}; virnucpro {__version__} cannot resume it",
        hint=with_options(
            "finish it with that version, choose another {output_dir}, or start with {force}"
        ),
    )


def _encoder_names(before: Recipe, now: Recipe) -> list[str]:
    """Name the encoders of both recipes, with the family if equal names have different families."""
    names = [printable(recipe.reader) for recipe in (before, now)]
    if len(set(names)) > 1:
        return names
    qualified = []
    for name, recipe in zip(names, (before, now), strict=True):
        families = " and ".join(encoder.family for encoder in recipe.encoders)
        qualified.append(f"{name} ({printable(families)})")
    return qualified


def _changed_outputs(
    before: EncoderSpec, now: EncoderSpec, owner: str
) -> Iterator[tuple[str, str]]:
    """Yield the difference between outputs, if they have other names."""
    old = ", ".join(output.name for output in before.outputs)
    new = ", ".join(output.name for output in now.outputs)
    if old != new:
        yield "extra", f"the outputs{owner} were {old}, now {new}"


def _changed_fields(
    before: Recipe | EncoderSpec,
    now: Recipe | EncoderSpec,
    left_out: Collection[str],
    owner: str = "",
) -> Iterator[tuple[str, str]]:
    old = asdict(before)
    new = asdict(now)
    for name in new:
        if old[name] != new[name] and name not in left_out:
            change = f"was {_shorten(old[name])}, now {_shorten(new[name])}"
            shown = _SHOWN.get(name, name)
            yield name, join_texts("", (shown, owner, f" {change}"))


_ANOTHER_FOLDER = with_options("choose another {output_dir}, or start again with {force}")
_OPTIONS = (
    "input_type",
    "chunk_size",
    "min_length",
    "genetic_code",
    "layer",
    "pooling",
    "precision",
    "store",
)
# fields that depend on files -> their names in messages
_FILES = {
    "encoders": "the models",
    "sha256": "the SHA-256 of the model",
    "heads_sha256": "the SHA-256 of the heads of the model",
    "head_sha256": "the SHA-256 of the head",
    "scorer_sha256": "the SHA-256 of the scorer",
    "known_sha256": "the SHA-256 of the index of known viruses",
}
_SHOWN: dict[str, str] = {
    **_FILES,
    **{name: join_words([OptionName(name, is_bare=True)]) for name in _OPTIONS},
}


def _shorten(value: object) -> str:
    text = printable(value) or "none"
    return f"{text[:12]}..." if len(text) == 64 else text  # a hash
