"""Genetic codes in frames, in the scorer, and in notes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from Bio.Data.CodonTable import unambiguous_dna_by_id as NCBI
from region_helpers import gene

from virnucpro.core.errors import UsageError
from virnucpro.sequences.genetic_code import GENETIC_CODES, STANDARD, GeneticCode
from virnucpro.sequences.open_codes import find_open_codes
from virnucpro.sequences.translate import Chunk, translate_six_frames
from virnucpro.viral.networks import Scorer
from virnucpro.viral.scoring import score_block


def noise(n_bases: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("ACGT", [3, 2, 2, 3], k=n_bases))


def test_codes_are_those_of_ncbi() -> None:
    ambiguous = {n for n, of in NCBI.items() if set(of.stop_codons) & set(of.forward_table)}
    assert ambiguous == {27, 28, 31}
    assert set(GENETIC_CODES) == NCBI.keys() - ambiguous
    for number in GENETIC_CODES:
        code = GeneticCode.from_number(number)
        meanings = code.meanings
        stops = dict.fromkeys(NCBI[number].stop_codons, "*")
        assert meanings == NCBI[number].forward_table | stops, number


@pytest.mark.parametrize("number", [0, 7, 27, 99])
def test_unknown_code_is_refused(number: int) -> None:
    with pytest.raises(UsageError, match=f"--genetic-code is {number}") as refusal:
        GeneticCode.from_number(number)
    assert "4, 5, 6" in str(refusal.value.hint)


def test_bacterial_code_equals_the_standard_code() -> None:
    assert GeneticCode.from_number(11).letters == STANDARD.letters
    assert GeneticCode.from_number(11).standard_synonyms == {}


def test_synonym_keeps_its_meaning() -> None:
    meaning = STANDARD.meanings
    for number in GENETIC_CODES:
        code = GeneticCode.from_number(number)
        letters = code.meanings
        for codon, synonym in code.standard_synonyms.items():
            assert meaning[synonym] == letters[codon] != meaning[codon]


@pytest.mark.parametrize(
    ("code", "codon", "letter"), [(4, "TGA", "W"), (15, "TAG", "Q"), (25, "TGA", "G")]
)
def test_frame_is_translated_in_its_code(code: int, codon: str, letter: str) -> None:
    chunk = Chunk("c", "r", 0, "ATGGCT" + codon + "AAACTG")
    first = {
        orf.id: orf.protein for orf in translate_six_frames([chunk], GeneticCode.from_number(code))
    }
    assert first["cF1"] == f"MA{letter}KL"
    assert "cF1" not in {orf.id for orf in translate_six_frames([chunk])}


@pytest.mark.parametrize("code", [4, 6, 15, 25])
def test_gene_in_its_code_has_the_same_stretches(code: int) -> None:
    """Its codons count as their synonyms. Only figures that count bases may differ."""
    scorer = Scorer.load_builtin()
    standard = [gene(400, seed) for seed in range(20)]
    recoded = [gene(400, seed, code=code) for seed in range(20)]
    assert not set(standard) & set(recoded)

    def log_odds(genes: list[str], number: int = 11) -> np.ndarray:
        return score_block(genes, scorer, GeneticCode.from_number(number))[0]

    expected = log_odds(standard)
    found = abs(log_odds(recoded, code) - expected)
    closed = abs(log_odds(recoded) - expected)
    assert found.mean() < closed.mean() / 3


@pytest.mark.parametrize("code", [4, 15, 6])
def test_genome_in_another_code_is_noted(code: int) -> None:
    flanks = noise(300, 1), noise(300, 2)
    recoded = gene(900, 5, code=code).join(flanks)
    reverse = recoded[::-1].translate(str.maketrans("ACGT", "TGCA"))
    rna = recoded.replace("T", "u").lower()
    usual = gene(900, 5).join(flanks)
    assert find_open_codes([recoded, reverse, usual, rna]) == [code, code, None, code]


def test_random_sequence_is_hardly_ever_noted() -> None:
    rng = np.random.default_rng(4)
    sequences = [noise(int(n), int(n)) for n in rng.integers(1, 20_000, 300)]
    # 3 codes, a chance of 0.001 each
    assert len(sequences) - find_open_codes(sequences).count(None) <= 4


@pytest.mark.parametrize("sequence", ["", "A", "ACG", "N" * 5000, "A" * 5000, "acgu" * 700])
def test_meaningless_sequences_have_no_code(sequence: str) -> None:
    assert find_open_codes([sequence]) == [None]
