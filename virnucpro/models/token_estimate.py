"""Estimate the work of a run in tokens, before and while its encoders read them."""

from __future__ import annotations

from collections.abc import Sequence

from virnucpro.core.recipe import Alphabet, EncoderSpec


def estimate_tokens(encoders: Sequence[EncoderSpec], n_sequences: int, n_residues: int) -> int:
    """Estimate the total tokens that these encoders read. A run without any has no families."""
    if not encoders:
        return 0
    from virnucpro.models.registry import find_family

    total = 0.0
    for spec in encoders:
        family = find_family(spec.family)
        n_letters = 3 * n_residues if spec.reads is Alphabet.DNA else n_residues
        n_tokens = n_letters / family.letters_per_token + family.extra_tokens * n_sequences
        if spec.masks_residues:  # as if all sequences had the same length
            n_tokens *= 1 + n_letters / max(1, n_sequences)
        total += n_tokens
    return round(total)
