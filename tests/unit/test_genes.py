"""Genes of viruses, and MIUViG fields."""

from __future__ import annotations

import math
import random
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from virnucpro._version import __version__
from virnucpro.core.types import FastaRecord, Records, reverse_complement
from virnucpro.results.call_rows import make_batches
from virnucpro.results.miuvig import (
    checkv_quality,
    completeness_score,
    genome_structure,
    genome_type,
    miuvig_rows,
)
from virnucpro.results.outputs import RunOutput
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.viral.genes import find_genes
from virnucpro.viral.lineage import load_builtin_lineages
from virnucpro.viral.taxonomy import KINDS
from virnucpro.viral.types import (
    Call,
    CalledRecords,
    Calls,
    FrameScores,
    Genes,
    Identity,
    Viruses,
)

INPUTS = Path(__file__).parents[3] / "shared/data/inputs"
# frequent in genes of bacteria and their phages. The last two are stops on the other strand
CODONS = ("GAA", "AAA", "CTG", "GGC", "GAT", "GCG", "ATT", "ACC", "GTT", "AAC", "TTA", "TCA")


def coding(n_codons: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(CODONS, k=n_codons))


def spacer(n: int, seed: int) -> str:
    """Return bases with stops in all frames."""
    return "".join(random.Random(seed).choices("ACGT", k=n)) + "TAATTAATTAACTAGTTAG"


def gene_bases(n_codons: int, seed: int, start: str = "ATG") -> str:
    return "AGGAGGTATTAC" + start + coding(n_codons, seed) + "TAA"


def phage(n_genes: int = 8) -> str:
    """Genes on both strands, with binding sites, between short spacers."""
    parts = []
    for seed in range(n_genes):
        gene = gene_bases(150 + 20 * seed, seed)
        parts += [spacer(60, 100 + seed), gene if seed < 5 else reverse_complement(gene)]
    return "".join(parts) + spacer(60, 99)


class Gene(NamedTuple):
    """A row of the columns in ``Genes``."""

    start: int
    end: int
    is_reverse: bool
    lacks_start: bool
    lacks_end: bool
    start_codon: str
    protein: str
    coding_score: float
    log_odds: float
    n_known_kmers: int
    known_family: str


def rows_of(genes: Genes) -> list[Gene]:
    _, *columns = genes
    lists = [column if isinstance(column, list) else column.tolist() for column in columns]
    return [Gene(*row) for row in zip(*lists, strict=True)]


def genes_of(
    sequence: str,
    *,
    is_circle: bool = False,
    group: str = "phage",
    code: GeneticCode = STANDARD,
) -> list[Gene]:
    return rows_of(find_genes([sequence], [is_circle], [group], code))


def test_genes_have_the_known_starts_and_ends():
    sequence = phage()
    genes = genes_of(sequence)
    assert [gene.is_reverse for gene in genes] == [False] * 5 + [True] * 3
    for seed, gene in enumerate(genes):
        bases = sequence[gene.start : gene.end]
        bases = reverse_complement(bases) if gene.is_reverse else bases
        assert bases == "ATG" + coding(150 + 20 * seed, seed) + "TAA"
        assert (gene.start_codon, gene.lacks_start, gene.lacks_end) == ("ATG", False, False)
        assert gene.coding_score > 0
        assert not math.isnan(gene.log_odds)
        letters = [STANDARD.meanings[bases[i : i + 3]] for i in range(0, len(bases) - 3, 3)]
        assert gene.protein == "".join(letters)


def mirrored(genes: list[Gene], n_bases: int) -> list[Gene]:
    swapped = [
        gene._replace(
            start=(n_bases - gene.end) % n_bases,
            end=(n_bases - gene.end) % n_bases + gene.end - gene.start,
            is_reverse=not gene.is_reverse,
        )
        for gene in genes
    ]
    return sorted(swapped, key=lambda gene: (gene.start, gene.end))


@pytest.mark.parametrize("is_circle", [False, True])
def test_reverse_complement_has_same_genes(is_circle):
    sequence = phage()
    genes = genes_of(sequence, is_circle=is_circle)
    other = genes_of(reverse_complement(sequence).lower(), is_circle=is_circle)
    assert genes and mirrored(genes, len(sequence)) == other


