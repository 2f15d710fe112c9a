"""Train and evaluate the network for virus groups, virnucpro/embedded/virus_groups.safetensors.

    python scripts/weights/train_virus_groups.py OUT.safetensors CATALOGUE.tsv.gz ... > kinds.tsv

Catalogues are those of ``scorer_manifest.py``. The network is fitted to all groups. Its slopes and
metrics come from cross-validation. Seeds are fixed: on the same machine, the same data makes
the same file.
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
from feature_extraction import fragment_features
from numpy.typing import NDArray
from safetensors.numpy import save_file
from scorer_manifest import MISSING_NAMES, Row, UnionFind, grouping_keys, kingdom_of, read_rows

from virnucpro.core.numeric import FloatArray, IntArray
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.open_codes import Digits, encode
from virnucpro.viral.features import CLIP, NO_KMERS
from virnucpro.viral.taxonomy import (
    FORMAT,
    GROUP_FEATURES,
    GROUP_PIECE_BASES,
    KINDS,
    GroupNetwork,
    GroupPredictor,
)
from virnucpro.viral.windows import opposite_strand

N_FOLDS = 5
# k-mers from the named taxon, and the precision of its kind with so many or more: from
# ``measure_lineages.py``, on genera left out
CERTAINTIES = ((3, 0.997),)
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
# families with a kind that catalogues lack, or that differs from ICTV
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
AMBIGUOUS_KINDS = ("euk_RNA", "euk_DNA", "euk_unknown")  # kinds in catalogues
KIND_SHARES = (0.30, 0.08, 0.20, 0.12, 0.10, 0.08, 0.08, 0.05)  # of fragments, by kind
N_FRAGMENTS = {500: 25_000, 1_000: 25_000, 3_000: 15_000, 10_000: 7_500}
N_HIDDEN = 64
N_EPOCHS = 4
BATCH_SIZE = 256


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
        return np.array([len(digits) for digits in self.digits])


def read_viruses(catalogues: list[Path]) -> Viruses:
    rows = {row["id"]: (path, row) for path, row in read_rows(catalogues)}
    viral = {name: row for name, (_, row) in rows.items() if row["label"] == "viral"}
    groups = UnionFind()
    for row in viral.values():
        groups.union(grouping_keys(row))
    digits = []
    kept_rows = []
    for path in dict.fromkeys(path for path, row in rows.values() if row["label"] == "viral"):
        for record in read_fasta(path):
            if record.id in viral:
                digits.append(encode(record.sequence))
                kept_rows.append(viral[record.id])
    family = ["" if row["family"] in MISSING_NAMES else row["family"] for row in kept_rows]
    genus = [row["cluster"] if row["genus"] in MISSING_NAMES else row["genus"] for row in kept_rows]
    return Viruses(
        digits,
        kept_rows,
        np.array(family),
        np.array([f"{parent}/{name}" for parent, name in zip(family, genus, strict=True)]),
        np.array([groups.find(grouping_keys(row)[0]) for row in kept_rows]),
        np.array([kind_index(row) for row in kept_rows]),
    )


def kind_index(row: Row) -> int:
    """Return the kind of a virus as its index in KINDS, or -1 if unknown."""
    if row["family"] in KIND_OF_FAMILY:
        return KINDS.index(KIND_OF_FAMILY[row["family"]])
    return -1 if row["kind"] in AMBIGUOUS_KINDS else KINDS.index(KIND_OF_KINGDOM[kingdom_of(row)])


# Families and clusters


def family_names(viruses: Viruses) -> tuple[str, ...]:
    """Return the names of families by owner. The first is empty."""
    return ("", *sorted(set(viruses.family.tolist()) - {""}))


def cluster_names(viruses: Viruses) -> NDArray[np.str_]:
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
    genera = Counter(row["genus"] for row in rows if row["genus"] not in MISSING_NAMES)
    if genera:
        return min(genera, key=lambda genus: (-genera[genus], genus))
    longest_first = sorted(rows, key=lambda row: (-int(row["length"]), row["id"]))
    accessions = (ACCESSION.search(row["source_id"]) for row in longest_first)
    return next((match[0] for match in accessions if match), "")


def assign_owners(viruses: Viruses) -> tuple[IntArray, tuple[str, ...]]:
    """The owner of the k-mers of each virus, and the names of the clusters. (n,)"""
    families = family_names(viruses)
    clusters = cluster_names(viruses)
    is_of_cluster = (viruses.family == "") & (clusters != "")
    names = np.unique(clusters[is_of_cluster])
    indices = len(families) + np.searchsorted(names, clusters)
    owner = np.where(is_of_cluster, indices, np.searchsorted(families, viruses.family))
    return owner, tuple(names.tolist())


# Kinds


def _format(values: Sequence[float]) -> Iterator[str]:
    return (f"{value:.3f}" for value in values)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSet:
    """Features of fragments, in parallel rows."""

    features: NDArray[np.float32]  # (n, n_features)
    kind: IntArray
    virus: IntArray
    n_bases: IntArray


def sample_training_set(viruses: Viruses) -> TrainingSet:
    """Sample fragments of all lengths: kinds by share, groups by a low power of their bases."""
    blocks = []
    for n_bases, n in N_FRAGMENTS.items():
        rng = np.random.default_rng(n_bases)
        members, weights = _group_members(viruses, n_bases)
        sampled = rng.choice(len(members), n, p=weights / weights.sum())
        virus = np.array([rng.choice(members[index]) for index in sampled])
        digits = np.empty((n, n_bases), dtype=np.uint8)
        for row, number in enumerate(virus):
            start = rng.integers(len(viruses.digits[number]) - n_bases, endpoint=True)
            digits[row] = viruses.digits[number][start : start + n_bases]
        is_reverse = rng.random(n) < 0.5
        digits[is_reverse] = opposite_strand(digits[is_reverse])
        size = min(n_bases, GROUP_PIECE_BASES)
        features = fragment_features(digits.reshape(-1, size), NO_KMERS)[:, GROUP_FEATURES]
        mean = features.reshape(n, n_bases // size, -1).mean(axis=1, dtype=np.float64)
        blocks.append((mean.astype(np.float32), viruses.kind[virus], virus, np.full(n, n_bases)))
    columns = (np.concatenate(column) for column in zip(*blocks, strict=True))
    return TrainingSet(*columns)


def _group_members(viruses: Viruses, n_bases: int) -> tuple[list[list[int]], FloatArray]:
    """Return the viruses that are long enough, by kind and group, and group weights."""
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for virus, kind in enumerate(viruses.kind.tolist()):
        if kind >= 0 and len(viruses.digits[virus]) >= n_bases:
            groups[kind, str(viruses.group[virus])].append(virus)
    names = sorted(groups)
    bases = np.array([sum(len(viruses.digits[i]) for i in groups[name]) for name in names])
    weights = bases**0.25
    kinds = np.array([kind for kind, _ in names])
    for kind, share in enumerate(KIND_SHARES):
        weights[kinds == kind] *= share / max(1e-9, weights[kinds == kind].sum())
    return [groups[name] for name in names], weights


def assign_folds(viruses: Viruses) -> IntArray:
    """Return the fold of each virus. Folds are stratified by kind."""
    fold: dict[str, int] = {}
    for kind in range(len(KINDS)):
        names = sorted(set(viruses.group[viruses.kind == kind].tolist()) - fold.keys())
        names.sort(key=lambda name: hashlib.blake2b(name.encode()).digest())
        fold |= {name: index % N_FOLDS for index, name in enumerate(names)}
    return np.array([fold.get(name, -1) for name in viruses.group.tolist()])


def fit_network(training_set: TrainingSet, rows: IntArray, seed: int) -> GroupNetwork:
    """Fit a network to some rows, without slopes."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    features = training_set.features[rows]
    mean = features.mean(axis=0)
    deviation = features.std(axis=0) + np.float32(1e-6)
    features = ((features - mean) / deviation).clip(-CLIP, CLIP)
    inputs = torch.from_numpy(features)
    kinds = torch.from_numpy(training_set.kind[rows])
    net = torch.nn.Sequential(
        torch.nn.Dropout(0.3),
        torch.nn.Linear(features.shape[1], N_HIDDEN),
        torch.nn.GELU(approximate="tanh"),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(N_HIDDEN, len(KINDS)),
    )
    n_steps = N_EPOCHS * (len(rows) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, n_steps, pct_start=0.15)
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.03)
    for _ in range(N_EPOCHS):
        order = torch.from_numpy(rng.permutation(len(rows)))
        for first in range(0, len(rows) - BATCH_SIZE + 1, BATCH_SIZE):
            batch = order[first : first + BATCH_SIZE]
            optimizer.zero_grad()
            loss(net(inputs[batch]), kinds[batch]).backward()
            optimizer.step()
            schedule.step()
    weight, bias, last_weight, last_bias = (value.detach().numpy() for value in net.parameters())
    return GroupNetwork(mean, deviation, (weight, bias), (last_weight, last_bias), ((1, 1.0),))


