"""The host genus of phages: the built-in table, and the script that makes it."""

from __future__ import annotations

import pytest
from build_phage_hosts import Phage, find_hosts, measure, write_hosts
from ictv_taxa import Isolate

from virnucpro.core.errors import UnavailableError
from virnucpro.viral import phage_hosts
from virnucpro.viral.lineage import RANKS, Taxon, load_builtin_lineages
from virnucpro.viral.phage_hosts import find_host_genus, load_phage_hosts

CLASS = ("Duplodnaviria", "Heunggongvirae", "Uroviricota", "Caudoviricetes", "")


def phages(family: str, genus: str, hosts: str) -> list[Phage]:
    """Make a phage per letter, whose host is that letter. Each is of its own species."""
    lineage = (*CLASS, family, genus)
    return [
        Phage(Isolate(lineage, f"{genus} {i}", (), (), "dsDNA", "bacteria"), host)
        for i, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("EE", "E"), ("E", None), ("ES", None), ("E" * 19 + "S", "E"), ("E" * 18 + "S", None)],
)
def test_genus_has_the_host_of_nearly_all_its_phages(hosts, expected) -> None:
    assert find_hosts(phages("", "Avirus", hosts)).get("Avirus") == expected


def test_family_needs_five_phages() -> None:
    four = phages("Aviridae", "Avirus", "EE") + phages("Aviridae", "Bvirus", "EE")
    assert "Aviridae" not in find_hosts(four)
    assert find_hosts([*four, *phages("Aviridae", "Cvirus", "E")])["Aviridae"] == "E"


def test_measure_does_not_predict_a_phage_by_its_own_species() -> None:
    three = phages("", "Avirus", "EES")
    row = measure(three, len(RANKS), lambda isolate: isolate.species)
    # without itself, E has one E and one S, and S has two E
    assert row.split("\t") == ["genus", "3", "0.333", "0.000"]


def test_script_writes_what_the_program_reads(tmp_path, monkeypatch) -> None:
    path = tmp_path / "phage_hosts.json"
    write_hosts(path, phages("", "Avirus", "EE"), digest="0" * 64)
    monkeypatch.setattr(phage_hosts, "EMBEDDED_FOLDER", tmp_path)
    load_phage_hosts.cache_clear()
    try:
        assert load_phage_hosts() == {"Avirus": "E"}
        path.write_text('{"format": 0}')
        load_phage_hosts.cache_clear()
        with pytest.raises(UnavailableError, match="is not the table of hosts") as caught:
            load_phage_hosts()
        assert "reinstall" in caught.value.hint
    finally:
        load_phage_hosts.cache_clear()


def test_taxa_of_phages_have_hosts_and_others_none() -> None:
    lineages = load_builtin_lineages()
    assert find_host_genus(lineages.find_taxon("Lambdavirus")) == "Escherichia"
    assert find_host_genus(lineages.find_taxon("Tequatrovirus")) == ""
    assert find_host_genus(lineages.find_taxon("Caudoviricetes")) == ""
    assert find_host_genus(Taxon((), "", "")) == ""
    hosts = load_phage_hosts()
    with_host = [taxon for taxon in lineages.taxa if find_host_genus(taxon)]
    assert {taxon.host_source for taxon in with_host} <= {"bacteria", "archaea", ""}
    assert all(host.isalpha() and host.istitle() for host in hosts.values())
