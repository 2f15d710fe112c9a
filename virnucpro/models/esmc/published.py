"""The published ESM C models (MIT license): their dimensions and files on the Hugging Face Hub.

Revisions are from May 2026, in the layout of Biohub's own programs. github.com/Synthyra/FastPLMs @
1f78282 (``src/fastplms/models.toml``) records the SHA-256 of all weights and the git ids of all
configurations. For 6B three more public projects record the same SHA-256, with the file sizes and
the hashes of configuration and index. No project records the sizes of 300M and 600M.
"""

from __future__ import annotations

from virnucpro.models.family import CONFIG, INDEX, WEIGHTS, Family, Published, RemoteFile

_HUB = "https://huggingface.co"


def _single_file(
    repository: str, revision: str, sizes: tuple[int, int, int], sha256: str, config: str
) -> Published:
    """Describe a model with one weight file. ``sizes``: layers, dimensions, heads."""
    n_layers, dim, n_heads = sizes
    folder = f"{_HUB}/{repository}/resolve/{revision}"
    return Published(
        n_layers=n_layers,
        dim=dim,
        n_heads=n_heads,
        files=(
            RemoteFile(url=f"{folder}/{WEIGHTS}", most_bytes=4_000_000_000, sha256=sha256),
            RemoteFile(url=f"{folder}/{CONFIG}", most_bytes=1 << 16, git_blob=config),
        ),
        repository=repository,
    )


_6B = f"{_HUB}/biohub/ESMC-6B/resolve/45b0fa5d7fb06faefbd5e3b89bdcef35d564e79a"
_6B_WEIGHTS = (
    (4_864_457_920, "bd90149ff223e6ac1a0cac6147a5ae0df20d3a21df4f65356a1f19cd14f4aa8a"),
    (4_971_211_344, "f75e2144d8269fe2eb4b3e0823fb089b94f176d8024153e85b8fb573a42294fa"),
    (4_863_752_992, "f699f01ecc9691d9c6470492765fe54b8b5d2e9f277c139e89427433ffdfe0b2"),
    (4_971_211_344, "46add1b7be098bbfdc3073884851ba3057f1b33ea23a158b650a37007dabd13d"),
    (4_863_752_992, "1e1cb62f060a34e18f54a31a76683ef888b8cec59e73315f5b31d25d45a1f88c"),
    (873_762_296, "56c73e13ae96e777ce65eee99364056069ef93b646470f352f83c5f1037b1b18"),
)
PUBLISHED = {
    "esmc-300m": _single_file(
        "biohub/ESMC-300M",
        "a59b831785f907e96e6a246b1d142bfb76df31ee",
        (30, 960, 15),
        "0772d8fe64bb25e14fe6f23b80e3c9a7d215d0da3c6cba5bd356d7c0e0bb22cc",
        config="9a49eacf4e65c39f74381f0f0d240e3b89ef43d7",
    ),
    "esmc-600m": _single_file(
        "biohub/ESMC-600M",
        "a7e82012c83126b9eedb055fea9fa84b6c02f094",
        (36, 1152, 18),
        "e4232c30fd35fe2f57051ec88a703996ac94520580b4b836894207a3d45d9ff8",
        config="71c8241dc28a5fb636248267a0927c0242b264c1",
    ),
    "esmc-6b": Published(
        n_layers=80,
        dim=2560,
        n_heads=40,
        files=(
            *(
                RemoteFile(
                    url=f"{_6B}/model-{number:05}-of-{len(_6B_WEIGHTS):05}.safetensors",
                    n_bytes=n_bytes,
                    sha256=sha256,
                )
                for number, (n_bytes, sha256) in enumerate(_6B_WEIGHTS, start=1)
            ),
            RemoteFile(
                url=f"{_6B}/{INDEX}",
                n_bytes=97_349,
                sha256="6846456e20e6ee2c37461f7bfc21d316d69bdaf165b925691afcb39e583244da",
            ),
            RemoteFile(
                url=f"{_6B}/{CONFIG}",
                n_bytes=341,
                sha256="c5566fab6a17fd674141331fe75de917b7904d99fb7a410d2b1593c21e576913",
            ),
        ),
        repository="biohub/ESMC-6B",
    ),
}
FAMILY = Family(
    "virnucpro.models.esmc.model_files",
    has_files=True,
    published=PUBLISHED,
    reference="virnucpro.models.esmc.reference",
)