def held_out_logits(training_set: TrainingSet, fold: IntArray) -> FloatArray:
    """Cross-validate: return the logits of held-out fragments. (n, n_kinds)"""
    logits = np.empty((len(training_set.kind), len(KINDS)))
    for number in range(N_FOLDS):
        net = fit_network(training_set, np.flatnonzero(fold != number), number)
        rows = np.flatnonzero(fold == number)
        logits[rows] = net.logits(training_set.features[rows].astype(np.float64))
    return logits


def fit_slopes(training_set: TrainingSet, logits: FloatArray) -> list[tuple[int, float]]:
    """Fit the slope at each length to held-out fragments, by maximum likelihood.

    This is temperature scaling (Guo et al. 2017, arXiv:1706.04599).
    """
    slopes = []
    for n_bases in N_FRAGMENTS:
        is_length = training_set.n_bases == n_bases
        kinds = training_set.kind[is_length]

        def loss(
            slope: float, unscaled: FloatArray = logits[is_length], kinds: IntArray = kinds
        ) -> float:
            scaled = slope * unscaled
            total = np.logaddexp.reduce(scaled, axis=1)
            return float((total - scaled[np.arange(len(kinds)), kinds]).mean())

        grid = np.arange(0.1, 2.0, 0.02)
        slopes.append((n_bases, round(float(min(grid, key=loss)), 2)))
    return slopes


