"""The content of ``run.json``: the recipe and the inputs that a resume needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from virnucpro._version import __version__
from virnucpro.core.json_checksum import add_checksum
from virnucpro.core.recipe import EmbeddingRule, Recipe
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import FastaRecord
from virnucpro.sequences.fasta import Block, Span, StreamCache, parse_block
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.samples import RunIds
from virnucpro.sequences.taken_names import NO_TAKEN_NAMES, TakenNames, find_taken_names


@dataclass(frozen=True, slots=True, eq=False)
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
    taken: TakenNames = field(default=NO_TAKEN_NAMES, compare=False)
    ids: RunIds = field(init=False, repr=False, compare=False)  # follows from the other fields

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
        added = frozenset(file.sample for file in self.inputs if file.generation)
        ids = RunIds(self.is_qualified, frozenset(self.replaced), added)
        object.__setattr__(self, "ids", ids)

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


def write_manifest(path: Path, copies: Path, manifest: Manifest, facts: Mapping[str, Any]) -> None:
    """Write the manifest, and facts about the run that a resume does not need."""
    folder = copies.resolve()
    content = {
        **facts,
        "virnucpro_version": __version__,
        "fingerprint": manifest.recipe.fingerprint,
        "recipe": asdict(manifest.recipe),
        "inputs": [_to_json(file, folder) for file in manifest.inputs],
        "replaced": manifest.replaced,
        "qualified": manifest.is_qualified,
        "refused": [_to_json(file, folder) for file in manifest.refused],
        "models": manifest.models,
        "embed": list(manifest.embed.items()),
    }
    SafeDir(path.parent).write_file(path, add_checksum(content))


def _to_json(file: InputFile, copies: Path) -> dict[str, Any]:
    """Convert an input to JSON. Copies get relative paths, so that the run folder can be moved."""
    temporary = ("stamp", "parsed")  # valid only in this process
    values = {
        name: getattr(file, name)
        for name in InputFile.__dataclass_fields__
        if name not in temporary
    }
    folder, name = os.path.split(file.path)
    if folder == str(copies):
        values["path"] = str(Path(copies.name, name))
    return values
