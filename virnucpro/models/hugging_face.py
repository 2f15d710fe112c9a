"""Find models that the Hugging Face libraries downloaded. Nothing is downloaded or written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of downloaded models, from the variables that huggingface_hub reads.

    None: no variable gives the folder, not even HOME.

    >>> cache_folder({"HOME": "/home/ann"}), cache_folder({"HOME": "/home/ann", "HF_HOME": "/hf"})
    (PosixPath('/home/ann/.cache/huggingface/hub'), PosixPath('/hf/hub'))
    """
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(environ[name])
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"], "hub")
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"], "huggingface", "hub")
    if environ.get("HOME"):
        return Path(environ["HOME"], ".cache", "huggingface", "hub")
    return None


def find_snapshot(cache: Path, repository: str, files: Mapping[str, str]) -> Path | None:
    """Return the folder with a complete copy of a model, or None.

    Args:
        cache: the folder from ``cache_folder``.
        repository: the name on the Hub, such as ``facebook/esm2_t33_650M_UR50D``.
        files: the model's file names, with the SHA-256 of weight files and "" for the others. The
            cache names large files by SHA-256, so other revisions are skipped without being read.
    """
    snapshots = cache / f"models--{repository.replace('/', '--')}" / "snapshots"
    for folder in sorted(snapshots.glob("*")):
        if all(_is_cached(folder / name, sha256) for name, sha256 in files.items()):
            return folder
    return None


def _is_cached(file: Path, sha256: str) -> bool:
    if not file.is_file():
        return False
    # A cache without links contains the file itself. Its hash is checked when it is read.
    return not sha256 or file.resolve().name in (sha256, file.name)
