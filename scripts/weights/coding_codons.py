"""Fit codon weights that separate genes from other open frames, for ``orfs.c``.

    python scripts/weights/scorer_manifest.py CATALOGUE.tsv.gz ... > manifest.tsv
    python scripts/weights/coding_codons.py manifest.tsv

Prints the array ``CODING``. Comments after it give the accuracy on held-out windows: how often the
frame of a gene has the largest sum among the open frames of the same bases.

Fragments are sampled as for the scorer. The longest stop-free stretch of a fragment counts as a
gene if it has 250 codons. A window of 50 of its codons competes with the other stop-free frames
over the same bases. The weights maximise the probability of the gene's frame, a softmax of the
sums. The seed is fixed: on the same machine, the same data gives the same array.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sampling import collect_records, sample_fragments
from torch import Tensor

from virnucpro.core.numeric import BoolArray, FloatArray
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.sequences.open_codes import UNKNOWN, Digits, genetic_code
from virnucpro.training.labelled_data import read_data_manifest, read_records
from virnucpro.viral.windows import codon_codes, is_stop, opposite_strand

N_BASES = 3000  # per fragment
N_FRAGMENTS = 30_000  # per label
MIN_GENE_CODONS = 250  # of a stretch that counts as a gene
WINDOW_CODONS = 50
N_CODONS = 64
HELD_OUT_EVERY = 5  # one window in five is for validation
STEPS_PER_UNIT = 32  # of the quantized weights
SEED = 1
L2_PENALTY = 1e-4
GC_EDGES = (0.35, 0.5, 0.6, 0.7)
KINGDOM_SHARES = {
    "phages": 0.4,
    "archaeal viruses": 0.05,
    "RNA+ viruses": 0.2,
    "RNA- viruses": 0.1,
    "dsRNA viruses": 0.1,
    "dsDNA viruses of eukaryotes": 0.1,
    "ssDNA viruses of eukaryotes": 0.05,
    "bacteria": 0.5,
    "bins": 0.1,
    "archaea": 0.15,
    "protists": 0.1,
    "transcripts": 0.1,
    "fungi": 0.05,
}


Windows = NDArray[np.float32]  # (n, 6, 64) codons of each frame, the gene first; NaN: not open

IS_STOP = np.array([bool(is_stop(STANDARD)[genetic_code(codon)]) for codon in STANDARD.codons])
N_GC = np.array([codon.count("G") + codon.count("C") for codon in STANDARD.codons])


def longest_stretch(codes: Digits) -> tuple[int, int]:
    """Return the first base and the codons of the longest stop-free stretch of a strand."""
    best = (0, 0)
    stops = is_stop(STANDARD).astype(np.bool_)[codes]
    for frame in range(3):
        frame_stops = stops[frame::3]
        ends = np.concatenate([[-1], np.flatnonzero(frame_stops), [len(frame_stops)]])
        n_codons = np.diff(ends) - 1
        longest = int(n_codons.argmax())
        if n_codons[longest] > best[1]:
            best = frame + 3 * int(ends[longest] + 1), int(n_codons[longest])
    return best


def read_window(bases: Digits, rng: np.random.Generator) -> Windows | None:
    """Count the codons of a window of a gene, and of the other frames there. -> (6, 64)

    Returns None without a gene, with an unknown base in the window, or without another open frame.
    """
    strands = [bases, opposite_strand(bases)]
    longest = [longest_stretch(codon_codes(strand)) for strand in strands]
    strand, (start, n_codons) = max(enumerate(longest), key=lambda gene: gene[1][1])
    if n_codons < MIN_GENE_CODONS:
        return None
    first = start + 3 * int(rng.integers(1, n_codons - WINDOW_CODONS - 1))
    window = strands[strand][first - 2 : first + 3 * WINDOW_CODONS + 3]
    if (window == UNKNOWN).any():
        return None
    other = opposite_strand(window)
    frames = [window[2:], window, window[1:], other[3:], other[4:], other[5:]]
    counts = np.stack([_count_codons(frame) for frame in frames])
    counts[counts[:, IS_STOP].any(axis=1)] = np.nan
    return counts if np.isfinite(counts[0]).all() and np.isfinite(counts[1:]).any() else None


def _count_codons(bases: Digits) -> NDArray[np.float32]:
    """Count the codons AAA, AAC ... among the first ``WINDOW_CODONS``. (64,)"""
    codons = bases[: 3 * WINDOW_CODONS].reshape(WINDOW_CODONS, 3).astype(np.int64)
    return np.bincount(codons @ (16, 4, 1), minlength=N_CODONS).astype(np.float32)


def read_windows(manifest: Path) -> Windows:
    rng = np.random.default_rng(SEED)
    collection = collect_records(read_records(read_data_manifest(manifest)))
    fragments = sample_fragments(collection, N_BASES, N_FRAGMENTS, KINGDOM_SHARES, rng)
    windows = [read_window(bases, rng) for bases in fragments.digits]
    return np.stack([window for window in windows if window is not None])


def fit_weights(windows: Windows) -> FloatArray:
    """Fit the weight of each codon. (64,)"""
    is_open = torch.from_numpy(np.isfinite(windows[:, :, 0]))
    counts = torch.from_numpy(np.nan_to_num(windows))
    weights = torch.zeros(N_CODONS, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        sums = (counts @ weights).masked_fill(~is_open, -torch.inf)
        value: Tensor = -sums.log_softmax(1)[:, 0].mean() + L2_PENALTY * (weights**2).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach().numpy().astype(np.float64)


def is_correct(windows: Windows, weights: FloatArray) -> BoolArray:
    """Return whether the gene's frame has a larger sum than all other open frames. (n,)"""
    sums = np.nan_to_num(windows @ weights, nan=-np.inf)
    return np.asarray(sums[:, 0] > sums[:, 1:].max(axis=1))


def main(manifest: Path) -> None:
    windows = read_windows(manifest)
    is_measured = np.arange(len(windows)) % HELD_OUT_EVERY == 0
    weights = np.rint(STEPS_PER_UNIT * fit_weights(windows[~is_measured])).astype(np.int64)
    print("static const int8_t CODING[N_CODONS] = {")
    for row in weights.reshape(4, 16):
        print("    " + ", ".join(map(str, row.tolist())) + ",")
    print("};")
    measured = windows[is_measured]
    gc = np.digitize(measured[:, 0] @ N_GC / (3 * WINDOW_CODONS), GC_EDGES)
    correct = is_correct(measured, weights.astype(np.float64))
    for number, (low, high) in enumerate(pairwise([0, *GC_EDGES, 1])):
        bin_results = correct[gc == number]
        print(f"/* GC {low} to {high}: {bin_results.mean():.2f} of {len(bin_results)} windows */")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
