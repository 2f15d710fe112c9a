"""Readers, which turn the residues of a frame into one vector for a classifier.

A reader maps a ``PackedBatch`` to (n_frames, ``width``) float32. Its encoder gives each token a
vector. The encoder is ESM-2, or a table of fixed rows as a baseline for the language model. The
architecture combines the vectors of a frame into one. The result for a frame does not depend on its
batch.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from Bio.Align import substitution_matrices
from torch import Tensor, nn

from virnucpro.models.esm2.config import N_TOKENS
from virnucpro.models.esm2.model import ESM2
from virnucpro.models.options import Architecture, Encoding
from virnucpro.models.packing import PackedBatch, to_device
from virnucpro.models.pooling import mean_pool
from virnucpro.models.protein_tokens import AMINO_ACID_TOKENS, EXTRA_TOKENS, RESIDUES, tokenize

AMINO_ACIDS = RESIDUES[:20]


class _ResidueTable(nn.Module):
    """An encoder without context: one fixed row per token."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows: Tensor
        self.register_buffer("rows", rows.float())

    def forward(self, batch: PackedBatch) -> Tensor:
        """Look up the row of each token. -> (n_tokens, n_channels)"""
        return self.rows[to_device(batch.tokens, self.rows.device)]


def _one_hot() -> Tensor:
    """Encode each of the 20 amino acids in its own channel, and all else in one. (N_TOKENS, 21)"""
    rows = torch.zeros(N_TOKENS, len(AMINO_ACIDS) + 1)
    rows[:, -1] = 1
    rows[AMINO_ACID_TOKENS] = torch.eye(*rows[AMINO_ACID_TOKENS].shape)
    return rows


def _blosum62() -> Tensor:
    """Score each residue against the 20 amino acids (Henikoff and Henikoff 1992).

    Scores are divided by their root mean square. Letters without a row are scored as X. (N_TOKENS,
    20)
    """
    matrix = substitution_matrices.load("BLOSUM62")  # type: ignore[no-untyped-call]
    columns = [matrix.alphabet.index(letter) for letter in AMINO_ACIDS]
    scores = np.asarray(matrix)[:, columns]
    rows = np.tile(scores[matrix.alphabet.index("X")], (N_TOKENS, 1))
    for letter, token in zip(RESIDUES, tokenize([RESIDUES])[1:-1], strict=True):
        if letter in matrix.alphabet:
            rows[token] = scores[matrix.alphabet.index(letter)]
    return torch.from_numpy(rows / np.sqrt(np.mean(scores[columns] ** 2)))


