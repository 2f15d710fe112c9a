"""A convolutional network on the codons of both strands of a chunk, and its file format.

A token is three bases, with the three codons that begin at them. Each strand of a chunk is a
sequence of tokens. Blocks of dilated convolutions give each token a receptive field 400 bases to
each side. Sums and differences of the two strands are pooled into one vector, so the order of the
strands does not matter. The last number of the vector is the network's log-odds that the chunk is
viral. The other numbers are the features from which the log-odds are computed.

The network was trained to distinguish kinds of viruses and cells, and to predict masked codons
(``scripts/weights/train_embedded_network.py``). ``save_network`` writes the file, in safetensors.
Normalisation is folded into the weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor, nn

from virnucpro.core.atomic_io import HEAD_FILE, hash_file
from virnucpro.core.events import EventHandler
from virnucpro.core.recipe import Alphabet, EncoderSpec, Footprint, Precision
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import check_counts
from virnucpro.models.base import Model, check_intact, check_unchanged, has_prefix, read_tensors
from virnucpro.models.packing import PackedBatch, PackedEncoder, to_device, use_device
from virnucpro.models.transformer import DTYPES
from virnucpro.models.validation.roundings import Reference, add_roundings

FAMILY = "codons"
N_CODONS = 64
UNKNOWN = N_CODONS  # a codon with an unknown base, or a masked codon in training
N_FRAMES = 3
N_TAPS = 5
_N_QUERIES = 4
WEIGHTS = "model.safetensors"
_DIGITS = np.full(256, 4)  # digit per ASCII base, 4 if unknown
_DIGITS[list(b"ACGTUacgtu")] = [0, 1, 2, 3, 3] * 2
_FACTS = "virnucpro_codons"  # metadata entry
_MOST_BLOCKS = 64
_SHORTEST = 2 * N_FRAMES  # length in bases of the shortest sequence with a token
_SHORTEST_RECORD = 150  # bases: trained from 500 on, measured from 150 on
_BYTES_PER_CHANNEL = 48  # peak per token: float32 residual stream and convolution rows
_FILLING_TOKENS = 262_144  # per batch on a GPU


class CodonNetwork(nn.Module):
    """The network. Sums are float32. Products use the weights' dtype.

    Args:
        of_codon: embedding size per codon.
        channels: width per token.
        dilations: one dilation per block, in tokens.
        hidden: number of features from which the log-odds are computed, through kind logits.
        n_kinds: number of kinds with a logit.
        n_viral: the first ``n_viral`` kinds are viruses.
    """

    def __init__(
        self,
        *,
        of_codon: int,
        channels: int,
        dilations: Sequence[int],
        hidden: int,
        n_viral: int,
        n_kinds: int,
    ) -> None:
        super().__init__()
        check_counts(of_codon, channels, hidden, n_viral, n_kinds, *dilations)
        if not 0 < n_viral < n_kinds:
            raise ValueError(f"{n_viral} of {n_kinds} kinds are viruses")
        if len(dilations) > _MOST_BLOCKS or not all(0 < each < 1 << 16 for each in dilations):
            raise ValueError(f"{len(dilations)} blocks, or an impossible dilation")
        self.n_viral = n_viral
        self.codons = nn.Embedding(UNKNOWN + 1, of_codon)
        self.stem = nn.Linear(N_TAPS * N_FRAMES * of_codon, channels)
        self.blocks = nn.ModuleList(_Block(channels, dilation) for dilation in dilations)
        self.norm = _Scaling(channels)
        self.query = nn.Linear(channels, _N_QUERIES)
        self.inner = nn.Linear(2 * (_N_QUERIES + 2) * channels, hidden)
        self.kinds = nn.Linear(hidden, n_kinds)

    @property
    def sizes(self) -> dict[str, int | list[int]]:
        """Return the constructor arguments for a network of this shape."""
        return {
            "of_codon": self.codons.embedding_dim,
            "channels": self.stem.out_features,
            "dilations": [cast(_Block, block).dilation for block in self.blocks],
            "hidden": self.inner.out_features,
            "n_viral": self.n_viral,
            "n_kinds": self.kinds.out_features,
        }

    @property
    def dim(self) -> int:
        """Return the vector length."""
        return self.inner.out_features + 1

    def forward(self, chunks: Sequence[str]) -> Tensor:
        """Embed chunks of bases. n strings -> (n, dim) float32"""
        device = self.stem.weight.device
        batch, codons = _to_tokens(chunks)
        taps = _TapGatherer(batch, device)
        x = self.stem(taps.gather(self.codons(to_device(codons, device)).flatten(1), 1)).float()
        for block in self.blocks:
            x = block(x, taps)
        forward, reverse = self._pooled(self.norm(x), batch).chunk(2)
        both = torch.cat([forward + reverse, (forward - reverse).abs()], dim=1)
        inner = F.gelu(_in_float32(self.inner, both))
        kinds = _in_float32(self.kinds, inner)
        viral = kinds[:, : self.n_viral]
        cellular = kinds[:, self.n_viral :]
        log_odds = viral.logsumexp(1) - cellular.logsumexp(1)
        return torch.cat([inner, log_odds[:, None]], dim=1).float()

    def _pooled(self, x: Tensor, batch: PackedBatch) -> Tensor:
        """Pool each sequence: several weighted means, the mean and the maximum.

        (n_tokens, channels) -> (n, 6 channels)
        """
        weights = _product(self.query, x).float()
        parts = []
        for first, n, length in batch.runs:
            rows = slice(first, first + n * length)
            of_run = x[rows].reshape(n, length, -1)
            shares = weights[rows].reshape(n, length, -1).softmax(1)
            weighted = torch.einsum("nlc,nlq->nqc", of_run, shares).flatten(1)
            parts.append(torch.cat([weighted, of_run.mean(1), of_run.amax(1)], dim=1))
        return torch.cat(parts)


class _Scaling(nn.Module):
    """Scale and shift each channel, then apply GELU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.empty(channels)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x * self.scale + self.shift, approximate="tanh")


