"""Completeness of viruses: the usual lengths of taxa, the estimate, and the columns of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from build_lineages import Genome, GenomeLength, genome_lengths, genome_sizes, typical_length
from ictv_taxa import Isolate
from run_helpers import rows
from scorer_run_helpers import predict, write

from virnucpro.results.table_readers import parse_identity
from virnucpro.sequences.fasta import read_fasta
from virnucpro.viral.completeness import Completeness, estimate_completeness
from virnucpro.viral.lineage import SEGMENTED, Taxon

LAMBDA = Path(__file__).parents[3] / "shared/data/inputs/lambda_virus.fa"
ABOVE = ("R", "K", "P", "C", "O", "Unaviridae")
ALPHA = (*ABOVE, "Alphavirus")
BETA = (*ABOVE, "Betavirus")
TAXON = Taxon(ALPHA, "dsDNA", "bacteria", 10_000, "genus")


@pytest.mark.parametrize(
    ("n_bases", "topology", "taxon", "expected"),
    [
        (5_004, "linear", TAXON, Completeness(50.0, "genus length")),
        (5_006, "", TAXON, Completeness(50.1, "genus length")),
        (12_000, "linear", TAXON, Completeness(100.0, "genus length")),
        (8_000, "DTR", TAXON, Completeness(100.0, "DTR")),
        (8_000, "ITR", TAXON, Completeness(100.0, "ITR")),
        (5_000, "circular", TAXON, Completeness(100.0, "circular")),
        (4_000, "DTR", TAXON, Completeness(40.0, "genus length")),  # too short for its taxon
        (4_000, "linear", TAXON._replace(length_basis="family"), (40.0, "family length")),
        (4_000, "linear", Taxon((), "", ""), Completeness(None, "")),
        (4_000, "DTR", Taxon((), "", ""), Completeness(100.0, "DTR")),
        (4_000, "linear", Taxon(ALPHA, "", "", 0, SEGMENTED), Completeness(None, SEGMENTED)),
        (4_000, "circular", Taxon(ALPHA, "", "", 0, SEGMENTED), Completeness(100.0, "circular")),
    ],
)
def test_completeness_by_length_and_topology(n_bases, topology, taxon, expected):
    assert estimate_completeness(n_bases, topology, taxon) == expected


# Usual lengths


def isolate(lineage: tuple[str, ...], n_accessions: int = 1) -> Isolate:
    return Isolate(lineage, "", (), ("AB000001",) * n_accessions, "", "")


def test_usual_length_ignores_parts():
    assert typical_length([1_000] * 8 + [490, 100]) == 1_000
    assert typical_length([1_000] * 7 + [490, 100]) == 0  # more than a fifth
    assert typical_length([880, 1_000, 1_000, 1_000, 1_120]) == 1_000
    assert typical_length([700, 800, 1_000, 1_200, 1_300]) == 0


def test_few_species_count_by_genome():
    genomes = [Genome(ALPHA, species, 1_000 + species) for species in (1, 2, 3, 4)]
    repeated = [*genomes, Genome(ALPHA, 1, 900), Genome(ALPHA, 1, 1_500)]
    assert genome_sizes(repeated, is_genus=True) == [1_500, 1_002, 1_003, 1_004]
    assert genome_sizes(genomes[:3], is_genus=True) == [1_001, 1_002, 1_003]
    assert genome_sizes(genomes[:3], is_genus=False) == []
    assert genome_sizes(genomes[:1], is_genus=True) == []
    assert genome_sizes([Genome(ALPHA, 1, 900, is_complete=True)], is_genus=True) == [900]


def test_genus_may_have_length_of_family():
    genomes = [Genome(ALPHA, species, 1_000) for species in range(5)] + [Genome(BETA, 9, 1_040)]
    lengths = genome_lengths(genomes, [isolate(ALPHA), isolate(BETA)])
    assert lengths[ABOVE] == lengths[BETA] == GenomeLength(1_000, "family")
    assert lengths[ALPHA] == GenomeLength(1_000, "genus")


def test_segmented_taxa_have_no_length():
    genomes = [Genome(lineage, species, 1_000) for lineage in (ALPHA, BETA) for species in range(5)]
    isolates = [isolate(ALPHA, 3)] + [isolate(BETA)] * 9
    lengths = genome_lengths(genomes, isolates)
    assert lengths[ALPHA] == GenomeLength(0, SEGMENTED)
    assert lengths[BETA] == GenomeLength(1_000, "genus")
    assert lengths[ABOVE] == GenomeLength(0, "")  # a tenth is segmented


# Runs


def test_run_estimates_cut_genome(tmp_path):
    if not LAMBDA.exists():
        pytest.skip("the genome of lambda is not here")
    [record] = read_fasta(LAMBDA)
    bases = record.sequence
    pieces = {
        "whole": bases,
        "half": bases[10_000 : 10_000 + len(bases) // 2],
        "repeat": bases + bases[:200],
        "short_repeat": bases[:15_000] + bases[:200],
    }
    predict(write(tmp_path / "in.fa", **pieces), to=tmp_path / "run")
    found = {row["record"]: row for row in rows(tmp_path / "run/viruses.tsv")}
    estimates = {
        name: (row["completeness"], row["completeness_method"]) for name, row in found.items()
    }
    assert estimates["whole"] == ("100.0", "genus length")
    assert estimates["half"] == ("50.0", "genus length")
    assert estimates["repeat"] == ("100.0", "DTR")
    assert estimates["short_repeat"] == ("31.3", "genus length")
    _, identity = parse_identity(found["half"])
    assert (identity.completeness, identity.completeness_method) == (50.0, "genus length")
