"""Make the network on codons that comes with VirNucPro, embedded/cnn_virnucpro/model.safetensors.

    python scripts/weights/train_embedded_network.py manifest.tsv scripts/weights/scorer_split.tsv \
        model.safetensors train validation test locked

The manifest is that of ``train_embedded_scorer.py``, with transposable elements. The groups of two
folds of the named parts are held out, because the network is joined with the scorer, and its cuts
are set, on groups that it has not seen (``join_embedded_network.py``).

The network reads fragments of three lengths, on both strands. It learns to distinguish viruses from
cells, and the kinds of each. As a second task it fills in codons that are hidden from it, as BERT
fills in words (Devlin et al. 2019, arXiv:1810.04805). The weights in the file are a running mean
over the batches.

Training takes 400 seconds on a GPU, after the records are read. The learning rate falls with time,
not with the number of batches: no two trainings make the same file, and a slow device makes a worse
one.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sampling import Collection, collect, gc_matched_table, groups_of
from scorer_folds import group_folds
from torch import Tensor, nn
from train_embedded_scorer import (
    KIND_OF,
    KINDS,
    MADE_SHARE,
    MADE_WEIGHT,
    N_VIRAL,
    SHARES,
    records_of,
)

from virnucpro.models.codon_cnn import (
    N_CODONS,
    N_FRAMES,
    N_TAPS,
    UNKNOWN,
    CodonNetwork,
    save_network,
)
from virnucpro.training.frame_dataset import GC_EDGES

HELD_OUT = (0, 1)  # folds
SECONDS = 400
SHUFFLED = len(KINDS)  # sequences, a kind of their own
SEED = 1
_HIDDEN, _SPAN = 0.15, 3  # share of hidden tokens, about, and tokens of a hidden span
_EVERY = 4  # one of so many hidden tokens counts in the loss over codons
_SHARE_OF_KINDS, _SHARE_OF_CODONS = 0.5, 0.3  # weights of losses; that of the label is 1
_SMOOTHING = 0.05  # targets are this far from 0 and 1
_RATE, _LOWEST_RATE, _WARM_UP = 2e-3, 2e-6, 0.05
_WEIGHT_DECAY, _LARGEST_GRADIENT = 0.05, 1.0
_DROPOUT, _BLOCK_DROPOUT = 0.3, 0.1
_KEPT = 0.999  # of the running mean, in a step
_N_FOR_GC = 20_000  # fragments from which the weights of GC bins are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The sizes of a network, and of its training."""

    of_codon: int = 96
    channels: int = 256
    dilations: tuple[int, ...] = (1, 2, 4, 1, 8, 16, 2, 32)
    hidden: int = 256
    seconds: float = SECONDS
    n_bases: int = 512_000  # in a batch
    sizes: tuple[int, ...] = (500, 500, 1000, 500, 1000, 3000)  # of fragments, batch after batch

    def network(self) -> CodonNetwork:
        """Make a network of these sizes, before training."""
        return CodonNetwork(
            of_codon=self.of_codon,
            channels=self.channels,
            dilations=self.dilations,
            hidden=self.hidden,
            n_viral=N_VIRAL,
            n_kinds=SHUFFLED + 1,
        )


