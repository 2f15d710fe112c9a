"""Group and family of a virus: from its own bases, and no name on weak evidence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import open_dna, random_dna
from feature_extraction import piece_features
from run_helpers import called, rows
from safetensors.numpy import save_file
from scorer_run_helpers import predict, write
from train_virus_groups import predictor_tensors

import virnucpro
from virnucpro.core.errors import UnavailableError
from virnucpro.core.helper_pool import HelperPool
from virnucpro.core.types import FastaRecord
from virnucpro.results.call_rows import find_viruses
from virnucpro.results.counts import LENGTH_CLASSES
from virnucpro.results.outputs import RunOutput
from virnucpro.results.report.virus_rows import count_groups, find_records
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.sequences.open_codes import encode
from virnucpro.viral.features import NO_KMERS
from virnucpro.viral.identification import identify_viruses
from virnucpro.viral.known import NodeHits, Nodes
from virnucpro.viral.lineage import (
    CLUSTER_LIMITS,
    FAMILY,
    LIMITS,
    RANKS,
    Lineages,
    Taxon,
    load_builtin_lineages,
    name_clusters,
)
from virnucpro.viral.taxonomy import (
    GROUP_FEATURES,
    KINDS,
    GroupPredictor,
    group_features,
    group_of_taxon,
    load_builtin_groups,
    load_groups,
)
from virnucpro.viral.types import Call, Identity, Region
from virnucpro.viral.windows import Windows

EXAMPLE = Path(__file__).parents[2] / "examples/contigs.fa"


def open_frame(n_codons: int, seed: int) -> str:
    return open_dna(3 * n_codons, np.random.default_rng(seed))


def example(name: str) -> str:
    """A sequence of the example."""
    return {record.id: record.sequence for record in read_fasta(EXAMPLE)}[name]


NAMES = ("Unaviria", "", "", "", "", "Unaviridae", "Unavirus")
TAXA = tuple(Taxon(NAMES[:depth], "dsDNA", "") for depth in (0, 1, 6, 7))
ANCESTORS = np.zeros((len(TAXA), len(RANKS)), dtype=np.int64)
ANCESTORS[1:, 0] = 1
ANCESTORS[2:, FAMILY] = 2
ANCESTORS[3, 6] = 3


def hits_of(*rows: tuple[int, int, int]) -> NodeHits:
    """Return hits as (record, node, hits)."""
    return NodeHits(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


def test_support_counts_kmers_of_the_rank():
    """Node 1 is a realm, 2 a family, 3 a genus, 4 another unnamed family in the realm."""
    lineages = Lineages("toy", TAXA, ANCESTORS)
    nodes = Nodes(*np.array([[0] * 5, [0, 1, 2, 3, 1], [0, 1, 6, 7, 6]], dtype=np.uint16))
    hits = hits_of((0, 1, 50), (0, 2, 3), (0, 3, 6), (0, 4, 1), (1, 1, 4), (2, 3, 2))
    found = lineages.support(hits, nodes, np.array([2, 1, 0]))
    assert found.n_hits.tolist() == [9, 4, 0]
    assert found.share.tolist() == [0.9, 1, 0]


@pytest.mark.parametrize(
    ("hits", "n_kmers", "name"),
    [
        ([(0, 1, 7), (0, 2, 3)], 100, "cluster:A"),
        ([(0, 1, 7), (0, 2, 4)], 100, ""),  # too small a share
        ([(0, 1, 7), (0, 0, 4)], 100, ""),  # k-mers of several owners count against it
        ([(0, 1, CLUSTER_LIMITS.min_kmers - 1)], 100, ""),
        ([(0, 1, 9)], 3_600, "cluster:A"),
        ([(0, 1, 9)], 3_601, ""),  # too few for a long sequence
        ([(0, 2, 90)], 100, ""),  # a family is no cluster
        ([], 100, ""),
    ],
)
def test_cluster_needs_kmers_and_share(hits, n_kmers, name):
    nodes = Nodes(np.array([0, 2, 1], dtype=np.uint16), *np.zeros((2, 3), dtype=np.uint8))
    owners = ("", "Unaviridae", "cluster:A")
    names, support = name_clusters(hits_of(*hits), np.array([n_kmers]), nodes, owners)
    assert names == [name]
    assert support.n_hits.tolist() == [hits[0][2] if name else 0]


@pytest.mark.parametrize(
    ("taxon", "kind"),
    [
        ("Caudoviricetes", "phage"),
        ("Fiersviridae", "phage"),  # soil and water are the source of most isolates
        ("Fuselloviridae", "archaeal virus"),
        ("Coronaviridae", "RNA+"),
        ("Filoviridae", "RNA-"),
        ("Phenuiviridae", "RNA-"),  # some are ambisense
        ("Partitiviridae", "dsRNA"),
        ("Circoviridae", "ssDNA"),
        ("Herviviricetes", "dsDNA"),
        ("Retroviridae", "reverse-transcribing"),
        ("Varidnaviria", ""),  # viruses of all domains
        ("Riboviria", ""),
    ],
)
def test_group_of_taxon(taxon, kind):
    assert group_of_taxon(load_builtin_lineages().find_taxon(taxon)) == kind


def test_every_family_but_viroids_has_a_group():
    for taxon in load_builtin_lineages().taxa:
        if taxon.family and not taxon.genus and taxon.genome_type != "ssRNA":  # viroids
            assert group_of_taxon(taxon) in KINDS


def test_certainty_is_that_of_the_kmers():
    predictor = GroupPredictor(load_builtin_groups().network, ((3, 0.8), (8, 0.9)))
    assert [predictor.certainty(n) for n in (3, 7, 8, 900)] == [0.8, 0.8, 0.9, 0.9]


def test_identification_ignores_blocks():
    rng = np.random.default_rng(4)
    virus = example("example_virus_01")
    each = [virus, "", random_dna(12_000, rng), "AC", open_frame(200, 2), "N" * 3_000]
    together = identify_viruses(each)
    assert together == [identity for one in each for identity in identify_viruses([one])]
    assert [identity.family for identity in together] == ["Coronaviridae", *[""] * 5]
    assert together[1] == together[5] == Identity()


def test_group_probabilities_sum_to_one():
    net = load_builtin_groups().network
    lengths = np.array([150, 500, 3_000, 10**6])
    features = group_features(
        Windows.from_sequences([random_dna(3_000, np.random.default_rng(1))] * 4)
    )
    chances = net.probabilities(features, lengths)
    assert chances.shape == (len(lengths), len(KINDS))
    assert chances.min() >= 0
    assert chances.sum(axis=1) == pytest.approx(1)
    assert (np.diff(chances.max(axis=1)) >= 0).all()


def test_group_logits_equal_plain_products():
    net = load_builtin_groups().network
    rng = np.random.default_rng(3)
    features = net.mean + net.deviation * rng.normal(size=(19, len(net.mean)))
    x = ((features - net.mean) / net.deviation).clip(-6, 6)
    x = x @ net.hidden[0].T.astype(np.float64) + net.hidden[1]
    x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    expected = x @ net.output[0].T.astype(np.float64) + net.output[1]
    # sums of 1,095 products of float64, each of which is below 2^5: 1,095 * 2^5 * 2^-53 = 4e-12
    np.testing.assert_allclose(net.logits(features), expected, rtol=0, atol=1e-10)


def test_group_features_are_piece_means():
    rng = np.random.default_rng(6)
    sequences = [random_dna(2_000, rng), "N" * 1_000 + random_dna(1_000, rng), "N" * 700]
    piece_rows = piece_features(
        Windows(encode("".join(sequences)), np.array([0, 1_000, 3_000]), np.array([1_000] * 3)),
        NO_KMERS,
    )[:, GROUP_FEATURES]
    expected = [piece_rows[:2].mean(axis=0, dtype=np.float64), piece_rows[2], [np.nan] * 1095]
    found = group_features(Windows.from_sequences(sequences))
    # each feature is rounded to steps of 2^-24, so that sums are the same in any order
    np.testing.assert_allclose(found, np.stack(expected), rtol=0, atol=2**-25)


def test_random_sequence_gets_no_family():
    rng = np.random.default_rng(7)
    some = [random_dna(3_000, rng) for _ in range(50)]
    assert not any(identity.family for identity in identify_viruses(some))


def test_groups_file_is_read_back_or_refused(tmp_path):
    path = tmp_path / "virus_groups.safetensors"
    own = load_builtin_groups()
    tensors, facts = predictor_tensors(own)
    save_file(tensors, path, facts)
    sequences = Windows.from_sequences([open_frame(200, 2)])
    assert load_groups(path).predict(sequences) == own.predict(sequences)
    assert load_groups(path).certainties == own.certainties
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UnavailableError, match="is not the network for groups of viruses"):
        load_groups(path)


def test_damaged_groups_file_is_refused_first(tmp_path, monkeypatch):
    (tmp_path / "virus_groups.safetensors").write_bytes(b"not one")
    monkeypatch.setattr("virnucpro.viral.taxonomy.EMBEDDED_FOLDER", tmp_path)
    load_builtin_groups.cache_clear()
    write(tmp_path / "in.fa", host=random_dna(500, np.random.default_rng(1)))
    with pytest.raises(UnavailableError, match="is not the network for groups of viruses"):
        predict(tmp_path / "in.fa", to=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of the example. No test changes it."""
    folder = tmp_path_factory.mktemp("example") / "run"
    predict(EXAMPLE, to=folder, report=True)
    return folder


