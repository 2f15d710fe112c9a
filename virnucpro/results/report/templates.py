"""Load the page templates, compiled once per installation.

Compiling them takes a tenth of the time of a small run. Python keeps compiled modules in
``__pycache__``. Compiled templates are kept there too, by version of Jinja and hash of the source.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path

from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket


class _CompiledTemplates(FileSystemBytecodeCache):
    """The compiled templates. They are not kept if Python may not keep compiled modules."""

    def dump_bytecode(self, bucket: Bucket) -> None:
        if not sys.dont_write_bytecode:
            with suppress(OSError):  # the folder is missing or read-only, or the disk is full
                super().dump_bytecode(bucket)


def load_templates(folder: Path, functions: Mapping[str, Callable[..., object]]) -> Environment:
    """Return the templates of a folder, with the functions that format values."""
    compiled = Path(cache_from_source(__file__)).parent
    templates = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        # A line with only a tag leaves no line in the page.
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        bytecode_cache=_CompiledTemplates(str(compiled)),
    )
    templates.globals.update(functions)
    return templates