class _Block(nn.Module):
    """A five-tap convolution and a channel mixing, added to the residual stream."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.before = _Scaling(channels)
        self.conv = nn.Linear(N_TAPS * channels, channels)
        self.mix = nn.Linear(channels, channels)

    def forward(self, x: Tensor, taps: _TapGatherer) -> Tensor:
        rows = taps.gather(self.before(x).to(self.conv.weight.dtype), self.dilation)
        inner = F.gelu(self.conv(rows).float(), approximate="tanh")
        return x + _product(self.mix, inner)


def _product(linear: nn.Linear, x: Tensor) -> Tensor:
    product: Tensor = linear(x.to(linear.weight.dtype))
    return product


def _in_float32(linear: nn.Linear, x: Tensor) -> Tensor:
    """Apply a layer in float64, or in float32 on a device without float64.

    Sums over a few rows may be rounded differently from sums over many. With float64, a vector does
    not depend on its batch.
    """
    number = torch.float32 if x.device.type == "mps" else torch.float64
    return F.linear(x.to(number), linear.weight.to(number), linear.bias.to(number))


class _TapGatherer:
    """Row indices of the convolution taps, for all tokens in a batch."""

    def __init__(self, batch: PackedBatch, device: torch.device) -> None:
        lengths = np.diff(batch.cu_seqlens).astype(np.int64)
        self._position = to_device(batch.positions, device)[:, None]
        self._length = to_device(np.repeat(lengths, lengths), device)[:, None]
        self._step = torch.arange(N_TAPS, device=device) - N_TAPS // 2

    def gather(self, x: Tensor, dilation: int) -> Tensor:
        """Concatenate the rows around each token, with 0 beyond its sequence. -> (n, 5 channels)"""
        places = self._position + dilation * self._step
        is_inside = (places >= 0) & (places < self._length)
        rows = torch.arange(len(x), device=x.device)[:, None] + dilation * self._step
        rows = torch.where(is_inside, rows, len(x))
        return F.pad(x, (0, 0, 0, 1))[rows].flatten(1)


def _to_tokens(chunks: Sequence[str]) -> tuple[PackedBatch, NDArray[np.int64]]:
    """Tokenize all forward strands, then all reverse strands. -> (n_tokens, 3) codons"""
    parts = []
    reverse = []
    for chunk in chunks:
        text = chunk.ljust(_SHORTEST, "N").encode("ascii", "replace")
        digits = _DIGITS[np.frombuffer(text, np.uint8)]
        parts.append(_to_codons(digits))
        reverse.append(_to_codons(np.where(digits < 4, 3 - digits, 4)[::-1]))
    parts += reverse
    codons = np.concatenate(parts)
    return PackedBatch.from_tokens(codons[:, 0], np.array(list(map(len, parts)))), codons


def _to_codons(digits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Convert digits to codons. (n_bases,) from 0 to 4 -> (n_bases // 3 - 1, 3)"""
    n_tokens = len(digits) // N_FRAMES - 1
    a = digits[:-2]
    b = digits[1:-1]
    c = digits[2:]
    codons = np.where(np.maximum(np.maximum(a, b), c) < 4, 16 * a + 4 * b + c, UNKNOWN)
    return codons[: N_FRAMES * n_tokens].reshape(n_tokens, N_FRAMES)


# The file


