"""The models that have names for everybody: the embedded one, the checkpoints of fair-esm, models
of other families, and bundles of encoders with a head.

Knows names and figures only, so that shell completion need not wait for torch.

fair-esm publishes no sizes and no hashes of its files; others recorded them. Sizes and SHA-256 are
those of github.com/Synthyra/FastPLMs @ 077c176 (``src/fastplms/models.toml``); for each ``.pt``
a second project records the same SHA-256 (650M: github.com/haddocking/DeepRank-Ab). Of 15B only an
MD5 is on record, in a list that several projects share; that list's MD5 of 8M is also the one of
github.com/uci-cbcl/esm-efficient (``tests/conftest.py``).

The hash and the size of DNABERT-S's weights are recorded alike by three public projects; those of
its other files are of the files themselves (zhihan1996/DNABERT-S of the Hugging Face Hub @ 00e47f9,
Apache-2.0). The heads are known by their ids in git (github.com/Li-Jing-1997/VirNucPro @ 0f93f27,
MIT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from virnucpro.ground.config import Footprint

EMBEDDED = "esm2_virnucpro"
BASE_URL = "https://dl.fbaipublicfiles.com/fair-esm/models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published checkpoint: the shape of the model, and what its file must be."""

    n_layers: int
    dim: int
    n_heads: int
    n_bytes: int | None = None  # None: not recorded
    sha256: str = ""
    md5: str = ""  # where no SHA-256 is recorded
    folder_sha256: str = ""  # of model.safetensors in the Hugging Face folder facebook/NAME

    @property
    def digests(self) -> frozenset[str]:
        """The SHA-256 that it may have, as a file or a folder; none if none is recorded."""
        return frozenset({self.sha256, self.folder_sha256} - {""} if self.sha256 else ())


PUBLISHED: Mapping[str, Published] = {
    "esm2_t6_8M_UR50D": Published(
        n_layers=6,
        dim=320,
        n_heads=20,
        n_bytes=30_099_493,
        sha256="46f002a9870c9bdecd0ea887acb1f9a38a6b561e8f8bf8a6990b679b9d31b928",
        folder_sha256="24c5fa474c48f3b754b86efe752d5f189d2bcd88190fa2270fc92b2ef3034189",
    ),
    "esm2_t12_35M_UR50D": Published(
        n_layers=12,
        dim=480,
        n_heads=20,
        n_bytes=134_095_705,
        sha256="7f21e80e61d16a71735163ef555d3009afb0c98da74c48e29df08606973cc55e",
        folder_sha256="e35647818e0e064351d4531ed480d225a002567b4b2b93ad3a9246d753150fc0",
    ),
    "esm2_t30_150M_UR50D": Published(
        n_layers=30,
        dim=640,
        n_heads=20,
        n_bytes=592_774_773,
        sha256="881c7176cf198ef8dec26a3c375d40eb58d0c33df95c22562ca6cc6d3f812c62",
        folder_sha256="c3f1da8aea53bddd32c246c86168c23b9fd72341fb9db9a94436f855f5053566",
    ),
    "esm2_t33_650M_UR50D": Published(
        n_layers=33,
        dim=1280,
        n_heads=20,
        n_bytes=2_604_537_549,
        sha256="ea9d0522b335a8778dea6535a65301f10208dece28cd5865482b0b1fc446168c",
        folder_sha256="a08adabb949fa67ad3c14b509d04fd60368b35007b0095e3358f81200c4f4db0",
    ),
    "esm2_t36_3B_UR50D": Published(
        n_layers=36,
        dim=2560,
        n_heads=40,
        n_bytes=5_678_116_398,
        sha256="7de8b4082ba15891959ab368b77ce3886697af1efb16d3c9e9e7b0c5d3f07500",
    ),
    "esm2_t48_15B_UR50D": Published(
        n_layers=48,
        dim=5120,
        n_heads=40,
        md5="af61a9c0b792ae50e244cde443b7f4ac",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file that others publish: its address, and what it must be."""

    url: str
    n_bytes: int | None = None  # None: not recorded
    most_bytes: int = 1 << 28  # bound where it is not
    sha256: str = ""
    git_blob: str = ""  # where no SHA-256 is recorded: its id in git

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFolder:
    """A model in a folder of several files; its family tells it by its content."""

    n_layers: int
    width: str  # of a vector, for people
    footprint: Footprint
    files: tuple[RemoteFile, ...]


_DNABERT_S = (
    "https://huggingface.co/zhihan1996/DNABERT-S/resolve/00e47f96cdea35e4b6f5df89e5419cbe47d490c6"
)
FOLDERS: Mapping[str, PublishedFolder] = {
    "dnabert-s": PublishedFolder(
        n_layers=12,
        width="768 in 12 heads of 64",
        footprint=Footprint(
            n_parameters=116_477_952,
            file_bytes=468_320_053,
            bytes_per_parameter=6,
            bytes_per_token=98_304,
            filling_tokens=65_536,
        ),
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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Encoders whose vectors of a frame stand side by side, and the head that reads them."""

    encoders: tuple[str, ...]  # names, in the order of the vectors
    head: RemoteFile
    chunk_size: int  # bases


_HEADS = (
    "https://raw.githubusercontent.com/Li-Jing-1997/VirNucPro/"
    "0f93f2755a7ea1acd3ff1bcf182892f960ef3326"
)
BUNDLES: Mapping[str, Bundle] = {
    f"virnucpro-{chunk_size}": Bundle(
        encoders=("dnabert-s", "esm2_t36_3B_UR50D"),
        head=RemoteFile(url=f"{_HEADS}/{chunk_size}_model.pth", git_blob=git_blob),
        chunk_size=chunk_size,
    )
    for chunk_size, git_blob in (
        (500, "fc35d5ef9f1f4564eea7036f34f4f8ec6000d33d"),
        (300, "a0b5b85e7c1e44f00cde146d091beb82b2c8e855"),
    )
}
NAMES = (EMBEDDED, *PUBLISHED, *FOLDERS, *BUNDLES)
