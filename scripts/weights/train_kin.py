"""Make the words and the net that name viruses, virnucpro/embedded/kin.safetensors; measure them.

    python scripts/weights/train_kin.py kin.safetensors CATALOGUE.tsv.gz ... > kin.tsv

Catalogues are those of ``scorer_manifest.py``. The shipped file has the words of all genera. It is
measured with tables without some genera. Three tenths of the genera measure how certain a name is.
A fifth of the others is locked: these genera did not influence the choice of words and limits. Of
the rest, one genome in ten is left out too. For viruses without a genus, their cluster counts as
one. Viruses without a family are named after their cluster. The name of a cluster is the genus that
most of these viruses have, or else the accession of the longest sequence.

The net of kinds is fitted to all groups of ``scorer_manifest.py``; its slopes and figures come from
folds over these groups. Seeds are fixed: on the same machine, the same data makes the same file.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from reading import fragment_features
from safetensors.numpy import save_file
from scorer_manifest import NAMELESS, Groups, Row, kingdom_of, names_of, read_rows

from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.open_codes import Digits, encode
from virnucpro.viral.features import CLIP, NO_WORDS
from virnucpro.viral.taxonomy import (
    FORMAT,
    GROUP_FEATURES,
    GROUP_PIECE_BASES,
    KINDS,
    GroupNetwork,
    KmerTable,
    TaxonAssigner,
    assign_taxa,
    iter_kmers,
)
from virnucpro.viral.windows import Windows, opposite_strand

CALIBRATING, NOT_IN_TABLE = range(2, 5), range(5)  # tenths of the genera, for certainties
BUCKET_BITS, REST_BITS = 20, 16  # of a hash: the bucket, and the bits that the table stores
RARITY = np.uint64(16)  # one in this many words of a single genus is in the table
HASH_FACTOR = np.uint64(0xD1B54A32D192ED03)  # odd; other hashes in VirNucPro use other factors
LOCKED = (0, 5)  # tenths of another hash
LEFT_OUT_FAMILIES = (0, 1)  # tenths
LENGTHS = (1_000, 3_000, 10_000)
SEEDS = (1, 2, 3)
PER_GENUS = 2  # fragments for each genus, length and seed
N_CELLS = 2_000
N_FOLDS = 5
CERTAIN_FROM = (2, 4, 8)  # words
KIND_OF_KINGDOM = {
    "phages": "phage",
    "archaeal viruses": "archaeal virus",
    "RNA+ viruses": "RNA+",
    "RNA- viruses": "RNA-",
    "dsRNA viruses": "dsRNA",
    "ssDNA viruses of eukaryotes": "ssDNA",
    "dsDNA viruses of eukaryotes": "dsDNA",
    "reverse-transcribing viruses": "reverse-transcribing",
}
# catalogues lack the kind of these families, or have another kind than ICTV
KIND_OF_FAMILY = {
    "Phenuiviridae": "RNA-",
    "Tulasviridae": "RNA-",
    "Discoviridae": "RNA-",
    "Kolmioviridae": "RNA-",
    "Polymycoviridae": "dsRNA",
    "Curvulaviridae": "dsRNA",
    "Hadakaviridae": "RNA+",
    "Yadokariviridae": "RNA+",
}
# accessions of INSDC and RefSeq
ACCESSION = re.compile(
    r"(?<![A-Z])([A-Z]{2}_\d{6,9}|[A-Z]{1,2}\d{5,8}|[A-Z]{4}\d{8}|[A-Z]{6}\d{9})(\.\d+)?"
)
VAGUE = ("euk_RNA", "euk_DNA", "euk_unknown")  # kinds in catalogues
SHARES = (0.30, 0.08, 0.20, 0.12, 0.10, 0.08, 0.08, 0.05)  # of fragments, by kind
N_FRAGMENTS = {500: 25_000, 1_000: 25_000, 3_000: 15_000, 10_000: 7_500}
N_HIDDEN, N_EPOCHS, N_BATCH = 64, 4, 256


@dataclass(frozen=True, slots=True, eq=False)
class Viruses:
    """Viral sequences of the catalogues, as parallel columns, (n,)."""

    digits: list[Digits]
    rows: list[Row]
    family: NDArray[np.str_]  # "": none
    genus: NDArray[np.str_]
    group: NDArray[np.str_]
    kind: IntArray  # index in KINDS; -1: unknown

    @property
    def lengths(self) -> IntArray:
        return np.array([len(one) for one in self.digits])


def tenth_of(name: str) -> int:
    """
    >>> tenth_of("Fiersviridae/Perrunavirus")
    5
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % 10


