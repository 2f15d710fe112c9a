"""What is known about a family of models and its published files without importing its code."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of weights in several files


def join_digests(digests: Sequence[str]) -> str:
    """The SHA-256 of a model by those of its weight files, in alphabetical order of their names."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file that others publish: its address, size and hash."""

    url: str
    n_bytes: int | None = None  # None: not recorded
    most_bytes: int = 1 << 28  # limit if n_bytes is None
    sha256: str = ""
    md5: str = ""  # where no SHA-256 is recorded
    git_blob: str = ""  # where no SHA-256 is recorded: its id in git

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A model that others publish: its dimensions, and its files, the weights first."""

    n_layers: int
    dim: int
    n_heads: int
    n_parameters: int = 0  # 0: by the dimensions
    files: tuple[RemoteFile, ...]  # several lie in a folder of that name
    folder_sha256: str = ""  # of model.safetensors, if one file is published as a folder too
    repository: str = ""  # of the folder on the Hub of Hugging Face

    @property
    def is_file(self) -> bool:
        return len(self.files) == 1

    @property
    def digests(self) -> frozenset[str]:
        """The possible SHA-256 of the weights; empty if none is recorded."""
        if self.is_file:
            recorded = self.files[0].sha256
            return frozenset({recorded, self.folder_sha256} - {""} if recorded else ())
        weights = sorted(self._weights, key=lambda file: file.name)
        if not weights or not all(file.sha256 for file in weights):
            return frozenset()
        return frozenset({join_digests([file.sha256 for file in weights])})

    @property
    def hub_files(self) -> dict[str, str]:
        """The files of its folder on the Hub by name, with the SHA-256 of those with weights."""
        if self.is_file:
            return {WEIGHTS: self.folder_sha256, CONFIG: ""}
        digests = {file.name: file.sha256 for file in self._weights}
        return {file.name: digests.get(file.name, "") for file in self.files}

    @property
    def _weights(self) -> list[RemoteFile]:
        return [file for file in self.files if file.name.endswith(".safetensors")]


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of encoder: what is known without importing its code.

    Its module has ``load(spec, weights, device) -> Encoder``. If models are named by their files,
    it has ``inspect(path, on_event) -> Model | None``: None if the path is of another family. If
    it publishes models, it has ``footprint_of(published) -> Footprint``, which needs no
    download, and ``open_published(name, published, path) -> Model``, which refuses any other model.

    ``reference`` is a module for ``models check`` with ``load_reference(spec, weights, device) ->
    Reference`` (``validation.roundings``): another program that computes the same vectors.
    ``works.json`` next to the module has the works to cite for a result, as in ``results.report``.
    """

    module: str
    letters_per_token: float = 1.0
    extra_tokens: int = 2  # tokens added to each sequence
    has_files: bool = False  # True if its module has ``inspect``
    published: dict[str, Published] = field(default_factory=dict)
    reference: str = ""  # none: its vectors cannot be checked

    @property
    def works(self) -> Path | None:
        """The file of the works to cite for a result by this family, if it has one."""
        package = self.module.rpartition(".")[0]
        spec = find_spec(package) if package else None  # imports only the packages around it
        file = Path(spec.origin).with_name("works.json") if spec and spec.origin else None
        return file if file and file.is_file() else None

    @property
    def implementation(self) -> Any:  # noqa: ANN401 - a module
        return import_module(self.module)
