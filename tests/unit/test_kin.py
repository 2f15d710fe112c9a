"""A virus gets the kind and the family that its own bases tell, and no name on thin evidence."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import open_dna, random_dna
from reading import piece_features
from run_helpers import called, rows
from safetensors.numpy import save_file
from scorer_run_helpers import predict, write
from train_kin import kin_words, kinship_tensors

import virnucpro
from virnucpro.core.errors import UnavailableError
from virnucpro.core.helper_pool import HelperPool
from virnucpro.core.types import FastaRecord
from virnucpro.results.call_rows import find_viruses
from virnucpro.results.counts import LENGTH_CLASSES
from virnucpro.results.outputs import VIRUS_TABLE
from virnucpro.results.report.aggregates import count_groups, find_records
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.sequences.open_codes import encode
from virnucpro.viral.features import NO_WORDS
from virnucpro.viral.identification import identify_viruses
from virnucpro.viral.taxonomy import (
    GROUP_FEATURES,
    KINDS,
    MIN_KMER_SHARE,
    MIN_KMERS,
    UNKNOWN,
    TaxonAssigner,
    group_features,
    iter_kmers,
    load_builtin_taxonomy,
    load_taxonomy,
)
from virnucpro.viral.types import Call, Identity, Region
from virnucpro.viral.windows import Windows

LAYER = "weight", "bias"
EXAMPLE = Path(__file__).parents[2] / "examples/contigs.fa"


def open_frame(n_codons: int, seed: int) -> str:
    return open_dna(3 * n_codons, np.random.default_rng(seed))


def words_of(sequence: str) -> np.ndarray:
    """The words of a sequence, each once, rising."""
    return np.unique(
        np.concatenate([some for _, some in iter_kmers(Windows.from_sequences([sequence]))])
    )


def example(name: str) -> str:
    """A sequence of the example."""
    return {record.id: record.sequence for record in read_fasta(EXAMPLE)}[name]


@pytest.fixture(scope="module")
def kinship() -> TaxonAssigner:
    """The net of the package, with words of two toy families, of nobody, and of a toy cluster."""
    numbers, owners = [], []
    for owner, seed in ((1, 1), (2, 2), (0, 3), (3, 4)):
        words = words_of(open_frame(200, seed))
        numbers.append(words)
        owners.append(np.full(len(words), owner, dtype=np.uint16))
    table = kin_words(np.concatenate(numbers), np.concatenate(owners))
    names = ("", "Unaviridae", "Duoviridae")
    kinds = ("", "RNA+", "RNA-")
    return replace(
        load_builtin_taxonomy(),
        kmers=table,
        families=names,
        kind_of_family=kinds,
        clusters=("Unavirus",),
    )


def test_family_with_most_words_decides(kinship):
    for seed, name, kind in ((1, "Unaviridae", "RNA+"), (2, "Duoviridae", "RNA-")):
        [identity] = kinship.assign([open_frame(200, seed)])
        assert (identity.family, identity.group) == (name, kind)
        assert identity.family_kmers >= 100
        assert identity.family_share == 1
        assert identity.group_probability == kinship.certainties[-1][1]


def test_words_of_two_families_in_equal_parts_name_none(kinship):
    sequence = open_frame(200, 1) + "TAATTAATTAA" + open_frame(200, 2)
    [identity] = kinship.assign([sequence])
    assert (identity.family, identity.family_kmers, identity.family_share) == ("", 0, None)
    assert identity.group in KINDS


def test_cluster_is_named_without_a_family(kinship):
    virus = open_frame(200, 4)
    [identity] = kinship.assign([virus])
    [alone] = replace(kinship, kmers=kin_words(*np.empty((2, 0), np.uint16))).assign([virus])
    assert not alone.family
    n_words = len(words_of(virus))
    assert identity == alone._replace(
        family="cluster:Unavirus", family_kmers=n_words, family_share=1.0
    )


def test_single_word_names_no_family(kinship):
    virus = open_frame(200, 4) + random_dna(2_400, np.random.default_rng(2))  # 3,000 bases
    numbers = words_of(open_frame(200, 4))
    for owner, n_words, kin in (
        (3, 10, "cluster:Unavirus"),
        (3, 9, ""),
        (2, 9, "Duoviridae"),
        (2, MIN_KMERS, "Duoviridae"),
        (2, MIN_KMERS - 1, ""),
    ):
        words = kin_words(numbers[:n_words], np.full(n_words, owner, dtype=np.uint16))
        [identity] = replace(kinship, kmers=words).assign([virus])
        assert identity.family == kin


def test_words_without_family_count_against(kinship):
    without = open_frame(200, 3)
    both = without + "TAATTAATTAA" + open_frame(200, 1)
    assert not any(identity.family for identity in kinship.assign([without, both]))


def test_table_finds_its_words():
    rng = np.random.default_rng(5)
    numbers = np.unique(rng.integers(20**9, size=300_000))
    owners = rng.integers(2**16, size=len(numbers)).astype(np.uint16)
    table = kin_words(numbers, owners)
    order = rng.permutation(len(numbers))[:5_000]
    assert np.array_equal(table.find_taxa(numbers[order]), owners[order])
    strangers = np.setdiff1d(rng.integers(20**9, size=200_000), numbers)
    # 300,000 words of 2**36: 0.87 of 200,000 by chance; Poisson: more than 9 once in 1e7
    assert np.count_nonzero(table.find_taxa(strangers) != UNKNOWN) <= 9


def test_a_sequence_is_the_same_virus_in_any_block(kinship):
    rng = np.random.default_rng(4)
    each = [open_frame(200, 1), "", random_dna(12_000, rng), "AC", open_frame(200, 2), "N" * 3_000]
    beside = list(kinship.assign(each))
    assert beside == [identity for one in each for identity in kinship.assign([one])]
    assert [identity.family for identity in beside] == ["Unaviridae", *[""] * 3, "Duoviridae", ""]
    assert beside[1] == beside[5] == Identity()


def test_group_chances_are_probabilities():
    net = load_builtin_taxonomy().net
    lengths = np.array([150, 500, 3_000, 10**6])
    features = group_features(
        Windows.from_sequences([random_dna(3_000, np.random.default_rng(1))] * 4)
    )
    chances = net.probabilities(features, lengths)
    assert chances.shape == (len(lengths), len(KINDS))
    assert chances.min() >= 0
    assert chances.sum(axis=1) == pytest.approx(1)
    assert (np.diff(chances.max(axis=1)) >= 0).all()


def test_the_logits_of_groups_are_those_of_plain_products():
    net, rng = load_builtin_taxonomy().net, np.random.default_rng(3)
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
    of_pieces = piece_features(
        Windows(encode("".join(sequences)), np.array([0, 1_000, 3_000]), np.array([1_000] * 3)),
        NO_WORDS,
    )[:, GROUP_FEATURES]
    expected = [of_pieces[:2].mean(axis=0, dtype=np.float64), of_pieces[2], [np.nan] * 1095]
    found = group_features(Windows.from_sequences(sequences))
    # each feature is rounded to steps of 2^-24, so that sums are the same in any order
    np.testing.assert_allclose(found, np.stack(expected), rtol=0, atol=2**-25)


def test_random_sequence_is_named_after_no_family():
    rng = np.random.default_rng(7)
    some = [random_dna(3_000, rng) for _ in range(50)]
    assert not any(identity.family for identity in load_builtin_taxonomy().assign(some))


def test_kin_file_is_read_back_or_refused(tmp_path, kinship):
    path = tmp_path / "kin.safetensors"
    tensors, facts = kinship_tensors(kinship)
    save_file(tensors, path, facts)
    sequence = open_frame(200, 2)
    assert list(load_taxonomy(path).assign([sequence])) == list(kinship.assign([sequence]))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UnavailableError, match="is not the table of viral families"):
        load_taxonomy(path)
    owners = tensors["words.owners"]
    save_file({**tensors, "words.owners": owners[1:]}, path, facts)
    with pytest.raises(UnavailableError, match="words, but"):
        load_taxonomy(path)


def test_every_word_owner_has_a_name():
    own = load_builtin_taxonomy()
    assert own.kmers.taxa.max() < len(own.families) + len(own.clusters)
    assert len(own.kind_of_family) == len(own.families) and own.net.slopes


def test_damaged_kin_file_is_refused_first(tmp_path, monkeypatch):
    (tmp_path / "kin.safetensors").write_bytes(b"not one")
    monkeypatch.setattr("virnucpro.viral.taxonomy.EMBEDDED_FOLDER", tmp_path)
    load_builtin_taxonomy.cache_clear()
    write(tmp_path / "in.fa", host=random_dna(500, np.random.default_rng(1)))
    with pytest.raises(UnavailableError, match="is not the table of viral families"):
        predict(tmp_path / "in.fa", to=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of the example, which nobody changes."""
    folder = tmp_path_factory.mktemp("example") / "run"
    predict(EXAMPLE, to=folder, report=True)
    return folder


