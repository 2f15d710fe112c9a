"""The index of known viruses: its k-mers, its rule, and its effect on a run."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from build_known_index import index_tensors
from conftest import open_dna, random_dna
from forkserver_runner import run_script, virnucpro
from known_kmers import (
    count_distinct_residues,
    invert_hashes,
    organism_of,
    sampling_order,
)
from run_helpers import rows
from safetensors.numpy import save_file
from scorer_run_helpers import predict, write
from toy_vmr import write_vmr

from virnucpro.core.errors import UnavailableError
from virnucpro.core.types import reverse_complement
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.viral.evidence import add_evidence
from virnucpro.viral.features import AMINO_ACIDS
from virnucpro.viral.known import (
    CELLULAR,
    MAY_BE_ENDOGENOUS,
    FalseCalls,
    KnownIndex,
    Nodes,
    WindowHits,
    count_windows,
    load_known_index,
)
from virnucpro.viral.lineage import load_lineages
from virnucpro.viral.options import ThresholdOptions
from virnucpro.viral.proteins import Proteins
from virnucpro.viral.types import Call, Calls
from virnucpro.viral.windows import Windows

ROOT = Path(__file__).parents[2]
EVERY = 2**64 - 1  # highest hash of a sample of all k-mers
SHARED_INPUTS = ROOT.parent / "shared/data/inputs"
NAMES = ("", "Unaviridae", "Duoviridae", "Retroviridae")


# A plain reference


@cache
def hash_of(kmer: str) -> int:
    """Hash nine residues as known.c does."""
    value = 0
    for residue in kmer:
        value = value << 5 | AMINO_ACIDS.index(residue)
    value = value * 0xBF58476D1CE4E5B9 % 2**64
    value ^= value >> 29
    value = value * 0x94D049BB133111EB % 2**64
    return value ^ value >> 32


@cache
def is_sampled(kmer: str) -> bool:
    """Return whether the four-residue word with the lowest rank has an even offset from the end."""
    ranks = []
    for first in range(5, -1, -1):
        word = 0
        for residue in kmer[first : first + 4]:
            word = word << 5 | AMINO_ACIDS.index(residue)
        ranks.append((word * 0x9E3779B1 + 0x7F4A7C15) % 2**32 >> 16)
    return min(ranks[::2]) < min(ranks[1::2])


@cache
def kmers_with_centres(bases: str) -> list[tuple[str, float]]:
    """Return the sampled k-mers of all six frames, with their centres on the forward strand."""
    found = []
    for strand, text in enumerate((bases, reverse_complement(bases))):
        for first in range(len(text) - 26):
            codons = [text[i : i + 3] for i in range(first, first + 27, 3)]
            residues = "".join(STANDARD.meanings.get(codon, "*") for codon in codons)
            if set(residues) <= set(AMINO_ACIDS) and is_sampled(residues):
                centre = first + 13.5
                found.append((residues, len(text) - centre if strand else centre))
    return found


def index_of(owners: dict[str, int], limit: int = EVERY) -> KnownIndex:
    """Build an index of sequences and their owners."""
    node_by_kmer = {
        hash_of(k): own for bases, own in owners.items() for k, _ in kmers_with_centres(bases)
    }
    chosen = {value: owner for value, owner in node_by_kmer.items() if value <= limit}
    hashes = np.array(list(chosen), dtype=np.uint64)
    node_of = np.array(list(chosen.values()), dtype=np.int64)
    owners_of_nodes = np.arange(len(NAMES), dtype=np.uint16)
    nodes = Nodes(owners_of_nodes, owners_of_nodes, np.zeros(len(NAMES), dtype=np.uint8))
    tensors = index_tensors(hashes, node_of)
    rates = tuple(FalseCalls(n, (r, r / 10)) for n, r in ((150, 0.01), (1_000, 0.001)))
    return KnownIndex(
        **tensors,
        nodes=nodes,
        limit=limit,
        owners=NAMES,
        needed=(2, 1.5, 600),
        strengths=(1.0, 4.0),
        false_calls=rates,
        sha256="f" * 64,
    )


def plain_rows(bases: str, n_windows: int, owners: dict[int, int], limit: int) -> list[list[int]]:
    """Count what the library counts in each window, without its table."""
    table = []
    for window in range(n_windows):
        low, high = (len(bases) * w / n_windows for w in (window, window + 1))
        hashes = [hash_of(k) for k, centre in kmers_with_centres(bases) if low < centre < high]
        hashes = [value for value in hashes if value <= limit]
        hits = [owners[value] for value in set(hashes) if value in owners]
        counts = {owner: hits.count(owner) for owner in sorted(set(hits)) if owner != CELLULAR}
        named = {owner: n for owner, n in counts.items() if owner}
        best = max(named, key=lambda owner: named[owner], default=0)
        n_cellular = hits.count(CELLULAR)
        table.append([len(hashes), sum(counts.values()), n_cellular, best, named.get(best, 0)])
    return table


def dna(n_bases: int, seed: int) -> str:
    return random_dna(n_bases, np.random.default_rng(seed))


@pytest.fixture(scope="module")
def viruses() -> dict[str, int]:
    return {dna(900, 1): 1, dna(900, 2): 2, dna(900, 3): CELLULAR, dna(900, 4): 0}


@pytest.mark.parametrize(
    ("limit", "n_unknown"),
    # few bases are looked up without filters
    [(EVERY, 0), (EVERY, 300_000), (2**63 - 1, 0)],
)
def test_lookup_equals_plain_python(viruses, limit, n_unknown):
    index = index_of(viruses, limit)
    owners = {
        hash_of(k): own for bases, own in viruses.items() for k, _ in kmers_with_centres(bases)
    }
    first, second, third, fourth = viruses
    mixed = dna(40, 5) + first[:300] + "NNN" + second[100:500].lower() + third[:90] + first[:200]
    records = ["", "ACGT", first[:26], first[:27], fourth, mixed, dna(500, 6)]
    hits = index.look_up([*records, "N" * n_unknown])
    assert set(hits.record.tolist()) == {*range(len(records) + 1)}
    table = np.stack(hits[1:], axis=1).tolist()[: len(records)]
    plain = [plain_rows(bases.upper(), 1, owners, limit)[0] for bases in records]
    assert table == plain
    assert sum(row[1] for row in table) > 100  # there is something to compare


def test_node_counts_equal_plain_python(viruses):
    index = index_of(viruses)
    owners = {
        hash_of(k): own for bases, own in viruses.items() for k, _ in kmers_with_centres(bases)
    }
    first, second, *_ = viruses
    short = first[:300] + "NNN" + second[100:500] + first[:200]
    long = dna(7_000, 7) + first + dna(7_301, 8) + first
    hits, n_kmers = index.count_nodes(Windows.from_sequences([short, "", long, dna(300, 9)]))
    expected = []
    for record, bases in enumerate((short, "", long, dna(300, 9))):
        n_windows = int(count_windows(np.array([len(bases)]))[0])
        counts = Counter()
        for window in range(n_windows):
            low, high = (len(bases) * w / n_windows for w in (window, window + 1))
            kmers = {hash_of(k) for k, centre in kmers_with_centres(bases) if low < centre < high}
            counts.update(owners[value] for value in kmers if value in owners)
        del counts[CELLULAR]
        expected += [(record, node, n) for node, n in sorted(counts.items())]
        assert n_kmers[record] == len(kmers_with_centres(bases))
    assert [tuple(row) for row in np.stack(hits, axis=1).tolist()] == expected
    assert len({record for record, *_ in expected}) >= 2


def test_node_counts_ignore_blocks(viruses):
    index = index_of(viruses)
    records = [*viruses, dna(1_200_000, 11) + next(iter(viruses)), *viruses]
    together, _ = index.count_nodes(Windows.from_sequences(records))
    for record, bases in enumerate(records):
        alone, _ = index.count_nodes(Windows.from_sequences([bases]))
        is_in_record = together.record == record
        assert together.node[is_in_record].tolist() == alone.node.tolist()
        assert together.n_hits[is_in_record].tolist() == alone.n_hits.tolist()


def test_windows_equal_plain_python(viruses):
    index = index_of(viruses)
    owners = {
        hash_of(k): own for bases, own in viruses.items() for k, _ in kmers_with_centres(bases)
    }
    bases = dna(7_000, 7) + next(iter(viruses)) + dna(7_301, 8)
    assert count_windows(np.array([len(bases)])).tolist() == [3]
    hits = index.look_up([bases])
    assert np.stack(hits[1:], axis=1).tolist() == plain_rows(bases, 3, owners, EVERY)


def protein_of(bases: str) -> str:
    """Translate the first frame, without stops."""
    codons = [bases[i : i + 3] for i in range(0, len(bases) - 2, 3)]
    return "".join(STANDARD.meanings.get(codon, "X") for codon in codons).replace("*", "X")


@pytest.mark.parametrize("limit", [EVERY, 2**63 - 1])
def test_protein_lookup_equals_plain_python(viruses, limit):
    index = index_of(viruses, limit)
    owners = {
        hash_of(k): own for bases, own in viruses.items() for k, _ in kmers_with_centres(bases)
    }
    parts = [protein_of(bases) for bases in (*viruses, dna(60_000, 12))]
    proteins = [
        parts[0][:8],
        parts[1],
        parts[0] + parts[1][:99] + parts[2] + parts[3],
        "".join(reversed(parts)),
    ]
    hits = index.look_up_proteins(Proteins.from_sequences(proteins))
    assert hits.record.tolist() == [0, 1, 2, 3, 3, 3]  # above 15,000 residues: three windows
    for record, protein in enumerate(proteins):
        kmers = [protein[i : i + 9] for i in range(len(protein) - 8)]
        hashes = [hash_of(k) for k in kmers if set(k) <= set(AMINO_ACIDS) and is_sampled(k)]
        hashes = [value for value in hashes if value <= limit]
        found = [owners[value] for value in set(hashes) if value in owners]
        is_own = hits.record == record
        assert hits.n_kmers[is_own].sum() == len(hashes)
        assert hits.n_cellular[is_own].sum() == found.count(CELLULAR)
        assert hits.n_viral[is_own].sum() == len(found) - found.count(CELLULAR)
    assert hits.owner.tolist()[1:3] == [2, 1]
    assert hits.n_viral.min() < hits.n_viral.max() > 100 * (limit == EVERY)


def test_lookup_ignores_strand(viruses):
    index = index_of(viruses)
    parts = [*viruses, dna(11_000, 9), dna(25_001, 10)]
    records = ["".join(parts[i:]) for i in range(len(parts))] + [parts[-1][:n] for n in range(80)]
    forward = index.look_up(records)
    reverse = index.look_up([reverse_complement(bases) for bases in records])
    for record in range(len(records)):
        mine, other = ([column[of.record == record] for column in of] for of in (forward, reverse))
        assert [one.tolist() for one in mine] == [one[::-1].tolist() for one in other]


def test_window_counts_are_odd():
    counts = count_windows(np.arange(0, 300_000, 7))
    assert (counts % 2 == 1).all()
    lengths = np.arange(0, 300_000, 7) / counts
    assert lengths.max() < 15_000
    assert lengths[counts > 1].min() >= 5_000


def test_inverted_hash_gives_residues():
    kmers = ("ACDEFGHIK", "AAAAAAAAC", "YYYYYYYYY")
    hashes = np.array([hash_of(kmer) for kmer in kmers], dtype=np.uint64)
    assert count_distinct_residues(invert_hashes(hashes)).tolist() == [9, 2, 1]


def test_middle_kmers_come_first_and_overlap_little():
    protein = protein_of(dna(60_000, 12)).replace("X", "")
    kmers = [protein[i : i + 9] for i in range(len(protein) - 8)]
    places = np.array([i for i, kmer in enumerate(kmers) if is_sampled(kmer)])
    hashes = np.array([hash_of(kmers[place]) for place in places], dtype=np.uint64)
    order = sampling_order(hashes, invert_hashes(hashes))
    assert 0.47 < len(places) / len(kmers) < 0.53
    for rate in (1 / 6, 1 / 3, 2 / 5, 1):
        assert (order < rate).mean() == pytest.approx(rate, abs=0.03)
    assert np.diff(places[order < 1 / 3]).min() == 3


# The rule


def hits_of(*windows: tuple[int, ...]) -> WindowHits:
    """Return (record, k-mers, viral, cellular, owner, hits of the owner) for each window."""
    return WindowHits(*np.array(windows, dtype=np.int64).T.copy())


@pytest.mark.parametrize(
    ("window", "is_known"),
    [
        ((0, 80, 2, 0, 1, 2), True),
        ((0, 80, 2, 0, 1, 1), False),  # of two families
        ((0, 80, 3, 0, 0, 0), True),
        ((0, 80, 1, 0, 1, 1), False),
        ((0, 80, 4, 2, 1, 4), False),  # half as many with cells
        ((0, 80, 5, 2, 1, 5), True),
        ((0, 900, 2, 0, 1, 2), False),  # three of one family are needed
        ((0, 900, 3, 0, 1, 3), True),
        ((0, 6_000, 11, 0, 1, 11), False),
        ((0, 6_000, 12, 0, 1, 12), True),
    ],
)
def test_needed_hits_grow_with_lookups(window, is_known):
    known = index_of({}).classify(hits_of(window), 1)
    assert known.is_known.tolist() == [is_known]


def test_prophage_does_not_call_chromosome():
    virus = (0, 6_000, 400, 0, 2, 390)
    host = (0, 6_000, 3, 0, 1, 2)
    index = index_of({})
    for n_viral, is_known in ((0, False), (1, False), (2, False), (3, True), (5, True)):
        known = index.classify(hits_of(*[virus] * n_viral, *[host] * (5 - n_viral)), 1)
        assert known.is_known.tolist() == [is_known]
        assert known.n_known_windows.tolist() == [n_viral]
        assert known.owner.tolist() == [2 if n_viral else 0]


def test_family_needs_half_of_the_hits():
    index = index_of({})
    for n_owner, owner in ((6, 0), (7, 1)):
        known = index.classify(hits_of((0, 80, 13, 0, 1, n_owner)), 1)
        assert known.owner.tolist() == [owner]


def test_records_are_judged_alone():
    index = index_of({})
    known = index.classify(
        hits_of((0, 80, 9, 0, 1, 9), (2, 80, 0, 0, 0, 0), (3, 80, 4, 0, 2, 4)), 5
    )
    assert known.is_known.tolist() == [True, False, False, True, False]
    assert known.owner.tolist() == [1, 0, 0, 2, 0]
    assert known.n_viral.tolist() == [9, 0, 0, 4, 0]


def test_fdr_follows_prevalence_and_strength():
    index = index_of({})
    strengths = np.array([1.0, 3.9, 4.0, 1.0])
    lengths = np.array([100, 300, 300, 9_000])
    found = index.false_discovery_rates(strengths, lengths, 0.05)
    ratios = np.array([0.01, 0.01, 0.001, 0.001])
    assert np.allclose(found, 0.95 * ratios / (0.95 * ratios + 0.05), rtol=1e-12)


def call_of(score: float, *, is_virus: bool) -> Call:
    return Call("a", 300, "scored", virus_score=score, is_virus=is_virus, false_discovery_rate=0.2)


@pytest.mark.parametrize(
    ("evidence", "words", "rates"),
    [
        ("both", ["both", "score", "known", ""], [0.1597, 0.2, 0.1597, 0.2]),
        ("score", ["score", "score", "", ""], [0.2, 0.2, 0.2, 0.2]),
        ("known", ["known", "", "known", ""], [0.1597, 0.2, 0.1597, 0.2]),
    ],
)
def test_evidence_option_selects_the_evidence(evidence, words, rates):
    index = index_of({})
    scores = (0.9, 0.9, 0.1, 0.1)
    calls = Calls.from_calls(call_of(score, is_virus=score > 0.5) for score in scores)
    hits = hits_of(*((i, 80, n, 0, 1, n) for i, n in enumerate((2, 0, 2, 1))))
    add_evidence(calls, hits, ThresholdOptions(evidence=evidence), index)
    assert calls.evidences == words
    assert calls.are_viruses == [word != "" for word in words]
    assert [round(rate, 4) for rate in calls.rates] == rates
    assert calls.virus_scores == list(scores)
    assert calls.n_known_kmers == [2, 0, 2, 1]
    assert calls.known_families == ["Unaviridae", "", "Unaviridae", ""]


def test_lower_fdr_of_the_score_is_kept():
    call = call_of(0.9, is_virus=True)
    calls = Calls.from_calls([replace(call, false_discovery_rate=0.0001)])
    add_evidence(calls, hits_of((0, 80, 2, 0, 1, 2)), ThresholdOptions(), index_of({}))
    assert (calls.rates, calls.evidences) == ([0.0001], ["both"])


def test_notes_mark_possible_integrated_copies():
    index = index_of({})
    virus = (0, 6_000, 400, 0, 2, 390)
    calls = Calls.from_calls([call_of(0.1, is_virus=False)])
    add_evidence(calls, hits_of(virus, virus, (0, 6_000, 0, 0, 0, 0)), ThresholdOptions(), index)
    assert calls.notes == ["known in 2 of 3 parts: may be a provirus"]
    calls = Calls.from_calls([call_of(0.1, is_virus=False)])
    add_evidence(calls, hits_of((0, 80, 4, 0, 3, 4)), ThresholdOptions(), index)
    assert calls.notes == [MAY_BE_ENDOGENOUS]


def test_protein_has_the_fdr_of_its_codons():
    rates = []
    for length, is_protein in ((450, False), (150, True)):
        calls = Calls.from_calls([replace(call_of(0.1, is_virus=False), length=length)])
        hits = hits_of((0, 80, 2, 0, 1, 2))
        add_evidence(calls, hits, ThresholdOptions(), index_of({}), is_protein=is_protein)
        rates += calls.rates
    assert rates[0] == rates[1]


def test_record_without_score_is_not_called():
    calls = Calls.from_calls([Call("a", 300, "no_orf")])
    add_evidence(calls, hits_of((0, 80, 9, 0, 1, 9)), ThresholdOptions(), index_of({}))
    assert (calls.are_viruses, calls.evidences) == ([False], [""])


# The file


def test_damaged_index_is_rejected(tmp_path):
    path = tmp_path / "known.safetensors"
    with pytest.raises(UnavailableError, match="is not the index of known viruses"):
        load_known_index(path)
    facts = {"format": 0}
    save_file({"firsts": np.zeros(1, np.int32)}, path, {"facts": json.dumps(facts)})
    with pytest.raises(UnavailableError, match="its format is 0"):
        load_known_index(path)


def test_truncated_entries_are_rejected(viruses):
    index = index_of(viruses)
    with pytest.raises(ValueError, match="bytes of"):
        replace(index, entries=index.entries[:-1])


def test_built_in_index_fits_its_limits():
    path = ROOT / "virnucpro/embedded/known.safetensors"
    assert path.stat().st_size <= 20_000_000
    index = KnownIndex.load_builtin()
    assert len(index.owners) <= CELLULAR
    for one in index.false_calls:
        assert list(one.false_per_true) == sorted(one.false_per_true, reverse=True)


def test_organism_is_read_from_titles():
    title = "NC_2.1 |Norovirus GII, complete|Peru|Norwalk virus|GCF_1.1"
    assert organism_of(title) == "Norwalk virus"
    assert organism_of("NC_1.1 Okra mosaic virus isolate A, complete") == "Okra mosaic virus"


# Runs


@pytest.fixture(scope="module")
def lambda_pieces(tmp_path_factory) -> Path:
    """Pieces of phage lambda, and random sequences."""
    path = SHARED_INPUTS / "lambda_virus.fa"
    if not path.exists():
        pytest.skip("the genome of lambda is not here")
    [record] = read_fasta(path)
    pieces = {f"v{i}": record.sequence[i : i + 300] for i in range(0, 45_000, 3_000)}
    randoms = {f"r{i}": open_dna(300, np.random.default_rng(i)) for i in range(5)}
    return write(tmp_path_factory.mktemp("lambda") / "in.fa", **pieces, **randoms)


def test_known_pieces_are_called(lambda_pieces, tmp_path):
    predict(lambda_pieces, to=tmp_path / "both")
    predict(lambda_pieces, to=tmp_path / "score", evidence="score")
    both, by_score = (
        {row["record"]: row for row in rows(tmp_path / name / "predictions.tsv")}
        for name in ("both", "score")
    )
    pieces = [name for name in both if name.startswith("v")]
    assert {both[name]["call"] for name in pieces} == {"virus"}
    assert "other" in {by_score[name]["call"] for name in pieces}
    for name, row in both.items():
        assert row["virus_score"] == by_score[name]["virus_score"]
        assert row["n_known_kmers"] == by_score[name]["n_known_kmers"]
        is_scored = by_score[name]["call"] == "virus"
        is_known = row["evidence"] in ("known", "both")
        assert is_known == name.startswith("v")
        assert (
            row["evidence"]
            == {(0, 1): "known", (1, 1): "both", (1, 0): "score", (0, 0): ""}[is_scored, is_known]
        )
        assert by_score[name]["evidence"] == ("score" if is_scored else "")
    viruses = {row["record"] for row in rows(tmp_path / "both/viruses.tsv")}
    assert viruses == {name for name, row in both.items() if row["call"] == "virus"}


def test_known_proteins_are_called(tmp_path):
    predict(ROOT / "examples/proteins.faa", to=tmp_path / "known", evidence="known")
    table = {row["record"]: row for row in rows(tmp_path / "known/predictions.tsv")}
    called = {name for name, row in table.items() if row["call"] == "virus"}
    assert called == {name for name in table if not name.startswith("NP_")}
    spike = table["P0DTC2"]
    assert (spike["evidence"], spike["known_family"]) == ("known", "Coronaviridae")
    assert int(spike["n_known_kmers"]) > 100


def test_resume_changes_evidence_without_scoring(lambda_pieces, tmp_path):
    folder = tmp_path / "run"
    predict(lambda_pieces, to=folder, evidence="score")
    scores = {path.name: path.read_bytes() for path in (folder / "scores").glob("*.scores")}
    assert scores
    predict(lambda_pieces, to=folder, evidence="known", resume=True)
    now = {path.name: path.read_bytes() for path in (folder / "scores").glob("*.scores")}
    assert now == scores
    predict(lambda_pieces, to=tmp_path / "fresh", evidence="known")
    for name in ("predictions.tsv", "viruses.tsv", "viruses.fasta"):
        assert (folder / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes()
    assert {row["evidence"] for row in rows(folder / "predictions.tsv")} == {"known", ""}
    stored = json.loads((folder / "run.json").read_text())
    assert stored["recipe"]["known_sha256"] == KnownIndex.load_builtin().sha256
    assert stored["cut"]["evidence"] == "known"


# The build


def test_build_indexes_a_toy_catalogue(tmp_path):
    rng = np.random.default_rng(1)
    phage, relative, cell = (open_dna(3_000, rng) for _ in range(3))
    relative = phage[:600] + relative[600:]
    cell = phage[2_400:] + cell[600:]
    names = ("id", "file", "label", "kind", "family", "genus", "cluster", "genome_group")
    columns = (*names, "length", "source_id", "organism", "source_repo", "source_path")
    table = [
        ("V1", "a.fa.gz", "viral", "phage", "Unaviridae", "A", "c1", "g1", "One virus"),
        ("V2", "a.fa.gz", "viral", "phage", "Unaviridae", "A", "c1", "g2", "Two virus"),
        ("C1", "b.fa.gz", "cellular", "bacteria", "B", "C", "", "", "Cella"),
    ]
    lines = ["\t".join(columns)]
    lines += ["\t".join((*row[:8], "3000", row[0], row[8], "repo", "path")) for row in table]

    def packed(name: str, text: str) -> Path:
        with gzip.open(tmp_path / name, "wt") as handle:
            handle.write(text)
        return tmp_path / name

    catalogue = packed("manifest.tsv.gz", "\n".join(lines) + "\n")
    packed("a.fa.gz", f">V1 x\n{phage}\n>V2 x\n{relative}\n")
    packed("b.fa.gz", f">C1 x\n{cell}\n")
    script = ROOT / "scripts/weights/build_known_index.py"
    out = tmp_path / "known.safetensors"
    vmr = write_vmr(tmp_path)
    lineages = tmp_path / "lineage.json"
    options = [catalogue, "--vmr", vmr, "--lineages", lineages]
    make_lineages = [script.with_name("build_lineages.py"), lineages, vmr, catalogue]
    made = virnucpro(*make_lineages, run=run_script)
    assert made.returncode == 0, made.stderr
    done = virnucpro(script, out, *options, run=run_script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("viruses, species, k-mers, cellular k-mers\t2\t2\t")
    index = load_known_index(out)
    assert index.owners[1] == "Unaviridae"
    taxa = load_lineages(lineages)
    assert index.lineages_sha256 == taxa.sha256
    counts, n_kmers = index.count_nodes(Windows.from_sequences([phage, relative]))
    named = [taxa.taxa[i].genus for i in taxa.name(counts, n_kmers, index.nodes)]
    assert named == ["Alphavirus", "Betavirus"]
    hits = index.look_up([phage[600:2_400], phage[:600], phage[2_400:], dna(1_000, 3)])
    known = index.classify(hits, 4)
    assert known.is_known.tolist() == [True, True, False, False]
    assert hits.n_cellular[2] > 0
    assert hits.n_viral[1] / 600 > 2 * hits.n_viral[0] / 1_800  # shared k-mers are denser
