"""Tokens are those of fair-esm. Batches lose nothing and keep to their budget."""

from __future__ import annotations

import string
from itertools import pairwise

import esm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.models.esm2.config import N_TOKENS
from virnucpro.models.packing import PackedBatch, plan_batches
from virnucpro.models.protein_tokens import (
    EXTRA_TOKENS,
    RESIDUES,
    SpecialToken,
    tokenize,
)

ALPHABET = esm.Alphabet.from_architecture("ESM-1b")
proteins = st.lists(
    st.text("LAGVSERTIDPKQNFYMHWCXBUZO.-J*mkv", min_size=1, max_size=12), min_size=1, max_size=12
)
lengths = st.lists(st.integers(1, 1500), max_size=60)
budgets = st.integers(3, 4000)


def test_alphabet_equals_fair_esm():
    assert len(ALPHABET) == N_TOKENS
    assert list(RESIDUES) == ALPHABET.standard_toks
    special = (ALPHABET.cls_idx, ALPHABET.padding_idx, ALPHABET.eos_idx, ALPHABET.unk_idx)
    assert special == (SpecialToken.CLS, SpecialToken.PAD, SpecialToken.EOS, SpecialToken.UNK)


@pytest.mark.parametrize("letter", [*string.ascii_uppercase, ".", "-", "*", "?", "1", "é"])
def test_tokens_equal_fair_esm(letter):
    token = ALPHABET.get_idx(letter)
    assert tokenize([letter]).tolist() == [SpecialToken.CLS, token, SpecialToken.EOS]
    assert tokenize([letter.lower()]).tolist() == [SpecialToken.CLS, token, SpecialToken.EOS]


@given(proteins)
def test_packed_proteins_have_cls_and_eos(batch):
    packed = PackedBatch.from_sequences(batch)
    assert len(packed.cu_seqlens) == len(batch) + 1
    assert packed.cu_seqlens[0] == 0
    assert packed.cu_seqlens[-1] == len(packed.tokens) == len(packed.positions)
    for (first, last), protein in zip(pairwise(packed.cu_seqlens), batch, strict=True):
        expected = [
            SpecialToken.CLS,
            *(ALPHABET.get_idx(letter) for letter in protein.upper()),
            SpecialToken.EOS,
        ]
        assert packed.tokens[first:last].tolist() == expected
        assert packed.positions[first:last].tolist() == list(range(len(protein) + EXTRA_TOKENS))


@given(proteins)
def test_runs_join_equal_lengths(batch):
    packed = PackedBatch.from_sequences(batch)
    seqlens = [len(protein) + EXTRA_TOKENS for protein in batch]
    assert [seqlen for _, n, seqlen in packed.runs for _ in range(n)] == seqlens
    assert all(a[2] != b[2] for a, b in pairwise(packed.runs))
    firsts = np.cumsum([0, *(n * seqlen for _, n, seqlen in packed.runs)])
    assert [first for first, _, _ in packed.runs] == firsts[:-1].tolist()
    assert packed.max_seqlen == max(seqlens)


@given(lengths, budgets)
def test_batches_fill_the_budget_longest_first(lengths, budget):
    batches = plan_batches(lengths, budget)
    order = [index for batch in batches for index in batch]
    assert order == sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    n_tokens = [[lengths[index] + EXTRA_TOKENS for index in batch] for batch in batches]
    assert all(len(batch) == 1 or 0 < sum(batch) <= budget for batch in n_tokens)
    assert all(sum(batch) + following[0] > budget for batch, following in pairwise(n_tokens))