def test_page_counts_groups_and_families(run):
    told = rows(run / "viruses.tsv")
    first = told[0]["file"], told[0]["record"]
    here = HelperPool().helpers(None, 0, "")
    groups, families = count_groups(run / "viruses.tsv", here)
    record_rows = find_records(run / "viruses.tsv", {first}, ("group", "family"), here)
    assert record_rows == {first: (told[0]["group"], told[0]["family"])}
    [sample] = rows(run / "samples.tsv")
    group_counts = Counter(row["group"] for row in told)
    for column, counts in (("groups", group_counts), ("families", families)):
        pairs = (pair.split(": ") for pair in sample[column].split("; "))
        assert {name: int(n) for name, n in pairs} == counts
    assert groups == Counter(
        (row["group"], max(n for n in LENGTH_CLASSES if n <= int(row["length"]))) for row in told
    )
    assert families == Counter(row["family"] for row in told if row["family"])
    page = (run / "report.html").read_text()
    assert f"<td>{told[0]['group']}</td><td>{told[0]['family']}</td>" in page
    for name, n in families.items():
        assert f'<th scope="row">{name}</th><td class="n">{n}</td>' in page


def test_page_of_proteins_has_no_groups(tmp_path):
    write(tmp_path / "in.fa", protein="MKTAYIAKQR" * 12)
    predict(tmp_path / "in.fa", to=tmp_path / "run", threshold=0.0, report=True)
    [row] = rows(tmp_path / "run/viruses.tsv")
    assert not any(
        row[name]
        for name in RunOutput.VIRUS_TABLE.columns[RunOutput.VIRUS_TABLE.columns.index("family") :]
    )
    assert not row["group"]
    assert "Kinds of viruses" not in (tmp_path / "run/report.html").read_text()