def read_viruses(catalogues: list[Path]) -> Viruses:
    rows = {row["id"]: (path, row) for path, row in read_rows(catalogues)}
    viral = {name: row for name, (_, row) in rows.items() if row["label"] == "viral"}
    groups = Groups()
    for row in viral.values():
        groups.join(names_of(row))
    digits, kept = [], []
    for path in dict.fromkeys(path for path, row in rows.values() if row["label"] == "viral"):
        for record in read_fasta(path):
            if record.id in viral:
                digits.append(encode(record.sequence))
                kept.append(viral[record.id])
    family = ["" if row["family"] in NAMELESS else row["family"] for row in kept]
    genus = [row["cluster"] if row["genus"] in NAMELESS else row["genus"] for row in kept]
    return Viruses(
        digits,
        kept,
        np.array(family),
        np.array([f"{of}/{name}" for of, name in zip(family, genus, strict=True)]),
        np.array([groups.root(names_of(row)[0]) for row in kept]),
        np.array([_kind_of(row) for row in kept]),
    )


def _kind_of(row: Row) -> int:
    if row["family"] in KIND_OF_FAMILY:
        return KINDS.index(KIND_OF_FAMILY[row["family"]])
    return -1 if row["kind"] in VAGUE else KINDS.index(KIND_OF_KINGDOM[kingdom_of(row)])


# Words of families


def side_by_side(digits: Sequence[Digits]) -> Windows:
    return Windows.concatenate(np.concatenate(digits), np.array(list(map(len, digits))))


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """The concatenated words of all viruses, each once per virus."""

    numbers: IntArray
    virus: IntArray  # of each word

    @classmethod
    def of(cls, viruses: Viruses) -> Words:
        each = zip(*iter_kmers(side_by_side(viruses.digits)), strict=True)
        virus, numbers = map(np.concatenate, each)
        order = np.lexsort((numbers, virus))
        virus, numbers = virus[order], numbers[order]
        is_new = np.ones(len(order), dtype=np.bool_)
        is_new[1:] = (np.diff(virus) > 0) | (np.diff(numbers) > 0)
        return cls(numbers[is_new], virus[is_new])


def families_of(viruses: Viruses) -> tuple[str, ...]:
    """The names of families by owner; the first is empty."""
    return ("", *sorted(set(viruses.family.tolist()) - {""}))


def names_of_clusters(viruses: Viruses) -> NDArray[np.str_]:
    """The name of the cluster of each virus; empty if all of its viruses have a family. (n,)

    It is also empty if the cluster has neither a genus nor an accession.
    """
    rows: dict[str, list[Row]] = defaultdict(list)
    for row, family in zip(viruses.rows, viruses.family.tolist(), strict=True):
        if not family:
            rows[row["cluster"]].append(row)
    names = {cluster: _name_of_cluster(members) for cluster, members in rows.items()}
    return np.array([names.get(row["cluster"], "") for row in viruses.rows])


def _name_of_cluster(rows: Sequence[Row]) -> str:
    genera = Counter(row["genus"] for row in rows if row["genus"] not in NAMELESS)
    if genera:
        return min(genera, key=lambda genus: (-genera[genus], genus))
    longest_first = sorted(rows, key=lambda row: (-int(row["length"]), row["id"]))
    accessions = (ACCESSION.search(row["source_id"]) for row in longest_first)
    return next((match[0] for match in accessions if match), "")


