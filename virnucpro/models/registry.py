"""The registry of encoder families: their published models and the modules with their code.

A family lists published models by name. A bundle combines some of them with a head. This module
contains only names and figures, so that shell completion does not import torch.

fair-esm publishes no file sizes or hashes, but others recorded them. Sizes and SHA-256 come from
github.com/Synthyra/FastPLMs @ 077c176 (``src/fastplms/models.toml``). For each ``.pt`` a second
project records the same SHA-256 (650M: github.com/haddocking/DeepRank-Ab). For 15B only an MD5 is
recorded, in a list that several projects share. The MD5 for 8M in that list is also in
github.com/uci-cbcl/esm-efficient (``tests/conftest.py``).

Three public projects record the same hash and size for the DNABERT-S weights. Hashes and sizes of
the other DNABERT-S files were computed from the files (zhihan1996/DNABERT-S on the Hugging Face Hub
@ 00e47f9, Apache-2.0). Heads are identified by their git ids (github.com/Li-Jing-1997/VirNucPro @
0f93f27, MIT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.plugins import find_plugins
from virnucpro.models.esmc.published import FAMILY as ESMC

# Other packages import these three names from this module.
from virnucpro.models.family import Family as Family
from virnucpro.models.family import Published as Published
from virnucpro.models.family import RemoteFile as RemoteFile

DEFAULT_MODEL = "esm2_t33_650M_UR50D"  # used where a model is needed and none is named
TINY_MODEL = "virnucpro-tiny"  # built in, with a head, trained by this project
TINY_NOTICE = "built-in demonstration model, not Meta's ESM-2 weights"
NETWORK = "cnn_virnucpro"  # also built in, makes calls together with the scorer
BUILT_IN = (NETWORK, TINY_MODEL)
# Former model names. Options, heads and run.json from older versions may contain them.
EARLIER_NAMES = {"esm2_virnucpro": TINY_MODEL}
PLUGINS = "virnucpro.encoders"  # entry point group: each value is a Family


def _fair_esm(
    name: str,
    n_layers: int,
    dim: int,
    n_heads: int,
    *,
    folder_sha256: str = "",
    **file: Any,  # noqa: ANN401 - fields of RemoteFile
) -> tuple[str, Published]:
    url = f"https://dl.fbaipublicfiles.com/fair-esm/models/{name}.pt"
    return name, Published(
        n_layers=n_layers,
        dim=dim,
        n_heads=n_heads,
        files=(RemoteFile(url=url, **file),),
        folder_sha256=folder_sha256,
        repository=f"facebook/{name}" if folder_sha256 else "",
    )


_ESM2 = dict(
    (
        _fair_esm(
            "esm2_t6_8M_UR50D",
            *(6, 320, 20),
            n_bytes=30_099_493,
            sha256="46f002a9870c9bdecd0ea887acb1f9a38a6b561e8f8bf8a6990b679b9d31b928",
            folder_sha256="24c5fa474c48f3b754b86efe752d5f189d2bcd88190fa2270fc92b2ef3034189",
        ),
        _fair_esm(
            "esm2_t12_35M_UR50D",
            *(12, 480, 20),
            n_bytes=134_095_705,
            sha256="7f21e80e61d16a71735163ef555d3009afb0c98da74c48e29df08606973cc55e",
            folder_sha256="e35647818e0e064351d4531ed480d225a002567b4b2b93ad3a9246d753150fc0",
        ),
        _fair_esm(
            "esm2_t30_150M_UR50D",
            *(30, 640, 20),
            n_bytes=592_774_773,
            sha256="881c7176cf198ef8dec26a3c375d40eb58d0c33df95c22562ca6cc6d3f812c62",
            folder_sha256="c3f1da8aea53bddd32c246c86168c23b9fd72341fb9db9a94436f855f5053566",
        ),
        _fair_esm(
            "esm2_t33_650M_UR50D",
            *(33, 1280, 20),
            n_bytes=2_604_537_549,
            sha256="ea9d0522b335a8778dea6535a65301f10208dece28cd5865482b0b1fc446168c",
            folder_sha256="a08adabb949fa67ad3c14b509d04fd60368b35007b0095e3358f81200c4f4db0",
        ),
        _fair_esm(
            "esm2_t36_3B_UR50D",
            *(36, 2560, 40),
            n_bytes=5_678_116_398,
            sha256="7de8b4082ba15891959ab368b77ce3886697af1efb16d3c9e9e7b0c5d3f07500",
        ),
        _fair_esm(
            "esm2_t48_15B_UR50D",
            *(48, 5120, 40),
            most_bytes=76_000_000_000,
            md5="af61a9c0b792ae50e244cde443b7f4ac",
        ),
    )
)
_DNABERT_S = (
    "https://huggingface.co/zhihan1996/DNABERT-S/resolve/00e47f96cdea35e4b6f5df89e5419cbe47d490c6"
)
FAMILIES: dict[str, Family] = {  # the first one gets, and may reject, unrecognised paths
    "esm2": Family(
        "virnucpro.models.esm2.model_files",
        has_files=True,
        published=_ESM2,
        reference="virnucpro.models.validation.reference",
    ),
    "esmc": ESMC,
    "fair-esm": Family("virnucpro.models.validation.reference"),
    "learned": Family("virnucpro.models.trained_encoder", has_files=True),
    "dnabert-s": Family(
        "virnucpro.models.dnabert_s.encoder",
        letters_per_token=4.6,
        has_files=True,
        published={
            "dnabert-s": Published(
                n_layers=12,
                dim=768,
                n_heads=12,
                n_parameters=116_477_952,
                files=(
                    RemoteFile(
                        url=f"{_DNABERT_S}/pytorch_model.bin",
                        n_bytes=468_320_053,
                        sha256="f3cfc3d0541859df64759e758cc4bc40fe1d5760799a7d098a9f9f09501c1e5f",
                    ),
                    RemoteFile(
                        url=f"{_DNABERT_S}/tokenizer.json",
                        n_bytes=168_203,
                        sha256="667f5a0e6e9630f7052b004784dda7c7aeba395cc4ca3c01b11b02e6aa29d7b1",
                    ),
                    RemoteFile(
                        url=f"{_DNABERT_S}/config.json",
                        n_bytes=1_025,
                        sha256="d54c142114563aa34ef7c2b54ccc921d08e50cd7c3cd69c439d5e0d2bbcfcdee",
                    ),
                ),
            ),
        },
    ),
    "composition": Family("virnucpro.models.trained_encoder"),
    "codons": Family(
        "virnucpro.models.codon_cnn",
        letters_per_token=1.5,  # a token is three bases of one strand
        extra_tokens=-2,  # no token begins at the last two bases
        has_files=True,
        reference="virnucpro.models.codon_cnn",
    ),
}


def installed_families() -> dict[str, Family]:
    """Return the families of other packages, by name."""
    return {name: load() for name, load in find_plugins(PLUGINS, Family).items()}


def find_family(name: str) -> Family:
    """Find a family by name.

    Raises:
        UnavailableError: neither this program nor an installed package has this family.
    """
    if name in FAMILIES:
        return FAMILIES[name]
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


_HEADS = (
    "https://raw.githubusercontent.com/Li-Jing-1997/VirNucPro/"
    "0f93f2755a7ea1acd3ff1bcf182892f960ef3326"
)
BUNDLES: Mapping[str, _Bundle] = {
    f"virnucpro-{chunk_size}": _Bundle(
        encoders=("dnabert-s", "esm2_t36_3B_UR50D"),
        head=RemoteFile(url=f"{_HEADS}/{chunk_size}_model.pth", git_blob=git_blob),
        chunk_size=chunk_size,
    )
    for chunk_size, git_blob in (
        (500, "fc35d5ef9f1f4564eea7036f34f4f8ec6000d33d"),
        (300, "a0b5b85e7c1e44f00cde146d091beb82b2c8e855"),
    )
}
_PUBLISHED = [name for family in FAMILIES.values() for name in family.published]
NAMES = (*_PUBLISHED, *BUNDLES, *BUILT_IN)


def current_name(model: str) -> str:
    """Return the current name of a model. Other names and paths are returned unchanged.

    >>> current_name("esm2_virnucpro"), current_name("./esm2_virnucpro")
    ('virnucpro-tiny', './esm2_virnucpro')
    """
    return EARLIER_NAMES.get(model, model)