@pytest.mark.parametrize("cut", [1, 400, 2_345])  # 400: within a gene
def test_circle_cut_elsewhere_has_same_genes(cut):
    sequence = phage()
    n_bases = len(sequence)
    genes = genes_of(sequence, is_circle=True)
    turned = genes_of(sequence[cut:] + sequence[:cut], is_circle=True)
    moved = [
        gene._replace(
            start=(gene.start + cut) % n_bases,
            end=(gene.start + cut) % n_bases + gene.end - gene.start,
        )
        for gene in turned
    ]
    assert len(genes) == 8
    assert sorted(moved, key=lambda gene: gene.start) == genes


def test_gene_over_the_origin_ends_past_it():
    sequence = phage()
    first = genes_of(sequence)[0]
    cut = (first.start + first.end) // 2
    genes = genes_of(sequence[cut:] + sequence[:cut], is_circle=True)
    [crossing] = [gene for gene in genes if gene.end > len(sequence)]
    assert crossing.protein == first.protein
    assert not crossing.lacks_start and not crossing.lacks_end
    assert crossing.end - crossing.start == first.end - first.start


def test_genes_at_the_ends_are_partial():
    genes = genes_of(coding(200, 1) + "TAA" + spacer(60, 2) + "ATG" + coding(200, 3))
    assert [gene.lacks_start for gene in genes] == [True, False]
    assert [gene.lacks_end for gene in genes] == [False, True]
    assert [gene.start_codon for gene in genes] == ["", "ATG"]
    assert not genes[0].protein.startswith("M") and genes[1].protein.startswith("M")


def test_other_starts_need_a_prokaryotic_group():
    sequence = spacer(60, 1) + gene_bases(200, 5, "GTG") + spacer(60, 2)
    for group in ("phage", "RNA+"):
        genes = genes_of(sequence, group=group)
        assert any(gene.start_codon == "GTG" for gene in genes) == (group == "phage")


def test_another_code_reads_through_its_codons():
    sequence = (
        spacer(60, 1) + "ATG" + coding(100, 1) + "TGA" + coding(100, 2) + "TAA" + spacer(9, 3)
    )
    proteins = [gene.protein for gene in genes_of(sequence, code=GeneticCode.from_number(4))]
    assert any(len(protein) == 202 and protein[101] == "W" for protein in proteins)
    assert all(len(gene.protein) != 202 for gene in genes_of(sequence))


def test_sequences_without_bases_have_no_genes():
    genes = find_genes(["", "N" * 3_000, "ACGT"], [True, False, False], ["", "", "phage"])
    assert genes.n_per_virus.tolist() == [0, 0, 0]
    assert rows_of(genes) == []


def test_genes_stay_with_their_sequence():
    viruses = ["ACGT", phage(3), "", phage(5), "N" * 3_000, phage(5)]
    are_circles = [False, False, True, True, False, False]
    pairs = zip(viruses, are_circles, strict=True)
    alone = [genes_of(virus, is_circle=is_circle) for virus, is_circle in pairs]
    together = find_genes(viruses, are_circles, ["phage"] * len(viruses))
    assert list(map(bool, alone)) == [False, True, False, True, False, True]
    assert together.n_per_virus.tolist() == list(map(len, alone))
    slices = [together.slice_viruses(place, place + 1) for place in range(len(viruses))]
    assert list(map(rows_of, slices)) == alone


@pytest.mark.skipif(not INPUTS.exists(), reason="the shared real sequences are not here")
def test_known_genes_name_their_family():
    text = (INPUTS / "sars-cov-2_wuhan-hu-1.fasta").read_text()
    sequence = "".join(text.split("\n")[1:])
    genes = genes_of(sequence, group="RNA+")
    spike = next(gene for gene in genes if gene.start == 21_562)
    assert (spike.end, spike.is_reverse, len(spike.protein)) == (25_384, False, 1_273)
    assert spike.known_family == "Coronaviridae"
    assert spike.n_known_kmers >= 20