def owners_of(viruses: Viruses) -> tuple[IntArray, tuple[str, ...]]:
    """The owner of the words of each virus, and the names of the clusters. (n,)"""
    families, clusters = families_of(viruses), names_of_clusters(viruses)
    is_of_cluster = (viruses.family == "") & (clusters != "")
    names = np.unique(clusters[is_of_cluster])
    places = len(families) + np.searchsorted(names, clusters)
    owner = np.where(is_of_cluster, places, np.searchsorted(families, viruses.family))
    return owner, tuple(names.tolist())


def kinds_of_families(viruses: Viruses, families: Sequence[str]) -> tuple[str, ...]:
    """The kind of most sequences of each family."""
    kinds: dict[str, Counter[int]] = defaultdict(Counter)
    for family, kind in zip(viruses.family.tolist(), viruses.kind.tolist(), strict=True):
        kinds[family][kind] += 1
    return ("", *(KINDS[kinds[family].most_common(1)[0][0]] for family in families[1:]))


def table_of(viruses: Viruses, words: Words, kept: BoolArray) -> KmerTable:
    """The words that only one family has in the kept viruses, and those of viruses without one.

    A word of the latter belongs to their cluster if no other cluster has it.
    """
    n_families = len(families_of(viruses))
    _, genus = np.unique(viruses.genus, return_inverse=True)
    of_units = np.stack([genus, owners_of(viruses)[0]])
    units, unit = np.unique(of_units, axis=1, return_inverse=True)
    n_bits = units.shape[1].bit_length()
    inside = kept[words.virus]
    pairs = (words.numbers[inside] << n_bits) + unit[words.virus[inside]]
    pairs.sort()
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    numbers, (genera, owners) = pairs >> n_bits, units[:, pairs & ((1 << n_bits) - 1)]
    first = np.flatnonzero(np.diff(numbers, prepend=-1))

    def are_one(values: IntArray) -> BoolArray:
        """Whether all viruses that have a word agree. -> (n_words,)"""
        return np.asarray(np.minimum.reduceat(values, first) == np.maximum.reduceat(values, first))

    numbers, is_shared = numbers[first], ~are_one(genera)
    is_kept = are_one(np.where(owners < n_families, owners, 0))
    is_kept &= is_shared | (hashes_of(numbers) % RARITY == 0)
    owners = np.where(are_one(owners), owners[first], 0)
    return kin_words(numbers[is_kept], owners[is_kept].astype(np.uint16))


def kin_words(numbers: IntArray, owners: NDArray[np.uint16]) -> KmerTable:
    """A table of distinct words and their owners. (n,), (n,)

    Raises:
        ValueError: one bucket has too many words.
    """
    keys = (hashes_of(numbers) >> np.uint64(64 - BUCKET_BITS - REST_BITS)).astype(np.int64)
    order = np.argsort(keys)
    keys = keys[order]
    n_of_bucket = np.bincount(keys >> REST_BITS, minlength=1 << BUCKET_BITS)
    if n_of_bucket.max(initial=0) > np.iinfo(np.uint8).max:
        raise ValueError(f"{n_of_bucket.max()} words in one bucket")
    return KmerTable(n_of_bucket.astype(np.uint8), keys.astype(np.uint16), owners[order])


def hashes_of(numbers: IntArray) -> NDArray[np.uint64]:
    """Hash words as in SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195).

    ``kmers.c`` looks words up by the same hash.
    """
    hashes: NDArray[np.uint64] = numbers.astype(np.uint64) * HASH_FACTOR
    hashes ^= hashes >> np.uint64(31)
    hashes *= HASH_FACTOR
    hashes ^= hashes >> np.uint64(29)
    return hashes


