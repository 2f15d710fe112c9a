"""Find the inputs of a finished run that no longer exist."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from virnucpro.core.atomic_io import hash_file
from virnucpro.core.errors import VirnucproError
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.inputs import InputFile
from virnucpro.store.checksums import Outputs
from virnucpro.store.manifest import Manifest
from virnucpro.workflows.options import RunOptions


def find_lost_inputs(options: RunOptions, recorded: Manifest | None) -> list[str]:
    """List a run's missing inputs, if it can be called again without them.

    This requires complete scores, and that no named input is new or changed.
    """
    rundir = open_run_dir(options.output_dir)
    if not options.resume or recorded is None or not rundir.scores.is_dir():
        return []
    existing = {file.path: file for file in recorded.inputs if Path(file.path).is_file()}
    missing = [file.display_name for file in recorded.inputs if file.path not in existing]
    is_enough = (
        missing
        and all(_is_known(path, recorded) for path in options.input)
        and all(hash_file(Path(file.path)) == file.sha256 for file in existing.values())
        and Outputs(rundir).read_kept()
    )
    return missing if is_enough else []


def _is_known(path: Path, recorded: Manifest) -> bool:
    """Return True if a path is an input of the run, or a folder with only such inputs."""
    input_paths = [
        Path(name) for file in recorded.inputs for name in (file.path, file.name) if name
    ]
    files = list[InputFile]()
    if path.exists():
        with suppress(VirnucproError):  # the folder may no longer contain any input
            files = InputFile.complete(path)
    if files:
        return all(Path(file.path) in input_paths for file in files)
    return any(path.absolute() in (input_path, *input_path.parents) for input_path in input_paths)
