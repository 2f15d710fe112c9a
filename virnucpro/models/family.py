"""Metadata for model families and their published files, available without importing their code."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any


class ModelFile(StrEnum):
    """Files in a model's folder."""

    CONFIG = "config.json"
    WEIGHTS = "model.safetensors"
    INDEX = "model.safetensors.index.json"  # index of weights in several files
    TOKENIZER = "tokenizer.json"
    # of a trained model
    HEAD = "head.safetensors"
    REGIONS = "regions.json"
    LEARNED = "encoder.safetensors"  # a learned network, or only the name of an ESM-2 model


def join_digests(digests: Sequence[str]) -> str:
    """Combine the SHA-256 of weight files, in alphabetical order of their names, into one."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A published file: its address, size and hash."""

    url: str
    n_bytes: int | None = None  # None: not recorded
    max_bytes: int = 1 << 28  # limit if n_bytes is None
    sha256: str = ""
    md5: str = ""  # used where no SHA-256 is recorded
    git_blob: str = ""  # git id, used where no SHA-256 is recorded

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published model: its dimensions, and its files with the weights first."""

    n_layers: int
    dim: int
    n_heads: int
    n_parameters: int = 0  # 0: computed from the dimensions
    files: tuple[RemoteFile, ...]  # several files share a folder with the model's name
    folder_sha256: str = ""  # for model.safetensors, if a single file is also published as a folder
    repository: str = ""  # folder name on the Hugging Face Hub
    contact_head: RemoteFile | None = None  # next to a single file, if published on its own

    @property
    def is_file(self) -> bool:
        return len(self.files) == 1

    @property
    def digests(self) -> frozenset[str]:
        """Return the valid SHA-256 values for the weights. Empty if none is recorded."""
        if self.is_file:
            recorded = self.files[0].sha256
            return frozenset({recorded, self.folder_sha256} - {""} if recorded else ())
        weights = sorted(self._weights, key=lambda file: file.name)
        if not weights or not all(file.sha256 for file in weights):
            return frozenset()
        return frozenset({join_digests([file.sha256 for file in weights])})

    @property
    def hub_files(self) -> dict[str, str]:
        """Map the file names of its Hub folder to the SHA-256, which only weight files have."""
        if self.is_file:
            return {ModelFile.WEIGHTS: self.folder_sha256, ModelFile.CONFIG: ""}
        digests = {file.name: file.sha256 for file in self._weights}
        return {file.name: digests.get(file.name, "") for file in self.files}

    @property
    def _weights(self) -> list[RemoteFile]:
        return [file for file in self.files if file.name.endswith(".safetensors")]


@dataclass(frozen=True, slots=True)
class Family:
    """An encoder family: its metadata, available without importing its code.

    The family's module has ``load(spec, weights, device) -> Encoder``. Some families need more:

    - If models are named by their files, the module has ``inspect(path, on_event) -> Model |
      None``, which returns None for a path from another family.
    - If the family publishes models, the module has ``footprint_of(published) -> Footprint``, which
      needs no download, and ``open_published(name, published, path) -> Model``, which rejects any
      other model.

    ``reference`` names a module for ``models check`` with ``load_reference(spec, weights, device)
    -> Reference`` (``validation.roundings``): an independent program that computes the same
    vectors. ``works.json`` next to the module lists the works to cite for a result, as in
    ``results.report``.
    """

    module: str
    letters_per_token: float = 1.0
    extra_tokens: int = 2  # tokens added to each sequence
    has_files: bool = False  # True if the module has ``inspect``
    published: dict[str, Published] = field(default_factory=dict)
    reference: str = ""  # empty: the vectors cannot be checked

    @property
    def works(self) -> Path | None:
        """Return the file with the works to cite for this family, if it has one."""
        package = self.module.rpartition(".")[0]
        spec = find_spec(package) if package else None  # imports only the parent packages
        file = Path(spec.origin).with_name("works.json") if spec and spec.origin else None
        return file if file and file.is_file() else None

    @property
    def implementation(self) -> Any:  # noqa: ANN401 - a module
        return import_module(self.module)
