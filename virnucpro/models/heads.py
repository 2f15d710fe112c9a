"""The heads of protein language models: logits over the alphabet, and contacts from attention.

Heads compute in float32 in every precision, because they are small. A family only names their
tensors: see ``head_tensors``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virnucpro.core.model_outputs import HeadOutput
from virnucpro.core.recipe import EncoderSpec
from virnucpro.models.attention import Kernel, RunLayout, rotate_run
from virnucpro.models.checkpoint import LAYER_NORM_EPS
from virnucpro.models.head_tensors import WITH_LM_HEAD


class LMHead(nn.Module):
    """The language-model head: linear layer, exact GELU, LayerNorm, linear layer to the tokens."""

    def __init__(self, dim: int, n_tokens: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.decoder = nn.Linear(dim, n_tokens)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits from final hidden states. (n, dim) float32 -> (n, n_tokens)"""
        logits: Tensor = self.decoder(self.norm(F.gelu(self.dense(hidden))))
        return logits


class Heads(nn.Module):
    """The heads of a model that its checkpoint has."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """Build the heads from float tensors, by the names in ``HeadScheme``.

        Raises:
            RuntimeError, KeyError: the tensors do not fit together.
        """
        super().__init__()
        self.lm: LMHead | None = None
        self.contacts: nn.Linear | None = None
        with torch.device("meta"):
            if "lm.decoder.weight" in weights:
                n_tokens, dim = weights["lm.decoder.weight"].shape
                self.lm = LMHead(dim, n_tokens)
            if "contacts.weight" in weights:
                self.contacts = nn.Linear(weights["contacts.weight"].shape[1], 1)
        # Copies, because a tensor of the checkpoint may be mapped from a file.
        state = {name: tensor.detach().float().clone() for name, tensor in weights.items()}
        self.load_state_dict(state, assign=True)
        self.eval().requires_grad_(False)


def select_heads(weights: Mapping[str, Tensor], spec: EncoderSpec) -> dict[str, Tensor]:
    """Return the tensors of the heads that the outputs of a specification need, by name."""
    names = {output.name for output in spec.outputs}
    parts = set()
    if HeadOutput.CONTACTS in names:
        parts.add("contacts")
    if not names.isdisjoint(map(HeadOutput.from_option, WITH_LM_HEAD)):
        parts.add("lm")
    return {name: weights[name] for name in sorted(weights) if name.split(".")[0] in parts}


def hash_heads(weights: Mapping[str, Tensor]) -> str:
    """Hash the numbers of heads, which are the same in every file format."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        numbers = weights[name].detach().float().contiguous().numpy()
        digest.update(f"{name} {numbers.shape}".encode())
        digest.update(numbers.astype("<f4").tobytes())
    return digest.hexdigest()


class ContactSum:
    """Sums the contact logits of a batch layer by layer, as a kernel that watches the attention.

    Contacts are a logistic regression over the attention weights of all layers and heads,
    symmetrized and corrected for the average (Rao et al. 2021, doi:10.1101/2020.12.15.422761;
    average product correction: Dunn et al. 2008). The regression is linear, so the attention of a
    layer is added to the sum and forgotten.
    """

    def __init__(self, regression: nn.Linear, attend: Kernel) -> None:
        self._regression = regression
        self._attend = attend
        self._first = 0  # index of the next layer's first head
        self._sums: list[Tensor] = []  # one per run, (n_proteins, n_residues, n_residues)

    def attend(self, qkv: Tensor, batch: RunLayout) -> Tensor:
        """Apply the kernel to a layer, and add its attention weights to the sum."""
        n_heads = qkv.shape[2]
        weights = self._regression.weight[0, self._first : self._first + n_heads]
        self._first += n_heads
        if not self._sums:
            self._sums = [_zeros(run, qkv.device) for run in batch.runs]
        for run, total in zip(batch.runs, self._sums, strict=True):
            _add_attention(total, rotate_run(qkv, batch, run), weights)
        return self._attend(qkv, batch)  # some kernels overwrite queries and keys

    def contacts(self) -> Tensor:
        """Return the probability of each contact after the last layer. -> (n_pairs, 1)"""
        assert self._first == self._regression.in_features, "all layers were applied"
        logits = torch.cat([total.flatten() for total in self._sums]) + self._regression.bias
        return logits.sigmoid_()[:, None]


def _zeros(run: tuple[int, int, int], device: torch.device) -> Tensor:
    _, n_proteins, seqlen = run
    return torch.zeros(n_proteins, seqlen - 2, seqlen - 2, device=device)


def _add_attention(total: Tensor, rotated: Tensor, weights: Tensor) -> None:
    """Add a layer's part of the contact logits, in blocks that fit into memory.

    Args:
        total: (n_proteins, n_residues, n_residues), the sum.
        rotated: (2, n_proteins, n_heads, seqlen, head_dim), rotated queries and keys.
        weights: (n_heads,), the regression's weights for this layer.
    """
    max_weights = 1 << 26  # attention weights in memory at once, 256 MB in float32
    _, n_proteins, n_heads, seqlen, head_dim = rotated.shape
    heads_per_block = min(n_heads, max(1, max_weights // seqlen**2))
    proteins_per_block = max(1, max_weights // (heads_per_block * seqlen**2))
    for first_protein in range(0, n_proteins, proteins_per_block):
        proteins = slice(first_protein, first_protein + proteins_per_block)
        for first_head in range(0, n_heads, heads_per_block):
            heads = slice(first_head, first_head + heads_per_block)
            q, k = rotated[:, proteins, heads]
            attention = torch.softmax(q @ k.mT * head_dim**-0.5, dim=-1)
            total[proteins] += _corrected(attention[..., 1:-1, 1:-1], weights[heads])


def _corrected(attention: Tensor, weights: Tensor) -> Tensor:
    """Symmetrize attention weights between residues, subtract the average product, and sum.

    (n_proteins, n_heads, n_residues, n_residues) -> (n_proteins, n_residues, n_residues)
    """
    weighted = torch.einsum("phij,h->pij", attention, weights)
    sums = attention.sum(dim=-1) + attention.sum(dim=-2)  # of the symmetric weights, by residue
    scaled = sums * (weights[:, None] / sums.sum(dim=-1, keepdim=True))
    return weighted + weighted.mT - torch.einsum("phi,phj->pij", scaled, sums)