def called(sequence: str, header: str) -> CalledRecords:
    record = FastaRecord(header.split()[0], header, sequence, sample="file")
    call = Call(record.id, len(sequence), "scored", "file", 0.9, 0.9, is_virus=True)
    return CalledRecords(
        Records.from_records([record]),
        Calls.from_calls([call]),
        FrameScores.from_predictions([[]]),
    )


def test_gene_files_list_the_same_genes():
    sequence = phage()
    cut = 400
    turned = sequence[cut:] + sequence[:cut]
    outputs = (RunOutput.GENE_TABLE, RunOutput.GENE_GFF3, RunOutput.PROTEIN_FASTA)
    [batch] = make_batches(called(turned, "x;1 circular=true"), outputs, STANDARD)
    table, gff3, fasta = (bytes(batch.rows[output.file]).decode() for output in outputs)
    lines = [line.split("\t") for line in table.splitlines()]
    rows = [dict(zip(RunOutput.GENE_TABLE.columns, values, strict=True)) for values in lines]
    names = [f"x;1_{number}" for number in range(1, 9)]
    assert [row["gene"] for row in rows] == names
    assert int(rows[-1]["start"]) > int(rows[-1]["end"])  # over the origin
    region, *features = [line.split("\t") for line in gff3.splitlines()]
    assert region[2:5] == ["region", "1", str(len(sequence))]
    assert region[8] == "ID=x%3B1;Is_circular=true"
    for name, row, feature in zip(names, rows, features, strict=True):
        start = int(feature[3])
        end = int(feature[4])
        assert feature[0] == "x%3B1" and feature[2] == "CDS" and feature[7] == "0"
        assert (feature[6], str(start)) == (row["strand"], row["start"])
        assert (end - 1) % len(sequence) + 1 == int(row["end"]) and end - start > 0
        assert feature[8].startswith(f"ID={name.replace(';', '%3B')};")
    headers = [line[1:].split(" # ") for line in fasta.splitlines() if line.startswith(">")]
    strands = {"+": "1", "-": "-1"}
    assert headers == [
        [row["gene"], row["start"], row["end"], strands[row["strand"]], f"ID={row['gene']}"]
        for row in rows
    ]


# the values that MIxS 7.0.1 allows, of enumerations and in patterns
MIXS_VALUES = {
    "detec_type": {"independent sequence (UViG)", "provirus (UpViG)"},
    "pred_genome_type": {
        *("DNA", "dsDNA", "ssDNA", "RNA", "dsRNA", "ssRNA", "ssRNA (+)", "ssRNA (-)"),
        *("mixed", "uncharacterized"),
    },
    "pred_genome_struc": {"non-segmented", "segmented", "undetermined"},
    "assembly_qual": {
        "Finished genome",
        "High-quality draft genome",
        "Medium-quality draft genome",
        "Low-quality draft genome",
        "Genome fragment(s)",
    },
    "compl_appr": {"", "marker gene", "other", "reference based"},
    "tax_ident": {"", "16S rRNA gene", "multi-marker approach", "other"},
    "host_pred_appr": {
        *("", "CRISPR spacer match", "co-occurrence", "combination", "host sequence similarity"),
        *("kmer similarity", "other", "provirus"),
    },
}
MIXS_PATTERNS = {
    "number_contig": r"\d+",
    "compl_score": r"|(high|med|low);\d+(\.\d+)?%",
    "compl_software": r"|[^;]+;[^;]+",
    **dict.fromkeys(["feat_pred", "ref_db", "sim_search_meth"], r"|[^;]+;[^;]+;[^;]+"),
    "vir_ident_software": r"[^;]+;[^;]+;[^;]+",
}
NOT_IN_MIXS = {"virus", "topology", "checkv_quality", "taxonomy"}
FREE_TEXTS = {"samp_name", "tax_class", "host_pred_est_acc"}


@cache
def genes_of_phage() -> Genes:
    return find_genes([phage()], [False], ["phage"])