class Sampler:
    """Draws fragments of one length on a device, balanced as those of the scorer are."""

    def __init__(self, collection: Collection, bases: Tensor, size: int) -> None:
        """``bases`` are those of the collection on the device, from 0 to 3."""
        self.size, self._bases, device = size, bases, bases.device
        sides = [groups_of(collection, is_virus, size, SHARES) for is_virus in (True, False)]
        members = [records for groups, _ in sides for records in groups]
        kinds = [KINDS.index(KIND_OF.get(one.kingdom, one.kingdom)) for one in collection.records]
        self._chances = torch.tensor(np.concatenate([p for _, p in sides]), device=device)
        self._n_members = torch.tensor([*map(len, members)], device=device)
        self._members = torch.tensor([*itertools.chain(*members)], device=device)
        self._starts = torch.tensor(collection.starts, device=device)
        self._lengths = torch.tensor(collection.lengths, device=device)
        self._kinds = torch.tensor(kinds, device=device)
        self._edges = torch.tensor(GC_EDGES, device=device)
        drawn, kinds_drawn = self.draw(_N_FOR_GC)
        is_virus = (kinds_drawn < N_VIRAL).cpu().numpy()
        table = gc_matched_table(_gc_of(drawn).cpu().numpy(), is_virus)
        self._table = torch.tensor(table, device=device, dtype=torch.float32)

    def draw(self, n: int) -> tuple[Tensor, Tensor]:
        """Draw fragments, half of them viral, and their kinds. -> (n, size), (n,)"""
        group = torch.multinomial(self._chances, n, replacement=True)
        first = self._n_members.cumsum(0) - self._n_members
        record = self._members[first[group] + _below(self._n_members[group])]
        start = self._starts[record] + _below(self._lengths[record] - self.size + 1)
        places = start[:, None] + torch.arange(self.size, device=start.device)
        return self._bases[places], self._kinds[record]

    def batch(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw fragments, and shuffle the bases of some to get more: bases, kinds and weights."""
        bases, kinds = self.draw(n)
        bins = torch.bucketize(_gc_of(bases), self._edges, right=True)
        weights = self._table[(kinds < N_VIRAL).long(), bins]
        some = bases[: max(1, n // MADE_SHARE)]
        shuffled = some.gather(1, torch.rand(some.shape, device=some.device).argsort(1))
        return (
            torch.cat([bases, shuffled]),
            torch.cat([kinds, kinds.new_full((len(some),), SHUFFLED)]),
            torch.cat([weights, weights.new_full((len(some),), MADE_WEIGHT)]),
        )


def _below(limits: Tensor) -> Tensor:
    """Draw a whole number from 0 to below each limit."""
    return (torch.rand(limits.shape, device=limits.device, dtype=torch.float64) * limits).long()


def _gc_of(bases: Tensor) -> Tensor:
    """(n, n_bases) -> (n,) float64"""
    return ((bases == 1) | (bases == 2)).double().mean(1)


def codons_of(bases: Tensor) -> Tensor:
    """The tokens of all forward strands, then of all reverse strands.

    (n, n_bases) from 0 to 3 -> (2 n, n_bases // 3 - 1, 3)
    """
    strands = torch.cat([bases, 3 - bases.flip(1)]).long()
    n_tokens = strands.shape[1] // N_FRAMES - 1
    codons: Tensor = 16 * strands[:, :-2] + 4 * strands[:, 1:-1] + strands[:, 2:]
    return codons[:, : N_FRAMES * n_tokens].reshape(len(strands), n_tokens, N_FRAMES)


class _Block(nn.Module):
    """The block of ``CodonNetwork``, with its normalisations and dropout."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.before, self.after = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        padding = (0, dilation * (N_TAPS // 2))
        self.conv = nn.Conv2d(
            *(channels, channels, (1, N_TAPS)), padding=padding, dilation=(1, dilation), bias=False
        )
        self.mix = nn.Conv2d(channels, channels, 1)
        self.dropout = nn.Dropout(_BLOCK_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv(F.gelu(self.before(x), approximate="tanh"))
        mixed: Tensor = self.dropout(self.mix(F.gelu(self.after(inner), approximate="tanh")))
        return x + mixed


class TrainingNetwork(nn.Module):
    """``CodonNetwork`` as it is trained: on fragments of one length, with batch normalisation."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, c, same = settings, settings.channels, settings.network()
        self.codons, self.query = same.codons, same.query
        self.inner, self.kinds = same.inner, same.kinds
        taps, padding = (1, N_TAPS), (0, N_TAPS // 2)
        self.stem = nn.Conv2d(N_FRAMES * settings.of_codon, c, taps, padding=padding)
        self.blocks = nn.ModuleList(_Block(c, dilation) for dilation in settings.dilations)
        self.norm = nn.BatchNorm2d(c)
        self.dropout = nn.Dropout(_DROPOUT)
        self.fill_in = nn.Linear(c, N_FRAMES * N_CODONS)

    def forward(self, codons: Tensor) -> tuple[Tensor, Tensor]:
        """Read the codons of both strands: logits of kinds, and the channels of each token.

        (2 n, n_tokens, 3) -> (n, n_kinds), (2 n, n_tokens, channels)
        """
        x = self.codons(codons).flatten(2)[:, None]
        x = self.stem(x.permute(0, 3, 1, 2))  # channels stay last in memory
        for block in self.blocks:
            x = block(x)
        x = F.gelu(self.norm(x), approximate="tanh")[:, :, 0].transpose(1, 2)
        shares = self.query(x).float().softmax(1).to(x.dtype)
        weighted = torch.einsum("nlc,nlq->nqc", x, shares).flatten(1)
        forward, reverse = torch.cat([weighted, x.mean(1), x.amax(1)], dim=1).chunk(2)
        both = torch.cat([forward + reverse, (forward - reverse).abs()], dim=1)
        inner = F.gelu(self.inner(self.dropout(both)))
        kinds: Tensor = self.kinds(self.dropout(inner))
        return kinds, x


def log_odds_of(logits: Tensor) -> Tensor:
    """(n, n_kinds) -> (n,)"""
    return logits[:, :N_VIRAL].logsumexp(1) - logits[:, N_VIRAL:].logsumexp(1)


def loss_of(network: TrainingNetwork, bases: Tensor, kinds: Tensor, weights: Tensor) -> Tensor:
    """The loss over labels and kinds, and over codons that are hidden in spans."""
    codons = codons_of(bases)
    middles = torch.rand(codons.shape[:2], device=codons.device) < _HIDDEN / _SPAN
    is_hidden = F.max_pool1d(middles.float(), _SPAN, 1, _SPAN // 2) > 0
    some = is_hidden.flatten().nonzero()[::_EVERY, 0]
    with torch.autocast(codons.device.type, torch.bfloat16):
        logits, channels = network(codons.masked_fill(is_hidden[..., None], UNKNOWN))
        filled_in = network.fill_in(channels.flatten(0, 1)[some]).reshape(-1, N_CODONS)
    of_codons = F.cross_entropy(filled_in.float(), codons.flatten(0, 1)[some].flatten())
    logits = logits.float()
    log_odds, targets = log_odds_of(logits), (kinds < N_VIRAL) * (1 - 2 * _SMOOTHING)
    losses = F.binary_cross_entropy_with_logits(log_odds, targets + _SMOOTHING, reduction="none")
    losses += _SHARE_OF_KINDS * F.cross_entropy(
        logits, kinds, reduction="none", label_smoothing=_SMOOTHING
    )
    return (losses * weights).mean() + _SHARE_OF_CODONS * of_codons


def without_held_out(collection: Collection) -> Collection:
    """The records of the other folds."""
    fold_of_group = group_folds(collection.records)
    folds = np.array([fold_of_group[record.group] for record in collection.records])
    return collection.where(~np.isin(folds, HELD_OUT))


def fit(collection: Collection, settings: Settings) -> TrainingNetwork:
    """Train a network on the groups that are not held out, and give it the mean weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)
    network = TrainingNetwork(settings).to(device)
    collection = without_held_out(collection)
    digits = torch.tensor(collection.digits, device=device)
    bases = torch.where(digits < 4, digits, torch.randint_like(digits, 4))
    samplers = {size: Sampler(collection, bases, size) for size in sorted(set(settings.sizes))}
    means = [weight.detach().clone() for weight in network.parameters()]
    matrices = [weight for weight in network.parameters() if weight.ndim > 1]
    vectors = [weight for weight in network.parameters() if weight.ndim == 1]
    optimizer = torch.optim.AdamW(matrices, weight_decay=_WEIGHT_DECAY, fused=True)
    optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})
    began = time.monotonic()
    for step in itertools.count():
        elapsed = (time.monotonic() - began) / settings.seconds
        if elapsed > 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = _rate_at(elapsed)
        size = settings.sizes[step % len(settings.sizes)]
        loss = loss_of(network, *samplers[size].batch(settings.n_bases // size))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), _LARGEST_GRADIENT)
        optimizer.step()
        for mean, weight in zip(means, network.parameters(), strict=True):
            mean.lerp_(weight.detach(), max(1 - _KEPT, 1 / (step + 2)))
    for mean, weight in zip(means, network.parameters(), strict=True):
        weight.data = mean
    print(f"{len(collection.records):,} records, {step:,} batches", file=sys.stderr)
    return network.eval()


def _rate_at(elapsed: float) -> float:
    """A linear warm-up, then half a cosine. The elapsed time is a share of all of it."""
    if elapsed < _WARM_UP:
        return _RATE * elapsed / _WARM_UP
    turn = math.pi * (elapsed - _WARM_UP) / (1 - _WARM_UP)
    return _RATE * (1 + math.cos(turn)) / 2 + _LOWEST_RATE


def converted(network: TrainingNetwork) -> CodonNetwork:
    """The trained network as the package reads it: normalisation becomes part of the weights."""
    norms = {
        name: _scaling_of(module)
        for name, module in network.named_modules()
        if isinstance(module, nn.BatchNorm2d)
    }
    weights = {  # those of a convolution for the rows of its taps, side by side
        name: weight[:, :, 0].transpose(1, 2).flatten(1) if weight.ndim == 4 else weight
        for name, weight in network.state_dict().items()
        if name.rpartition(".")[0] not in (*norms, "fill_in")
    }
    for name, (scale, shift) in norms.items():
        if name.endswith(".after"):
            conv = name.replace("after", "conv")
            weights[f"{conv}.weight"] = scale[:, None] * weights[f"{conv}.weight"]
            weights[f"{conv}.bias"] = shift
        else:
            weights |= {f"{name}.scale": scale, f"{name}.shift": shift}
    result = network.settings.network()
    result.load_state_dict(weights)
    return result.eval().requires_grad_(False)


def _scaling_of(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """The scale and the shift by which it normalises outside training. -> twice (channels,)"""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = norm.weight.detach() / torch.sqrt(norm.running_var + norm.eps)
    return scale, norm.bias.detach() - norm.running_mean * scale


def main(manifest: Path, split: Path, network_file: Path, parts: list[str]) -> None:
    torch.backends.cudnn.benchmark = True  # few shapes, many batches
    collection = collect(records_of(manifest, split, parts))
    save_network(converted(fit(collection, Settings())), network_file)


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case [manifest, split, network_file, *parts] if parts:
            main(Path(manifest), Path(split), Path(network_file), parts)
        case _:
            raise SystemExit(__doc__)
