"""Read ``run.json`` of an earlier start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from virnucpro._version import __version__
from virnucpro.core.atomic_io import disk_error, read_bounded
from virnucpro.core.errors import ResumeError, UsageError
from virnucpro.core.json_checksum import parse_checked
from virnucpro.core.logging import printable
from virnucpro.core.option_text import join_texts, with_options
from virnucpro.core.recipe import SHARD_FORMAT, EncoderSpec, Recipe
from virnucpro.models.names import current_name
from virnucpro.models.registry import REMOVED_MODELS, removed_model_hint
from virnucpro.sequences.inputs import InputFile
from virnucpro.store.manifest import Manifest


def read_manifest(path: Path, copies: Path) -> Manifest:
    """Read the manifest. ``copies`` is the folder of copied inputs.

    Raises:
        ResumeError: it is corrupt, or from another version.
        OutputError, StorageError: it cannot be read now.
    """
    if not path.is_file():  # reading a pipe would never end
        raise _corrupt_manifest_error(path, "it is not a plain file")
    version: object = __version__
    try:
        stored = parse_checked(read_bounded(path))
        version = stored["virnucpro_version"]
        if stored["recipe"].get("shard_format") != SHARD_FORMAT:
            raise _version_error(path.parent, version)
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
            raise _version_error(path.parent, version) from error
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise _corrupt_manifest_error(path, why) from error


def _encoder_spec(stored: Mapping[str, Any], folder: Path) -> EncoderSpec:
    """Read an encoder. A name from an earlier version becomes the present one.

    Raises:
        ResumeError: VirNucPro no longer has the encoder.
    """
    another_folder = with_options("choose another {output_dir}, or start again with {force}")
    if removed := REMOVED_MODELS.get(stored["family"]):
        raise ResumeError(
            f"{printable(folder)} contains a run with the model {removed}, which VirNucPro no "
            "longer has",
            hint=join_texts(". ", [another_folder, removed_model_hint()]),
        )
    spec = EncoderSpec(**stored)
    return replace(spec, model=current_name(spec.model))


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


def _version_error(folder: Path, version: object) -> ResumeError:
    program = f"another version of virnucpro, {printable(version)}"
    if version == __version__:
        program = f"an earlier state of virnucpro {__version__}"
    return ResumeError(
        f"{printable(folder)} contains a run of {program}; "
        f"virnucpro {__version__} cannot resume it",
        hint=with_options(
            "finish it with that version, choose another {output_dir}, or start with {force}"
        ),
    )