def miuvig_of(identity: Identity, extent: str) -> dict[str, str]:
    """Return the row of a virus with genes."""
    results = called("ACGT", "x")
    genes = genes_of_phage()
    row = (0, "x", extent, 0, 4, False, "ACGT", 0.9, identity)
    results.viruses = Viruses.from_rows([row])._replace(genes=genes)
    [values] = miuvig_rows(results)
    return dict(zip(RunOutput.MIUVIG_TABLE.columns, values, strict=True))


@pytest.mark.parametrize("method", ["", "genus length", "family length", "segmented", "DTR", "ITR"])
@pytest.mark.parametrize("completeness", [None, 12.3, 50.0, 90.0, 100.0])
def test_miuvig_keeps_vocabularies(method, completeness):
    lineages = load_builtin_lineages()
    taxa = {taxon.genome_type: taxon for taxon in lineages.taxa}.values()
    identities = [
        *(
            Identity(
                taxonomy=taxon.taxonomy,
                genus=taxon.genus,
                genome_type=taxon.genome_type,
                host_genus="Escherichia",
            )
            for taxon in taxa
        ),
        *(Identity(group=group) for group in KINDS),
        Identity(),
    ]
    for identity in identities:
        known = identity._replace(completeness=completeness, completeness_method=method)
        for extent in ("whole", "provirus"):
            row = miuvig_of(known, extent)
            assert (
                row.keys() == MIXS_VALUES.keys() | MIXS_PATTERNS.keys() | NOT_IN_MIXS | FREE_TEXTS
            )
            for field, values in MIXS_VALUES.items():
                assert row[field] in values, field
            for field, pattern in MIXS_PATTERNS.items():
                assert re.fullmatch(pattern, row[field]), field


def test_miuvig_knows_each_genome_type():
    lineages = load_builtin_lineages()
    types = {taxon.genome_type for taxon in lineages.taxa} - {""}
    terms = {one: genome_type(Identity(genome_type=one)) for one in types}
    assert "uncharacterized" not in terms.values()
    assert all(one.startswith(term[:5]) for one, term in terms.items())


def test_miuvig_describes_each_virus():
    [batch] = make_batches(called(phage(), "x"), (RunOutput.MIUVIG_TABLE,), STANDARD)
    [line] = bytes(batch.rows[RunOutput.MIUVIG_TABLE.file]).decode().splitlines()
    row = dict(zip(RunOutput.MIUVIG_TABLE.columns, line.split("\t"), strict=True))
    software = f"VirNucPro;{__version__}"
    assert row["virus"] == "x" and row["samp_name"] == "file"
    assert row["detec_type"] == "independent sequence (UViG)"
    assert (row["topology"], row["assembly_qual"]) == ("linear", "Genome fragment(s)")
    assert row["vir_ident_software"] == f"{software};predict"
    assert row["feat_pred"] == f"{software};predict"
    assert (
        row["ref_db"]
        == f"VirNucPro index of known viruses;{__version__};{load_builtin_lineages().release}"
    )
    assert row["checkv_quality"] == "Not-determined"


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        (
            Identity(group="dsDNA", completeness=100.0, completeness_method="ITR"),
            ("dsDNA", "undetermined", "high;100.0%", "Complete"),
        ),
        (
            Identity(genome_type="ssRNA(-)", completeness_method="segmented"),
            ("ssRNA (-)", "segmented", "", "Not-determined"),
        ),
        (
            Identity(genome_type="dsDNA", completeness=92.0, completeness_method="genus length"),
            ("dsDNA", "non-segmented", "high;92.0%", "High-quality"),
        ),
        (
            Identity(group="RNA+", completeness=49.9, completeness_method="family length"),
            ("ssRNA (+)", "non-segmented", "low;49.9%", "Low-quality"),
        ),
    ],
)
def test_miuvig_terms(identity, expected):
    terms = (genome_type, genome_structure, completeness_score, checkv_quality)
    assert tuple(term(identity) for term in terms) == expected


def test_no_genes_option_writes_no_gene_files():
    outputs = (RunOutput.GENE_TABLE, RunOutput.GENE_GFF3, RunOutput.PROTEIN_FASTA)
    [batch] = make_batches(called(phage(), "x"), outputs, STANDARD, finds_genes=False)
    assert not batch.rows