def test_the_page_counts_kinds_by_length_and_families(run):
    told = rows(run / "viruses.tsv")
    first = told[0]["file"], told[0]["record"]
    here = HelperPool().helpers(None, 0, "")
    groups, families = count_groups(run / "viruses.tsv", here)
    of_records = find_records(run / "viruses.tsv", {first}, ("group", "family"), here)
    assert of_records == {first: (told[0]["group"], told[0]["family"])}
    [sample] = rows(run / "samples.tsv")
    of_groups = Counter(row["group"] for row in told)
    for column, counts in (("groups", of_groups), ("families", families)):
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


def test_the_page_of_proteins_says_nothing_of_groups(tmp_path):
    write(tmp_path / "in.fa", protein="MKTAYIAKQR" * 12)
    predict(tmp_path / "in.fa", to=tmp_path / "run", threshold=0.0, report=True)
    [row] = rows(tmp_path / "run/viruses.tsv")
    assert not any(row[name] for name in VIRUS_TABLE.columns[VIRUS_TABLE.columns.index("family") :])
    assert not row["group"]
    assert "Kinds of viruses" not in (tmp_path / "run/report.html").read_text()


def test_provirus_is_identified_by_its_bases(tmp_path):
    flank, virus = random_dna(2_000, np.random.default_rng(3)), example("example_virus_01")
    end = 2_000 + len(virus)
    regions = (Region(2_000, end, "provirus", 0.9, is_virus=True),)
    call = Call("host", 4_000 + len(virus), "scored", "in", virus_score=0.1)
    record = FastaRecord("host", "host", flank + virus + flank, sample="in")
    results = called((record, call, regions))
    [identity] = find_viruses(results, STANDARD).identities
    assert [identity] == identify_viruses([virus], [None])
    assert (identity.family, identity.topology) == ("Coronaviridae", "")


def test_tables_and_python_show_the_example(run):
    told = {row["virus"]: row for row in rows(run / "viruses.tsv")}
    assert told
    for row in told.values():
        assert row["group"] in KINDS
        assert 0 < float(row["group_probability"]) <= 1
        assert (row["topology"], row["repeat_length"]) == ("linear", "0")
        if row["family"]:
            assert int(row["family_kmers"]) >= MIN_KMERS
            assert float(row["family_share"]) >= MIN_KMER_SHARE
    assert told["example_virus_01"]["family"] == "Coronaviridae"
    calls = {call.record_id: call for call in virnucpro.read_predictions(run)}
    for name, call in calls.items():
        kinds = [identity.group for identity in call.identities]
        assert kinds == ([told[name]["group"]] if call.is_virus else [])
    [alone] = load_builtin_taxonomy().assign([example("example_virus_01")])
    assert (alone.family, alone.family_kmers) == (
        *("Coronaviridae", calls["example_virus_01"].identities[0].family_kmers),
    )