def fragments(
    viruses: Viruses, chosen: BoolArray, n_bases: int, rng: np.random.Generator
) -> Iterator[tuple[int, Digits]]:
    """Yield random fragments of each chosen genus, on random strands, with their viruses."""
    lengths = viruses.lengths
    is_long = chosen & (lengths >= n_bases)
    for genus in np.unique(viruses.genus[is_long]):
        members = np.flatnonzero(is_long & (viruses.genus == genus))
        for virus in rng.choice(members, PER_GENUS):
            start = rng.integers(lengths[virus] - n_bases, endpoint=True)
            piece = viruses.digits[virus][start : start + n_bases]
            yield int(virus), opposite_strand(piece) if rng.random() < 0.5 else piece


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """Fragments and the owners that name them, as parallel columns, (n,)."""

    virus: IntArray
    owner: IntArray
    has_family: BoolArray
    has_cluster: BoolArray
    n_words: IntArray

    @classmethod
    def of(cls, table: KmerTable, some: Sequence[tuple[int, Digits]], n_families: int) -> Named:
        digits = [digits for _, digits in some]
        owner, n_words, _ = assign_taxa(side_by_side(digits), table, n_families)
        virus = np.array([virus for virus, _ in some])
        has_cluster = owner >= n_families
        return cls(virus, owner, (owner > 0) & ~has_cluster, has_cluster, n_words)


def locked(viruses: Viruses) -> BoolArray:
    """The viruses of genera that did not influence any choice. (n,)"""
    names = [
        f"test{'c' if row['genus'] in NAMELESS else 'g'}:{genus}"
        for row, genus in zip(viruses.rows, viruses.genus.tolist(), strict=True)
    ]
    calibrating = [tenth_of(genus) in CALIBRATING for genus in viruses.genus.tolist()]
    are_locked: BoolArray = np.isin([tenth_of(name) for name in names], LOCKED) & ~np.array(
        calibrating
    )
    return are_locked


def certainties(viruses: Viruses, words: Words) -> list[tuple[int, float]]:
    """The share of named fragments of unknown genera that get the right kind, by words."""
    families = families_of(viruses)
    kinds = kinds_of_families(viruses, families)
    tenths = np.array([tenth_of(genus) for genus in viruses.genus.tolist()])
    table = table_of(viruses, words, ~np.isin(tenths, NOT_IN_TABLE))
    chosen = np.isin(tenths, CALIBRATING) & (viruses.kind >= 0)
    rng = np.random.default_rng(0)
    some = [one for n_bases in LENGTHS for one in fragments(viruses, chosen, n_bases, rng)]
    named = Named.of(table, some, len(families))
    truth = viruses.kind[named.virus]
    kind_of = np.array([KINDS.index(kind) if kind else -1 for kind in kinds])
    is_right = kind_of[np.where(named.has_family, named.owner, 0)] == truth
    ends = (*CERTAIN_FROM[1:], np.inf)
    values = []
    for low, high in zip(CERTAIN_FROM, ends, strict=True):
        inside = named.has_family & (named.n_words >= low) & (named.n_words < high)
        # one more counts as wrong, because no name is certain
        values.append((low, round(float(is_right[inside].sum() / (inside.sum() + 1)), 3)))
    return values


def measure_names(viruses: Viruses, words: Words, cells: list[Digits]) -> None:
    """Write how many left-out fragments are named, and how many of the names are right.

    The first two figures are for families, the last two for clusters.
    """
    genomes = np.array([tenth_of(row["genome_group"] or row["id"]) for row in viruses.rows])
    is_locked = locked(viruses)
    is_left_out = ~is_locked & (genomes == 0)
    kept = ~is_locked & ~is_left_out
    table = table_of(viruses, words, kept)
    clusters = np.array([row["cluster"] for row in viruses.rows])
    is_alone = ~np.isin(clusters, clusters[kept])
    has_family = viruses.family != ""
    is_known = np.isin(clusters, clusters[kept & ~has_family])
    columns = "fragments", "bases", "seed", "genera", "n", "named", "right", "cluster", "right"
    print(*columns, sep="\t")
    sets = {
        "genomes left out": is_left_out & has_family,
        "genera left out": is_locked & has_family,
        "genera left out, and their clusters": is_locked & has_family & is_alone,
        "genomes without a family": is_left_out & ~has_family,
        "genomes without a family, of known clusters": is_left_out & ~has_family & is_known,
        "genera without a family": is_locked & ~has_family,
        "genera without a family, of known clusters": is_locked & ~has_family & is_known,
    }
    for name, chosen in sets.items():
        _measure_set(name, viruses, chosen, table)
    families = np.array([tenth_of(f"family {family}") for family in viruses.family.tolist()])
    chosen = np.isin(families, LEFT_OUT_FAMILIES) & has_family
    _measure_set("families left out", viruses, chosen, table_of(viruses, words, ~chosen))
    named = Named.of(table, [(0, cell) for cell in cells], len(families_of(viruses)))
    shares = float(named.has_family.mean()), "", float(named.has_cluster.mean())
    print("cells", 3_000, "", "", len(cells), *_shown(shares), sep="\t")