def print_confusion(
    training_set: TrainingSet, logits: FloatArray, slopes: Sequence[tuple[int, float]]
) -> None:
    """Write the confusion matrix of held-out fragments by length, and a reliability diagram."""
    print("bases", "kind", "n", *KINDS, "precision", sep="\t")
    for n_bases, slope in slopes:
        is_length = training_set.n_bases == n_bases
        probabilities = np.exp(
            slope * (logits[is_length] - logits[is_length].max(axis=1, keepdims=True))
        )
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        predicted = probabilities.argmax(axis=1)
        kinds = training_set.kind[is_length]
        for kind, name in enumerate(KINDS):
            is_kind = kinds == kind
            if is_kind.any():
                shares = np.bincount(predicted[is_kind], minlength=len(KINDS)) / is_kind.sum()
                precision = float((kinds == kind)[predicted == kind].mean())
                print(n_bases, name, is_kind.sum(), *_format([*shares, precision]), sep="\t")
        is_correct = predicted == kinds
        confidence = probabilities.max(axis=1)
        print(n_bases, "all", len(kinds), *_format([float(is_correct.mean())]), sep="\t")
        for low in np.arange(0.1, 1.0, 0.1):
            in_bin = (confidence >= low) & (confidence < low + 0.1)
            if in_bin.sum() > 50:
                reliability = (float(confidence[in_bin].mean()), float(is_correct[in_bin].mean()))
                print(n_bases, "confidence", in_bin.sum(), *_format(reliability), sep="\t")


def main(out: Path, catalogues: list[Path]) -> None:
    torch.set_num_threads(1)
    viruses = read_viruses(catalogues)
    training_set = sample_training_set(viruses)
    logits = held_out_logits(training_set, assign_folds(viruses)[training_set.virus])
    slopes = fit_slopes(training_set, logits)
    print_confusion(training_set, logits, slopes)
    net = fit_network(training_set, np.arange(len(training_set.kind)), N_FOLDS)
    network = GroupNetwork(net.mean, net.deviation, net.hidden, net.output, tuple(slopes))
    tensors, metadata = predictor_tensors(GroupPredictor(network, CERTAINTIES))
    save_file(tensors, out, metadata)


def predictor_tensors(
    predictor: GroupPredictor,
) -> tuple[dict[str, NDArray[np.generic]], dict[str, str]]:
    """Return the tensors and the metadata of a file that ``load_groups`` reads."""
    network = predictor.network
    tensors: dict[str, NDArray[np.generic]] = {
        "kind.mean": network.mean,
        "kind.deviation": network.deviation,
    }
    for i, (weight, bias) in enumerate((network.hidden, network.output)):
        tensors |= {f"kind.{i}.weight": weight, f"kind.{i}.bias": bias}
    facts = {
        "format": FORMAT,
        "kinds": KINDS,
        "slopes": network.slopes,
        "certainties": predictor.certainties,
    }
    return tensors, {"facts": json.dumps(facts)}


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