def test_provirus_is_identified_by_its_bases(tmp_path):
    flank = random_dna(2_000, np.random.default_rng(3))
    virus = example("example_virus_01")
    end = 2_000 + len(virus)
    regions = (Region(2_000, end, "provirus", 0.9, is_virus=True),)
    call = Call("host", 4_000 + len(virus), "scored", "in", virus_score=0.1)
    record = FastaRecord("host", "host", flank + virus + flank, sample="in")
    results = called((record, call, regions))
    [identity] = find_viruses(results, STANDARD).identities
    assert [identity] == identify_viruses([virus], [None])
    assert (identity.family, identity.topology) == ("Coronaviridae", "")


def test_tables_and_python_identify_the_example(run):
    told = {row["virus"]: row for row in rows(run / "viruses.tsv")}
    assert told
    for row in told.values():
        assert row["group"] in KINDS
        assert 0 < float(row["group_probability"]) <= 1
        assert (row["topology"], row["repeat_length"]) == ("linear", "0")
        if row["family"]:
            assert int(row["family_kmers"]) >= LIMITS.min_kmers
            assert float(row["family_share"]) >= LIMITS.min_share
    assert told["example_virus_01"]["family"] == "Coronaviridae"
    calls = {call.record_id: call for call in virnucpro.read_predictions(run)}
    for name, call in calls.items():
        kinds = [identity.group for identity in call.identities]
        assert kinds == ([told[name]["group"]] if call.is_virus else [])
    [alone] = identify_viruses([example("example_virus_01")])
    assert (alone.family, alone.family_kmers) == (
        *("Coronaviridae", calls["example_virus_01"].identities[0].family_kmers),
    )