def _measure_set(name: str, viruses: Viruses, chosen: BoolArray, table: KmerTable) -> None:
    families, clusters = families_of(viruses), owners_of(viruses)[1]
    names = np.array([*families, *clusters])
    for n_bases in LENGTHS:
        for seed in SEEDS:
            some = list(fragments(viruses, chosen, n_bases, np.random.default_rng(seed)))
            named = Named.of(table, some, len(families))
            n_genera = len(set(viruses.genus[named.virus].tolist()))
            figures: list[float | str] = []
            for has_name, truth in (
                (named.has_family, viruses.family),
                (named.has_cluster, names_of_clusters(viruses)),
            ):
                right = names[named.owner] == truth[named.virus]
                figures.append(float(has_name.mean()))
                figures.append(float(right[has_name].mean()) if has_name.any() else "")
            print(name, n_bases, seed, n_genera, len(some), *_shown(figures), sep="\t")


def _shown(figures: Sequence[float | str]) -> Iterator[str]:
    return (f"{figure:.3f}" if isinstance(figure, float) else str(figure) for figure in figures)


def read_cells(catalogues: list[Path]) -> list[Digits]:
    """Read cellular fragments of 3,000 bases."""
    rng = np.random.default_rng(0)
    rows = [(path, row) for path, row in read_rows(catalogues) if row["label"] == "cellular"]
    rows = [rows[i] for i in rng.permutation(len(rows)) if int(rows[i][1]["length"]) >= 3_000]
    chosen = {row["id"] for _, row in rows[:N_CELLS]}
    cells = []
    for path in dict.fromkeys(path for path, _ in rows):
        for record in read_fasta(path):
            if record.id in chosen:
                start = rng.integers(len(record.sequence) - 3_000, endpoint=True)
                cells.append(encode(record.sequence[start : start + 3_000]))
    return cells


# Kinds


@dataclass(frozen=True, slots=True, eq=False)
class Lessons:
    """Fragments as the net reads them, in parallel rows."""

    features: NDArray[np.float32]  # (n, n_features)
    kind: IntArray
    virus: IntArray
    n_bases: IntArray


