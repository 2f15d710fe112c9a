"""The registry of encoder families: their published models and the modules with their code.

A family lists published models by name. A bundle combines some of them with a head. Their files,
sizes and hashes are in ``published.json``. Neither is more than names and figures, so that shell
completion does not import torch.

fair-esm publishes no file sizes or hashes, but others recorded them. Sizes and SHA-256 come from
github.com/Synthyra/FastPLMs @ 077c176 (``src/fastplms/models.toml``). For each ``.pt`` a second
project records the same SHA-256 (650M: github.com/haddocking/DeepRank-Ab). For 15B only an MD5 is
recorded, in a list that several projects share. The MD5 for 8M in that list is also in
github.com/uci-cbcl/esm-efficient (``tests/conftest.py``).

ESM C (MIT license) has revisions from May 2026, in the layout of Biohub's own programs.
github.com/Synthyra/FastPLMs @ 1f78282 (``src/fastplms/models.toml``) records the SHA-256 of all
weights and the git ids of all configurations. For 6B three more public projects record the same
SHA-256, with the file sizes and the hashes of configuration and index. No project records the sizes
of 300M and 600M.

Three public projects record the same hash and size for the DNABERT-S weights. Hashes and sizes of
the other DNABERT-S files were computed from the files (zhihan1996/DNABERT-S on the Hugging Face Hub
@ 00e47f9, Apache-2.0). Heads are identified by their git ids (github.com/Li-Jing-1997/VirNucPro @
0f93f27, MIT).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options

# Other packages import these three names from this module.
from virnucpro.models.family import Family as Family
from virnucpro.models.family import Published as Published
from virnucpro.models.family import RemoteFile as RemoteFile
from virnucpro.models.names import DEFAULT_MODEL, TINY_MODEL

# Models that VirNucPro no longer has, by family. Options and run.json may still name them.
REMOVED_MODELS = {"codons": "cnn_virnucpro"}
REMOVED_FILES = {"virnucpro_codons": "cnn_virnucpro"}  # by the metadata entry of the file
PLUGINS = "virnucpro.encoders"  # entry point group: each value is a Family


_FACTS = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def _read_published(family: str) -> dict[str, Published]:
    """Return the published models of a family, by name."""
    published = {}
    for name, facts in _FACTS["models"][family].items():
        files = tuple(RemoteFile(**file) for file in facts["files"])
        head = RemoteFile(**facts["contact_head"]) if "contact_head" in facts else None
        published[name] = Published(**{**facts, "files": files, "contact_head": head})
    return published


FAMILIES: dict[str, Family] = {  # the first one gets, and may reject, unrecognised paths
    "esm2": Family(
        "virnucpro.models.esm2.model_files",
        has_files=True,
        published=_read_published("esm2"),
        reference="virnucpro.models.validation.reference",
    ),
    "esmc": Family(
        "virnucpro.models.esmc.model_files",
        has_files=True,
        published=_read_published("esmc"),
        reference="virnucpro.models.esmc.reference",
    ),
    "fair-esm": Family("virnucpro.models.validation.reference"),
    "learned": Family("virnucpro.models.trained_encoder", has_files=True),
    "dnabert-s": Family(
        "virnucpro.models.dnabert_s.encoder",
        letters_per_token=4.6,
        has_files=True,
        published=_read_published("dnabert-s"),
    ),
    "composition": Family("virnucpro.models.trained_encoder"),
}


def installed_families() -> dict[str, Family]:
    """Return the families of other packages, by name."""
    from virnucpro.core.plugins import find_plugins

    return {name: load() for name, load in find_plugins(PLUGINS, Family).items()}


def find_family(name: str) -> Family:
    """Find a family by name.

    Raises:
        UnavailableError: neither this program nor an installed package has this family.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    from virnucpro.core.plugins import find_plugins

    if load := find_plugins(PLUGINS, Family).get(name):
        return load()
    raise UnavailableError(
        f"no package here has the encoder {printable(name)}",
        hint=f"install the package that the run was begun with (entry points {PLUGINS})",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bundle:
    """Encoders, and the head that reads their concatenated vectors for a frame."""

    encoders: tuple[str, ...]  # names, in vector order
    head: RemoteFile
    chunk_size: int  # bases


BUNDLES: Mapping[str, _Bundle] = {
    name: _Bundle(
        encoders=tuple(facts["encoders"]),
        head=RemoteFile(**facts["head"]),
        chunk_size=facts["chunk_size"],
    )
    for name, facts in _FACTS["bundles"].items()
}
NAMES = (
    *(name for family in FAMILIES.values() for name in family.published),
    *BUNDLES,
    TINY_MODEL,
)


def removed_model_hint() -> str:
    """Return what to use instead of a removed model."""
    return with_options(
        "Without {model}, predict calls by the scorer and the index of known viruses, and extract "
        "embeds with {default}",
        default=DEFAULT_MODEL,
    )