def save_network(network: CodonNetwork, path: Path) -> None:
    """Write a network. Equal weights give equal bytes. Product weights are stored in float16."""
    tensors = {
        name: (tensor.half() if tensor.ndim > 1 else tensor.float()).cpu().contiguous()
        for name, tensor in network.state_dict().items()
    }
    metadata = {_FACTS: json.dumps(network.sizes, sort_keys=True)}
    SafeDir(path.parent).write_file(path, save(tensors, metadata=metadata))


def load_network(path: Path) -> CodonNetwork:
    """Load a network in float32, on the CPU.

    Raises:
        UnavailableError: the file is damaged or contains anything else.
    """
    hint = "if it is the one of VirNucPro, install the package again"
    with check_intact(path, "a network on codons", hint):
        facts, tensors = read_tensors(path, _FACTS, "pt")
        with torch.device("meta"):
            network = CodonNetwork(**facts)
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
                raise ValueError(f"{name} is not of finite numbers")
        floats = {name: tensor.float() for name, tensor in tensors.items()}
        network.load_state_dict(floats, assign=True)
    return network.eval().requires_grad_(False)


def inspect(path: Path, on_event: EventHandler) -> Model | None:
    """Inspect a network file, or a folder with a network and its head.

    Returns:
        The model, or None if the path is something else.

    Raises:
        UnavailableError: the network is damaged.
    """
    if path.is_dir():
        path /= WEIGHTS
    return inspect_file(path) if has_prefix(path, _FACTS) else None


def inspect_file(path: Path) -> _CodonModel:
    """Inspect a network file.

    Raises:
        UnavailableError: the file is damaged.
    """
    network = load_network(path)
    head = path.with_name(HEAD_FILE)
    n_bytes = path.stat().st_size
    return _CodonModel(
        path=path,
        name=path.parent.name,
        family=FAMILY,
        reads=Alphabet.CHUNK,
        encoder_id=hash_file(path),
        dim=network.dim,
        footprint=Footprint(
            n_parameters=sum(each.numel() for each in network.parameters()),
            file_bytes=n_bytes,
            bytes_per_token=_BYTES_PER_CHANNEL * network.stem.out_features,
            filling_tokens=_FILLING_TOKENS,
        ),
        head=head if head.is_file() else None,
        shortest=_SHORTEST_RECORD,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CodonModel(Model):
    """A network on disk. Its id is the file's hash."""

    def precision_on(self, kind: str, precision: Precision) -> Precision:
        """Use float32 on a GPU without bf16, because activations might overflow in fp16."""
        if precision == "fp16":
            return "fp32"
        return "bf16" if precision == "fp8" else precision

    def describe(self, spec: EncoderSpec) -> str:
        n_millions = self.footprint.n_parameters / 1e6
        return f"codons of chunks, {n_millions:.1f} M parameters, {spec.precision}"


# On a device


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> _CodonEncoder:
    """Load a recipe's encoder.

    Raises:
        UnavailableError: the file cannot be used, or does not match the recipe.
    """
    network = load_network(weights)
    check_unchanged(spec, weights, hash_file(weights))
    if spec.precision != "fp32":
        for module in network.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.to(DTYPES[spec.precision])
    return _CodonEncoder(spec, network.to(device), device)


def load_reference(spec: EncoderSpec, weights: Path, device: torch.device) -> Reference:
    """Load the network itself as its reference, in float32 on a CPU. Raises as ``load``.

    No independent implementation of this network exists.
    """
    cpu = torch.device("cpu")
    use_device(cpu)
    encoder = load(spec, weights, cpu)

    def round_off(precision: Precision, n_tokens: int) -> None:
        add_roundings(encoder.network, precision, n_tokens)

    return Reference("itself on a CPU", encoder, round_off)


class _CodonEncoder(PackedEncoder):
    """The network on batches of chunks."""

    def __init__(self, spec: EncoderSpec, network: CodonNetwork, device: torch.device) -> None:
        super().__init__(spec, device)
        self.network = network

    @property
    def kernel(self) -> str:
        return "convolutions"

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return sum(map(_count_tokens, lengths))

    def count_flop(self, lengths: Sequence[int]) -> float:
        n_factors = sum(p.numel() for p in self.network.parameters())
        return 2.0 * n_factors * self.count_tokens(lengths)

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return super().plan(list(map(_count_tokens, lengths)), tokens_per_batch)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[str]) -> Tensor:
        """Embed a batch. The rows stay on the device."""
        rows: Tensor = self.network(sequences)
        return rows


def _count_tokens(n_bases: int) -> int:
    """Count the tokens on both strands."""
    return 2 * max(1, n_bases // N_FRAMES - 1)
