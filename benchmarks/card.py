"""Measure a run on a GPU with hardly any free memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from timing import FAILURES, Setting, proteins_of, reason_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FullRow:
    """A run on a GPU with ``free_bytes`` free, compared with the same run on an empty GPU."""

    model: str
    n_proteins: int
    free_bytes: int | None  # None: there is no GPU to fill
    n_smaller: int | None = None  # how often its batches became smaller
    n_other_bits: int | None = None  # vectors that differ
    largest_distance: float | None = None  # relative L2
    reason: str = ""


def fill_card(setting: Setting, model: str, n_tokens: int, free_bytes: int) -> FullRow:
    """Embed the same proteins with enough memory and with hardly any."""
    proteins = proteins_of("six-frame-500", n_tokens, seed=5)
    has_card = setting.device.startswith("cuda")
    row = FullRow(
        model=model, n_proteins=len(proteins), free_bytes=free_bytes if has_card else None
    )
    with TemporaryDirectory(prefix="virnucpro-measure-") as folder:
        fasta = Path(folder) / "proteins.faa"
        fasta.write_text("".join(f">p{i}\n{text}\n" for i, text in enumerate(proteins)))
        try:
            roomy = _embed(setting, fasta, Path(folder) / "roomy")
            taken = _take(setting.device, free_bytes) if has_card else None
            tight = _embed(setting, fasta, Path(folder) / "tight")
            del taken
        except subprocess.CalledProcessError as error:
            return replace(row, reason=" ".join(error.stderr.split()))
        except FAILURES as error:
            return replace(row, reason=reason_of(error))
        log = (Path(folder) / "tight" / "virnucpro.log").read_text(encoding="utf-8")
    distances = np.linalg.norm(tight - roomy, axis=1) / np.linalg.norm(roomy, axis=1)
    return replace(
        row,
        n_smaller=log.count("out of memory; batches now have"),
        n_other_bits=int((tight != roomy).any(axis=1).sum()),
        largest_distance=float(distances.max()),
    )


def _take(device: str, free_bytes: int) -> torch.Tensor:
    """Occupy the memory of a GPU, except for ``free_bytes``."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return torch.empty(max(0, free - free_bytes), dtype=torch.uint8, device=device)


def _embed(setting: Setting, fasta: Path, output: Path) -> NDArray[np.float32]:
    """Embed in a separate run; return the vectors in the order of the proteins."""
    kind, _, index = setting.device.partition(":")
    where = ["--gpus", index or "0"] if kind == "cuda" else ["--device", kind, "--workers", "1"]
    command = [
        *(sys.executable, "-m", "virnucpro", "extract", "--quiet", "--input", str(fasta)),
        *("--output-dir", str(output), "--input-type", "protein", *where),
        *("--model", str(setting.checkpoint), "--esm-batch-size", str(setting.tokens_per_batch)),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    with h5py.File(output / "features.h5") as file:
        names = [name.decode() for name in file["ids"]]
        vectors: NDArray[np.float32] = file["embeddings"][:]
    return vectors[np.argsort([int(name.removeprefix("p")) for name in names])]
