"""Compare the recipe of a run with that of a command, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict

from virnucpro.core.errors import ResumeError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import OptionName, join_texts, join_words, with_options
from virnucpro.core.recipe import EncoderSpec, Recipe
from virnucpro.store.manifest import Manifest


def check_same_recipe(manifest: Manifest, recipe: Recipe) -> None:
    """Check that this is the run's recipe.

    Raises:
        ResumeError: the recipes differ. The message lists the differences.
    """
    if changes := list_changes(manifest, recipe):
        raise ResumeError(
            with_options(
                "this folder contains a run with other settings: {changes}",
                changes=join_texts("; ", changes),
            ),
            hint=with_options(
                "use the old options ({resume} without {model} keeps the model) and the same "
                "version of VirNucPro, choose another {output_dir}, or start again with "
                "{force}"
            ),
        )


def list_changes(manifest: Manifest, recipe: Recipe) -> list[str]:
    """List the differences from the run's recipe, such as "--layer was 6, now 3"."""
    return [change for _, change in _changes(manifest, recipe)]


def list_changed_files(manifest: Manifest, recipe: Recipe) -> list[str]:
    """List the differences that come from files on this machine, not from options."""
    return [change for name, change in _changes(manifest, recipe) if name in _FILES]


def _changes(manifest: Manifest, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the name of each field that differs, and the difference in words."""
    old_recipe = manifest.recipe
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
        if changes := list(_changed_outputs(old, new, owner)):
            left_out.append("heads_sha256")  # other outputs may need other heads
            yield from changes
        yield from _changed_fields(old, new, left_out, owner)


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
    """Yield the difference between outputs, if there are several with other names."""
    if not (before.extra or now.extra):
        return
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
            yield name, join_texts("", (_shown_name(name), owner, f" {change}"))


# fields that depend on files -> their names in messages
_FILES = {
    "encoders": "the models",
    "sha256": "the SHA-256 of the model",
    "heads_sha256": "the SHA-256 of the heads of the model",
    "head_sha256": "the SHA-256 of the head",
    "scorer_sha256": "the SHA-256 of the scorer",
    "known_sha256": "the SHA-256 of the index of known viruses",
}


def _shown_name(field: str) -> str:
    """Return a field's name in messages."""
    options = (
        "input_type",
        "chunk_size",
        "min_length",
        "genetic_code",
        "layer",
        "pooling",
        "precision",
        "store",
        "keep_vectors",
    )
    if field in options:
        return join_words([OptionName(field, is_bare=True)])
    return _FILES.get(field, field)


def _shorten(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = printable(value) or "none"
    return f"{text[:12]}..." if len(text) == 64 else text  # a hash
