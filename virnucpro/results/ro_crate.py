"""Describe a finished run as an RO-Crate: a folder with machine-readable metadata.

The metadata come from ``run.json`` and follow RO-Crate 1.1 (w3id.org/ro/crate/1.1) and the profile
Process Run Crate 0.5, in which the run is a ``CreateAction``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from virnucpro.core.option_text import with_options
from virnucpro.results.outputs import OutputFile, all_outputs, open_run_dir
from virnucpro.results.report.run_json import RunJson
from virnucpro.store.checksums import Outputs
from virnucpro.store.run_dir import RunDir

_PROGRAM = "#virnucpro"
_RUN = "#run"
_LICENSE = "#license"
_MEDIA_TYPES = {
    ".tsv": "text/tab-separated-values",
    ".txt": "text/tab-separated-values",
    ".csv": "text/tab-separated-values",
    ".json": "application/json",
    ".html": "text/html",
    ".h5": "application/x-hdf5",
    ".gz": "application/gzip",
}

Entity = dict[str, Any]


def write_ro_crate(folder: Path) -> Path:
    """Write ``ro-crate-metadata.json`` into a finished run's folder, and return its path.

    Raises:
        InputMissingError: the folder has no run, or it is not finished.
        InputError: an output was changed.
        OutputError: another process is using the folder, or it cannot be written.
    """
    run_dir = open_run_dir(folder)
    if not run_dir.manifest.is_file():
        raise run_dir.missing_run_error(with_options("give the {output_dir} of one"))
    with run_dir.locked():
        is_extract = RunJson.read(run_dir.manifest).text("recipe", "command") == "extract"
        run_dir.check_finished("extract" if is_extract else "predict")
        Outputs(run_dir).check()
        text = json.dumps(make_ro_crate(run_dir), indent=2) + "\n"
        run_dir.write_file(run_dir.crate, text.encode("utf-8", "backslashreplace"))
    return run_dir.crate


def make_ro_crate(run_dir: RunDir) -> Entity:
    """Return the metadata of a run as JSON-LD."""
    profile = "https://w3id.org/ro/wfrun/process/0.5"
    facts = RunJson.read(run_dir.manifest)
    files = list(_output_files(run_dir, facts))
    inputs = list(_input_files(facts))
    return {
        "@context": "https://w3id.org/ro/crate/1.1/context",
        "@graph": [
            {
                "@id": run_dir.crate.name,
                "@type": "CreativeWork",
                "conformsTo": {"@id": "https://w3id.org/ro/crate/1.1"},
                "about": {"@id": "./"},
            },
            {
                "@id": "./",
                "@type": "Dataset",
                "conformsTo": {"@id": profile},
                "name": f"VirNucPro {facts.text('recipe', 'command')}",
                "description": f"Results of virnucpro {facts.text('recipe', 'command')}",
                "datePublished": _time(facts),
                "license": {"@id": _LICENSE},
                "hasPart": _references(files),
                "mentions": {"@id": _RUN},
            },
            {
                "@id": profile,
                "@type": "CreativeWork",
                "name": "Process Run Crate",
                "version": "0.5",
            },
            {
                "@id": _LICENSE,
                "@type": "CreativeWork",
                "name": "not stated",
                "description": "The owner of the results decides on their license.",
            },
            {
                "@id": _PROGRAM,
                "@type": "SoftwareApplication",
                "name": "VirNucPro",
                "softwareVersion": facts.text("virnucpro_version"),
            },
            {
                "@id": _RUN,
                "@type": "CreateAction",
                "name": f"virnucpro {facts.text('recipe', 'command')}",
                "description": " ".join(map(str, facts.sequence("argv"))),
                "endTime": _time(facts),
                "actionStatus": "http://schema.org/CompletedActionStatus",
                "instrument": {"@id": _PROGRAM},
                "object": _references(inputs),
                "result": _references(files),
            },
            *inputs,
            *files,
        ],
    }


def _time(facts: RunJson) -> str:
    """Return the end of the run in ISO 8601, with a colon in the offset from UTC."""
    text = facts.text("time")
    return f"{text[:-2]}:{text[-2:]}"


def _references(entities: list[Entity]) -> list[Entity]:
    return [{"@id": entity["@id"]} for entity in entities]


def _input_files(facts: RunJson) -> Iterator[Entity]:
    """Yield the inputs. They are not in the folder, and named by their content."""
    for number, file in enumerate(facts.iter_section("inputs"), 1):
        yield {
            "@id": f"#input_{number}",
            "@type": "CreativeWork",
            "name": file.text("name") or file.text("path"),
            "sha256": file.text("sha256"),
            "contentSize": str(file.number("n_bytes")),
        }


def _output_files(run_dir: RunDir, facts: RunJson) -> Iterator[Entity]:
    about = {output.file: output for output in all_outputs()}
    for name, digest in sorted(facts.section(Outputs.field).items()):
        path = run_dir.root / name
        if path.is_file():
            # feature files have a checksum that names its algorithm
            term = "identifier" if ":" in str(digest) else "sha256"
            yield _file_entity(path, name, about.get(name)) | {term: str(digest)}
    yield _file_entity(run_dir.manifest, run_dir.manifest.name, None)


def _file_entity(path: Path, name: str, output: OutputFile | None) -> Entity:
    """Describe a file in the folder. Its id is its path, percent-encoded as a URI."""
    entity: Entity = {
        "@id": quote(name),
        "@type": "File",
        "name": name,
        "contentSize": str(path.stat().st_size),
        "encodingFormat": _MEDIA_TYPES.get(path.suffix, "text/plain"),
    }
    if output is not None and output.about:
        entity["description"] = output.about
    return entity