def draw_lessons(viruses: Viruses) -> Lessons:
    """Draw fragments of all lengths: kinds by share, groups by a low power of their bases."""
    blocks = []
    for n_bases, n in N_FRAGMENTS.items():
        rng = np.random.default_rng(n_bases)
        members, weights = _members(viruses, n_bases)
        drawn = rng.choice(len(members), n, p=weights / weights.sum())
        virus = np.array([rng.choice(members[place]) for place in drawn])
        digits = np.empty((n, n_bases), dtype=np.uint8)
        for row, one in enumerate(virus):
            start = rng.integers(len(viruses.digits[one]) - n_bases, endpoint=True)
            digits[row] = viruses.digits[one][start : start + n_bases]
        is_reverse = rng.random(n) < 0.5
        digits[is_reverse] = opposite_strand(digits[is_reverse])
        size = min(n_bases, GROUP_PIECE_BASES)
        features = fragment_features(digits.reshape(-1, size), NO_WORDS)[:, GROUP_FEATURES]
        mean = features.reshape(n, n_bases // size, -1).mean(axis=1, dtype=np.float64)
        blocks.append((mean.astype(np.float32), viruses.kind[virus], virus, np.full(n, n_bases)))
    columns = (np.concatenate(column) for column in zip(*blocks, strict=True))
    return Lessons(*columns)


def _members(viruses: Viruses, n_bases: int) -> tuple[list[list[int]], FloatArray]:
    """The viruses that are long enough, by kind and group, and the weight of each group."""
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for virus, kind in enumerate(viruses.kind.tolist()):
        if kind >= 0 and len(viruses.digits[virus]) >= n_bases:
            groups[kind, str(viruses.group[virus])].append(virus)
    names = sorted(groups)
    bases = np.array([sum(len(viruses.digits[i]) for i in groups[name]) for name in names])
    weights, kinds = bases**0.25, np.array([kind for kind, _ in names])
    for kind, share in enumerate(SHARES):
        weights[kinds == kind] *= share / max(1e-9, weights[kinds == kind].sum())
    return [groups[name] for name in names], weights


def fold_of_groups(viruses: Viruses) -> IntArray:
    """The fold of each virus. The groups of a kind are spread evenly over the folds."""
    fold: dict[str, int] = {}
    for kind in range(len(KINDS)):
        names = sorted(set(viruses.group[viruses.kind == kind].tolist()) - fold.keys())
        names.sort(key=lambda name: hashlib.blake2b(name.encode()).digest())
        fold |= {name: place % N_FOLDS for place, name in enumerate(names)}
    return np.array([fold.get(name, -1) for name in viruses.group.tolist()])


def fit_net(lessons: Lessons, rows: IntArray, seed: int) -> GroupNetwork:
    """Fit a net to some of the lessons, without slopes."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    features = lessons.features[rows]
    mean, deviation = features.mean(axis=0), features.std(axis=0) + np.float32(1e-6)
    features = ((features - mean) / deviation).clip(-CLIP, CLIP)
    inputs, kinds = torch.from_numpy(features), torch.from_numpy(lessons.kind[rows])
    net = torch.nn.Sequential(
        torch.nn.Dropout(0.3),
        torch.nn.Linear(features.shape[1], N_HIDDEN),
        torch.nn.GELU(approximate="tanh"),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(N_HIDDEN, len(KINDS)),
    )
    n_steps = N_EPOCHS * (len(rows) // N_BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.02)
    pace = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, n_steps, pct_start=0.15)
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.03)
    for _ in range(N_EPOCHS):
        order = torch.from_numpy(rng.permutation(len(rows)))
        for first in range(0, len(rows) - N_BATCH + 1, N_BATCH):
            batch = order[first : first + N_BATCH]
            optimizer.zero_grad()
            loss_of(net(inputs[batch]), kinds[batch]).backward()
            optimizer.step()
            pace.step()
    weight, bias, last_weight, last_bias = (value.detach().numpy() for value in net.parameters())
    return GroupNetwork(mean, deviation, (weight, bias), (last_weight, last_bias), ((1, 1.0),))


def held_out_logits(lessons: Lessons, fold: IntArray) -> FloatArray:
    """The logits of each fragment by a net that has not seen its group. (n, n_kinds)"""
    logits = np.empty((len(lessons.kind), len(KINDS)))
    for number in range(N_FOLDS):
        net = fit_net(lessons, np.flatnonzero(fold != number), number)
        rows = np.flatnonzero(fold == number)
        logits[rows] = net.logits(lessons.features[rows].astype(np.float64))
    return logits


def fit_slopes(lessons: Lessons, logits: FloatArray) -> list[tuple[int, float]]:
    """Fit the slope at each length that makes the kinds of held-out fragments most probable.

    This is temperature scaling (Guo et al. 2017, arXiv:1706.04599).
    """
    slopes = []
    for n_bases in N_FRAGMENTS:
        some = lessons.n_bases == n_bases
        kinds = lessons.kind[some]

        def loss(slope: float, at: FloatArray = logits[some], kinds: IntArray = kinds) -> float:
            scaled = slope * at
            total = np.logaddexp.reduce(scaled, axis=1)
            return float((total - scaled[np.arange(len(kinds)), kinds]).mean())

        grid = np.arange(0.1, 2.0, 0.02)
        slopes.append((n_bases, round(float(min(grid, key=loss)), 2)))
    return slopes


def measure_kinds(
    lessons: Lessons, logits: FloatArray, slopes: Sequence[tuple[int, float]]
) -> None:
    """Write the confusion matrix of held-out fragments by length, and the net's reliability."""
    print("bases", "kind", "n", *KINDS, "right of those told so", sep="\t")
    for n_bases, slope in slopes:
        some = lessons.n_bases == n_bases
        chances = np.exp(slope * (logits[some] - logits[some].max(axis=1, keepdims=True)))
        chances /= chances.sum(axis=1, keepdims=True)
        told, kinds = chances.argmax(axis=1), lessons.kind[some]
        for kind, name in enumerate(KINDS):
            inside = kinds == kind
            if inside.any():
                shares = np.bincount(told[inside], minlength=len(KINDS)) / inside.sum()
                right = float((kinds == kind)[told == kind].mean())
                print(n_bases, name, inside.sum(), *_shown([*shares, right]), sep="\t")
        is_right, sure = told == kinds, chances.max(axis=1)
        print(n_bases, "all", len(kinds), *_shown([float(is_right.mean())]), sep="\t")
        for low in np.arange(0.1, 1.0, 0.1):
            inside = (sure >= low) & (sure < low + 0.1)
            if inside.sum() > 50:
                figures = (float(sure[inside].mean()), float(is_right[inside].mean()))
                print(n_bases, "sure", inside.sum(), *_shown(figures), sep="\t")


def main(out: Path, catalogues: list[Path]) -> None:
    torch.set_num_threads(1)
    viruses = read_viruses(catalogues)
    lessons = draw_lessons(viruses)
    logits = held_out_logits(lessons, fold_of_groups(viruses)[lessons.virus])
    slopes = fit_slopes(lessons, logits)
    measure_kinds(lessons, logits, slopes)
    net = fit_net(lessons, np.arange(len(lessons.kind)), N_FOLDS)
    words, families = Words.of(viruses), families_of(viruses)
    kinship = TaxonAssigner(
        table_of(viruses, words, np.ones(len(viruses.rows), dtype=np.bool_)),
        families,
        kinds_of_families(viruses, families),
        owners_of(viruses)[1],
        GroupNetwork(net.mean, net.deviation, net.hidden, net.output, tuple(slopes)),
        tuple(certainties(viruses, words)),
    )
    tensors, facts = kinship_tensors(kinship)
    save_file(tensors, out, facts)
    measure_names(viruses, words, read_cells(catalogues))


def kinship_tensors(
    kinship: TaxonAssigner,
) -> tuple[dict[str, NDArray[np.generic]], dict[str, str]]:
    """The tensors and the metadata of a file that ``load_taxonomy`` reads."""
    net, words = kinship.net, kinship.kmers
    tensors: dict[str, NDArray[np.generic]] = {
        "words.buckets": words.n_of_bucket,
        "words.rests": words.rests,
        "words.owners": words.taxa,
        "kind.mean": net.mean,
        "kind.deviation": net.deviation,
    }
    for i, (weight, bias) in enumerate((net.hidden, net.output)):
        tensors |= {f"kind.{i}.weight": weight, f"kind.{i}.bias": bias}
    facts = {
        "format": FORMAT,
        "kinds": KINDS,
        "families": kinship.families,
        "kind_of_family": kinship.kind_of_family,
        "clusters": kinship.clusters,
        "slopes": net.slopes,
        "certainties": kinship.certainties,
    }
    return tensors, {"facts": json.dumps(facts)}


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