class FrameNetwork(nn.Module):
    """Average the residues of each frame, or run a network over them in order.

    Without an encoder the width is 0, and the classifier sees only the composition.
    """

    def __init__(
        self,
        encoder: nn.Module | None,
        width: int,
        network: _ConvNet | _LSTM | _UNet | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.width = width
        self.network = network

    def forward(self, batch: PackedBatch) -> Tensor:
        if self.encoder is None:
            return torch.empty(len(batch.cu_seqlens) - 1, 0)
        hidden = self.encoder(batch)
        if self.network is None:
            return mean_pool(hidden, batch)
        out: Tensor = self.network(*_pad_residues(hidden, batch))
        return out.float()

    @staticmethod
    def create(
        encoding: Encoding, architecture: Architecture, esm2: ESM2 | None = None
    ) -> FrameNetwork:
        """Make a reader with random weights. ``esm2`` is the model for the encoding "esm2"."""
        encoder: ESM2 | _ResidueTable
        match encoding:
            case "composition":
                return FrameNetwork(None, 0)
            case "esm2":
                assert esm2 is not None, "an encoding by a model"
                encoder = esm2
                n_channels = esm2.shape.dim
            case "onehot" | "blosum62":
                rows = _one_hot() if encoding == "onehot" else _blosum62()
                encoder = _ResidueTable(rows)
                n_channels = rows.shape[1]
        if architecture == "mlp":
            return FrameNetwork(encoder, n_channels)
        network = {"cnn": _ConvNet, "lstm": _LSTM, "unet": _UNet}[architecture](n_channels)
        return FrameNetwork(encoder, network.width, network)


def _pad_residues(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Copy each protein into its own row, zero-padded at the end.

    (n_tokens, n_channels) -> (n, longest, n_channels), and lengths in residues, (n,)
    """
    longest = batch.max_seqlen - EXTRA_TOKENS
    rows = [
        F.pad(
            hidden[first : first + n * seqlen].view(n, seqlen, -1)[:, 1:-1],
            (0, 0, 0, longest - (seqlen - EXTRA_TOKENS)),
        )
        for first, n, seqlen in batch.runs
    ]
    lengths = np.diff(batch.cu_seqlens.astype(np.int64)) - EXTRA_TOKENS
    return torch.cat(rows), to_device(lengths, hidden.device)


class _ConvNet(nn.Module):
    """Residual convolutions with increasing dilation."""

    def __init__(self, n_channels: int, hidden: int = 64) -> None:
        super().__init__()
        self.width = 2 * hidden
        self.stem = nn.Conv1d(n_channels, hidden, 1)
        self.blocks = nn.ModuleList(_ConvBlock(hidden, 9, dilation) for dilation in (1, 2, 4))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Run the convolutions and pool. (n, longest, n_channels), (n,) -> (n, width)"""
        mask = _mask(x, lengths)
        x = self.stem(x.mT) * mask
        for block in self.blocks:
            x = block(x, mask)
        return _pool(x, mask)


class _LSTM(nn.Module):
    """A bidirectional LSTM with one layer per direction (Hochreiter and Schmidhuber 1997).

    Both directions read the padding after a protein, never before it. On a CPU this is six times as
    fast as packed sequences.
    """

    def __init__(self, n_channels: int, hidden: int = 128) -> None:
        super().__init__()
        self.width = 4 * hidden
        self.onward = nn.LSTM(n_channels, hidden, batch_first=True)
        self.homeward = nn.LSTM(n_channels, hidden, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Run both directions and pool. (n, longest, n_channels), (n,) -> (n, width)"""
        rows = torch.arange(len(x), device=x.device)[:, None]
        places = torch.arange(x.shape[1], device=x.device)
        mirrored = (lengths[:, None] - 1 - places) % x.shape[1]  # padding stays at the end
        homeward = self.homeward(x[rows, mirrored])[0][rows, mirrored]
        out = torch.cat([self.onward(x)[0], homeward], dim=2)
        return _pool(out.mT, _mask(x, lengths))


class _UNet(nn.Module):
    """A U-Net down to a quarter of the length, with a skip connection at each level.

    After Ronneberger et al. 2015 (doi:10.1007/978-3-319-24574-4_28), in one dimension.
    """

    def __init__(self, n_channels: int, hidden: tuple[int, int, int] = (64, 96, 128)) -> None:
        super().__init__()
        self.width = 2 * hidden[0]
        levels = list(pairwise(hidden))
        self.stem = nn.Conv1d(n_channels, hidden[0], 1)
        self.on_the_way_down = nn.ModuleList(_ConvBlock(upper, 5) for upper, _ in levels)
        self.downs = nn.ModuleList(nn.Conv1d(upper, lower, 2, stride=2) for upper, lower in levels)
        self.bottom = _ConvBlock(hidden[-1], 5)
        self.ups = nn.ModuleList(nn.Conv1d(lower + upper, upper, 1) for upper, lower in levels)
        self.on_the_way_up = nn.ModuleList(_ConvBlock(upper, 5) for upper, _ in levels)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Run the U-Net and pool. (n, longest, n_channels), (n,) -> (n, width)"""
        x = F.pad(x, (0, 0, 0, -x.shape[1] % 2 ** len(self.downs)))  # so that it halves evenly
        mask = _mask(x, lengths)
        x = self.stem(x.mT) * mask
        skips = []
        for block, down in zip(self.on_the_way_down, self.downs, strict=True):
            x = block(x, mask)
            skips.append((x, mask))
            mask = mask[..., ::2]
            x = down(x) * mask
        x = self.bottom(x, mask)
        for up, block in zip(reversed(self.ups), reversed(self.on_the_way_up), strict=True):
            beside, mask = skips.pop()
            x = up(torch.cat([x.repeat_interleave(2, dim=-1), beside], dim=1)) * mask
            x = block(x, mask)
        return _pool(x, mask)


class _ConvBlock(nn.Module):
    """A residual convolution. (n, channels, length) -> the same

    Padding is 0 on both sides, like the positions beyond the ends of a protein.
    """

    def __init__(self, channels: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.conv = nn.Conv1d(channels, channels, kernel, padding="same", dilation=dilation)
        self.out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = F.gelu(self.conv(self.norm(x.mT).mT * mask))
        summed: Tensor = x + self.out(hidden) * mask
        return summed


def _pool(x: Tensor, mask: Tensor) -> Tensor:
    """Concatenate the mean and the maximum over the residues.

    (n, channels, length), (n, 1, length) -> (n, 2 * channels)
    """
    mean = (x * mask).sum(dim=-1) / mask.sum(dim=-1)
    largest = x.masked_fill(mask == 0, -torch.inf).amax(dim=-1)
    return torch.cat([mean, largest], dim=1)


def _mask(x: Tensor, lengths: Tensor) -> Tensor:
    """Return 1 for residues, 0 for padding. (n, longest, n_channels), (n,) -> (n, 1, longest)"""
    places = torch.arange(x.shape[1], device=x.device)
    return (places < lengths[:, None])[:, None].to(x.dtype)
