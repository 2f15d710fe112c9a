"""Build the index of known viruses, virnucpro/embedded/known.safetensors, and measure it.

    python scripts/weights/build_known_index.py known.safetensors CATALOGUE.tsv.gz ...
        [--fasta REFERENCES.fa.gz ...] [--leave-out FOLDER ...] > known.tsv

Catalogues are those of ``scorer_manifest.py``: their viruses and cells. FASTA files have more
viruses, which are only in the index. ``--leave-out`` names folders of catalogues that are measured
as unknown, for a test before their sequences are in the index.

The index has k-mers of stretches of 25 codons or more, which are coding or may be: one in two of
those that several species have, and of the others one in six, or one in 12 if no genome with the
k-mer is shorter than 50 kb. All are chosen by hash. Relatives share the first, and fragments of
known viruses the others. Left out are k-mers with fewer than four different residues. K-mers that a
cell has, too, are in the index as cellular.

A species is a set of viruses with one name, one genome, or half of their k-mers in common. Each
figure counts fragments. Viruses are looked up once as they are, and once without the k-mers that
only their species has: a k-mer of two species then counts as one of a single species. Cells are
looked up as if no cell of their family (or else genus or source) had been read. The shipped ratios
of false to true calls come from the latter two.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import hashlib
import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from csv import QUOTE_NONE, DictReader
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from scorer_manifest import NAMELESS, Groups, Row
from train_kin import Viruses, families_of, owners_of

from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.sequences.open_codes import Digits, encode
from virnucpro.viral.features import RESIDUE_OF_CODE
from virnucpro.viral.known import (
    BUCKET_BITS,
    BUCKETS_PER_GROUP,
    CELLULAR,
    FORMAT,
    MOST_CELLULAR,
    NEEDED_PER_FAMILY_HIT,
    OWNER_BITS,
    PADDING,
    REST_BITS,
)
from virnucpro.viral.windows import Windows, find_stretches

SOURCE = Path(__file__).with_name("known_kmers.c")
SHORTEST_STRETCH = 25  # codons
STRETCH_PIECE = 10_000  # bases searched for stretches at once
BASES_AT_ONCE = 3_000_000
SHORT_GENOME = 50_000  # bases
RATE_OF_SEVERAL, RATE_OF_SHORT, RATE_OF_LONG = 1 / 2, 1 / 6, 1 / 12  # of k-mers in the sample
FEWEST_RESIDUES = 4  # different ones in a k-mer
FEWEST, OFFSET, KMERS_PER_HIT = 2, 1.5, 600  # hits of a known window: see ``KnownIndex.needed``
STRENGTHS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
LENGTHS = (150, 300, 500, 1_000, 3_000, 10_000)
SEEDS = (1, 2)
NO_GROUP = -2  # as in known_kmers.c
REFERENCE = "reference"  # kind of the viruses of FASTA files
SAME_SPECIES = 0.5  # share of the k-mers of the shorter genome
SPECIES_RATE = 1 / 40  # of the k-mers that are compared to join species
MOST_OF_KMER = 300  # genomes with a k-mer that is compared
FEWEST_OF_REFERENCE, SHARE_OF_REFERENCE = 3, 0.7  # k-mers that name the family of a reference
MOST_UNKNOWN = 0.05  # letters other than bases in a sequence
# segments of polydnaviruses have genes of their hosts, wasps
HOST_LIKE = re.compile("ichnovirus|bracovirus|Cotesia congregata virus|Venturia canescens virus")


@dataclass(frozen=True, slots=True)
class LabelledSequence:
    """A sequence of a catalogue or of a FASTA file, and what is known about it."""

    digits: Digits
    row: Row
    folder: str


def read_fasta(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the id, the rest of the header, and the letters; skip what is no nucleotide sequence.

    Headers of reference collections are not always text.
    """
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for entry in re.split(rb"(?:^|\n)>", content)[1:]:
        header, _, lines = entry.partition(b"\n")
        letters = lines.replace(b"\n", b"").replace(b"\r", b"").decode("latin-1").upper()
        n_bases = sum(map(letters.count, "ACGTUN"))
        if n_bases >= (1 - MOST_UNKNOWN) * len(letters):
            name, _, rest = header.decode("latin-1").partition(" ")
            yield name, rest, letters


def read_catalogues(catalogues: Sequence[Path]) -> Iterator[LabelledSequence]:
    """Yield the viral and the cellular sequences of catalogues."""
    for catalogue in catalogues:
        with gzip.open(catalogue, "rt", encoding="utf-8") as lines:
            rows = {
                row["id"]: row
                for row in DictReader(lines, delimiter="\t", quoting=QUOTE_NONE)
                if row["label"] in ("viral", "cellular")
            }
        names = dict.fromkeys(Path(row["file"]).name for row in rows.values())
        for name in names:
            for record, _, letters in read_fasta(catalogue.parent / name):
                if record in rows:
                    yield LabelledSequence(encode(letters), rows[record], catalogue.parent.name)


def read_references(paths: Sequence[Path]) -> Iterator[LabelledSequence]:
    """Yield the viruses of FASTA files, without polydnaviruses."""
    for path in paths:
        for record, title, letters in read_fasta(path):
            if HOST_LIKE.search(title):
                continue
            fields = dict.fromkeys(("family", "genus", "cluster", "genome_group"), "")
            row = {"id": record, "label": "viral", "kind": REFERENCE, **fields}
            row["organism"] = organism_of(title)
            yield LabelledSequence(encode(letters), row, path.parent.name)


def organism_of(title: str) -> str:
    """
    >>> organism_of("NC_1.1 Okra mosaic virus isolate A, complete genome")
    'Okra mosaic virus'
    >>> organism_of("NC_2.1 |Norovirus GII, complete|Peru|Norwalk virus|GCF_1.1")
    'Norwalk virus'
    """
    parts = title.split("|")
    if len(parts) > 3:
        return parts[3]
    name = title.partition(" ")[2]
    return re.split(r",| isolate | strain | segment | RNA ?\d| complete ", name)[0].strip()


# The table of k-mers


def compile_library(folder: Path) -> ctypes.CDLL:
    library = folder / "known_kmers.so"
    command = ("cc", "-std=c99", "-O3", "-shared", "-fPIC", "-o", str(library), str(SOURCE))
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def _address(array: NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


@dataclass(frozen=True, eq=False)
class KmerTable:
    """The k-mers of all viruses, and facts about each, by slot. (n_slots,)"""

    library: ctypes.CDLL
    hashes: NDArray[np.uint64]
    n_species: NDArray[np.uint8]
    owner: NDArray[np.int32]  # SEVERAL: several
    is_of_short: NDArray[np.uint8]
    cells: NDArray[np.int32]  # the group of the cells that have the k-mer; NO_GROUP, SEVERAL
    latest: NDArray[np.int32]  # species

    @classmethod
    def for_viruses(cls, library: ctypes.CDLL, viruses: Sequence[LabelledSequence]) -> KmerTable:
        """An empty table with room for the k-mers of all coding stretches."""
        n_slots = 1 << (sum(len(virus.digits) for virus in viruses) // 2).bit_length()
        bytes_and_words = np.zeros((2, n_slots), np.uint8), np.zeros((2, n_slots), np.int32)
        (n_species, is_of_short), (owner, latest) = bytes_and_words
        cells = np.full(n_slots, NO_GROUP, np.int32)
        hashes = np.zeros(n_slots, np.uint64)
        return cls(library, hashes, n_species, owner, is_of_short, cells, latest)

    @property
    def n_slots(self) -> ctypes.c_int64:
        return ctypes.c_int64(len(self.hashes))

    def add_virus(
        self, digits: Digits, is_coding: Digits, species: int, owner: int, *, is_short: bool
    ) -> None:
        """Add a virus; viruses come in the order of their species."""
        self.library.add_virus(
            *(_address(digits), ctypes.c_int64(len(digits)), _address(is_coding)),
            *(_address(RESIDUE_OF_CODE), self.n_slots, _address(self.hashes)),
            *map(ctypes.c_int32, (species, owner)),
            *(ctypes.c_uint8(is_short), _address(self.latest), _address(self.n_species)),
            *(_address(self.owner), _address(self.is_of_short)),
        )

    def mark_cell(self, digits: Digits, group: int) -> None:
        self.library.mark_cell(
            *(_address(digits), ctypes.c_int64(len(digits)), _address(RESIDUE_OF_CODE)),
            *(self.n_slots, _address(self.hashes), ctypes.c_int32(group)),
            _address(self.cells),
        )

    def find(self, digits: Digits) -> tuple[int, IntArray]:
        """The number of k-mers of the sample in a fragment, and the slots of its different ones."""
        n_kmers, n_found = np.zeros((2, 1), dtype=np.int64)
        slots = np.empty(2 * len(digits), dtype=np.int64)
        self.library.find_slots(
            *(_address(digits), ctypes.c_int64(len(digits)), _address(RESIDUE_OF_CODE)),
            *(ctypes.c_uint64(limit_of(RATE_OF_SEVERAL)), self.n_slots),
            *(_address(self.hashes), _address(n_kmers), _address(slots), _address(n_found)),
        )
        return int(n_kmers[0]), np.unique(slots[: n_found[0]])

    def in_index(self, n_species: NDArray[np.uint8]) -> BoolArray:
        """Whether each k-mer is in an index of viruses where so many species have it."""
        rate = np.where(self.is_of_short == 1, RATE_OF_SHORT, RATE_OF_LONG)
        rate[n_species > 1] = RATE_OF_SEVERAL
        shares = (self.hashes >> np.uint64(32)).astype(np.float64) / 2**32
        is_sampled: BoolArray = (self.hashes > 0) & (n_species > 0) & (shares < rate)
        chosen = np.flatnonzero(is_sampled)
        is_sampled[chosen] = different_residues(self.hashes[chosen]) >= FEWEST_RESIDUES
        return is_sampled


def limit_of(rate: float) -> int:
    """The highest hash of a sample."""
    return int(rate * 2**64) - 1


def different_residues(hashes: NDArray[np.uint64]) -> IntArray:
    """The number of different residues of each k-mer; the hash of known.c is inverted. (n,)"""
    kmers = hashes ^ (hashes >> np.uint64(32))
    kmers *= np.uint64(pow(0x94D049BB133111EB, -1, 1 << 64))
    kmers ^= (kmers >> np.uint64(29)) ^ (kmers >> np.uint64(58))
    kmers *= np.uint64(pow(0xBF58476D1CE4E5B9, -1, 1 << 64))
    seen = np.zeros(len(kmers), dtype=np.uint32)
    for shift in range(0, 45, 5):
        seen |= np.uint32(1) << ((kmers >> np.uint64(shift)) & np.uint64(31)).astype(np.uint32)
    n_different = np.zeros(len(kmers), dtype=np.int64)
    for residue in range(20):
        n_different += (seen >> np.uint32(residue)) & 1
    return n_different


def mark_coding(pieces: Windows) -> Digits:
    """Whether a codon of a kept stretch begins at each base: 1 forward, 2 reverse, 3 both."""
    n_parts = -(-pieces.lengths // STRETCH_PIECE)
    owner = np.repeat(np.arange(len(pieces)), n_parts)
    offset = STRETCH_PIECE * (np.arange(len(owner)) - (np.cumsum(n_parts) - n_parts)[owner])
    lengths = np.minimum(STRETCH_PIECE, pieces.lengths[owner] - offset)
    parts = pieces.select(pieces.starts[owner] + offset, lengths)
    part, strand, start, n_codons = find_stretches(parts, shortest=SHORTEST_STRETCH)
    n_bases = 3 * n_codons
    behind = parts.lengths[part] - start - n_bases
    first = parts.starts[part] + np.where(strand == 1, behind, start)
    marks = np.zeros(len(pieces.digits), dtype=np.uint8)
    for begin, end, bit in zip(
        first.tolist(), (first + n_bases).tolist(), (strand + 1).tolist(), strict=True
    ):
        marks[begin:end:3] |= bit
    return marks


def species_of(viruses: Sequence[LabelledSequence], library: ctypes.CDLL) -> IntArray:
    """The species of each virus: see the description of this script. (n,)"""
    groups = Groups()
    names = [f"virus {number}" for number in range(len(viruses))]
    for name, virus in zip(names, viruses, strict=True):
        ties = [f"genome {virus.row['genome_group']}"] * (virus.row["genome_group"] != "")
        organism = virus.row["organism"].lower()
        ties += [f"organism {organism}"] * (organism.title() not in NAMELESS)
        groups.join([name, *ties])
    for one, other in similar_pairs(viruses, library):
        groups.join([names[one], names[other]])
    return np.unique([groups.root(name) for name in names], return_inverse=True)[1]


def similar_pairs(
    viruses: Sequence[LabelledSequence], library: ctypes.CDLL
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of viruses with many common k-mers."""
    with_kmer: dict[int, list[int]] = defaultdict(list)
    n_kmers = Counter[int]()
    for number, virus in enumerate(viruses):
        hashes = sampled_hashes(library, virus.digits, SPECIES_RATE)
        n_kmers[number] = len(hashes)
        for value in hashes.tolist():
            with_kmer[value].append(number)
    n_common = Counter[tuple[int, int]]()
    for members in with_kmer.values():
        if 1 < len(members) <= MOST_OF_KMER:
            n_common.update(
                (one, other) for i, one in enumerate(members) for other in members[i + 1 :]
            )
    for (one, other), n in n_common.items():
        if n >= 3 and n >= SAME_SPECIES * min(n_kmers[one], n_kmers[other]):
            yield one, other


def sampled_hashes(library: ctypes.CDLL, digits: Digits, rate: float) -> NDArray[np.uint64]:
    hashes = np.empty(2 * len(digits) + 1, dtype=np.uint64)
    n_kmers = np.zeros(1, dtype=np.int64)
    library.list_kmers(
        *(_address(digits), ctypes.c_int64(len(digits)), _address(RESIDUE_OF_CODE)),
        *(ctypes.c_uint64(limit_of(rate)), _address(hashes), _address(n_kmers)),
    )
    return np.unique(hashes[: n_kmers[0]])


def name_owners(
    viruses: Sequence[LabelledSequence], species: IntArray
) -> tuple[IntArray, tuple[str, ...]]:
    """The owner of each virus, and the names of all owners.

    Families come first, then the clusters of viruses without a family, as in ``train_kin``. A
    species of a FASTA file has a nameless owner; those behind the last number share it with others.
    """
    labelled = np.flatnonzero([virus.row["kind"] != REFERENCE for virus in viruses])
    rows = [viruses[number].row for number in labelled.tolist()]
    family = np.array(["" if row["family"] in NAMELESS else row["family"] for row in rows])
    nothing = np.zeros(len(rows), dtype=np.int64)
    columns = Viruses([], rows, family, family, family, nothing)
    of_labelled, clusters = owners_of(columns)
    names = [*families_of(columns), *(f"cluster:{name}" for name in clusters)]
    n_nameless = CELLULAR - len(names)
    owner = np.zeros(len(viruses), dtype=np.int64)
    owner[labelled] = of_labelled
    is_nameless = owner == 0
    owner[is_nameless] = len(names) + species[is_nameless] % n_nameless
    return owner, (*names, *[""] * n_nameless)


def fill_table(
    table: KmerTable, viruses: Sequence[LabelledSequence], species: IntArray, owner: IntArray
) -> None:
    """Add all viruses."""
    n_bases = Counter[str]()
    genomes = [virus.row["genome_group"] or virus.row["id"] for virus in viruses]
    for genome, virus in zip(genomes, viruses, strict=True):
        n_bases[genome] += len(virus.digits)
    order = np.argsort(species, kind="stable").tolist()
    for some in batches(order, [len(virus.digits) for virus in viruses]):
        digits = [viruses[number].digits for number in some]
        lengths = np.array(list(map(len, digits)), dtype=np.int64)
        pieces = Windows.concatenate(np.concatenate(digits), lengths)
        marks = np.split(mark_coding(pieces), np.cumsum(lengths)[:-1])
        for number, is_coding in zip(some, marks, strict=True):
            is_short = n_bases[genomes[number]] < SHORT_GENOME
            kinds = int(species[number]), int(owner[number])
            table.add_virus(viruses[number].digits, is_coding, *kinds, is_short=is_short)


def batches(order: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    some: list[int] = []
    n_bases = 0
    for number in order:
        some.append(number)
        n_bases += lengths[number]
        if n_bases >= BASES_AT_ONCE:
            yield some
            some, n_bases = [], 0
    if some:
        yield some


def name_references(
    table: KmerTable, viruses: Sequence[LabelledSequence], names: Sequence[str]
) -> dict[int, int]:
    """The family or cluster that owns most k-mers of each reference with enough of them."""
    n_named = next(number for number, name in enumerate(names) if number and not name)
    found = {}
    for number, virus in enumerate(viruses):
        if virus.row["kind"] != REFERENCE:
            continue
        owners = table.owner[table.find(virus.digits)[1]]
        counts = np.bincount(owners[(owners > 0) & (owners < n_named)], minlength=n_named)
        best = int(counts.argmax())
        if counts[best] >= max(FEWEST_OF_REFERENCE, SHARE_OF_REFERENCE * counts.sum()):
            found[number] = best
    return found


def cell_group(row: Row) -> str:
    """The cells that are left out together."""
    names = (row["family"], row["genus"], f"{row['source_repo']}/{row['source_path']}")
    return next(name for name in names if name not in NAMELESS)


# Figures


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
        """As in ``KnownIndex.classify``, but 0 for fragments with too many cellular hits."""
        needed = np.maximum(FEWEST, OFFSET + self.n_kmers / KMERS_PER_HIT)
        strength = np.maximum(self.n_owner, self.n_viral / NEEDED_PER_FAMILY_HIT) / needed
        return np.where(self.n_cellular < MOST_CELLULAR * self.n_viral, strength, 0)


def draw_fragments(
    table: KmerTable,
    sequences: Sequence[LabelledSequence],
    in_index: BoolArray,
    groups: Sequence[int],
) -> Fragments:
    """Draw a fragment of each length and seed from each sequence, and look it up.

    Cells of a group are looked up as if no cell of this group had been read; NO_GROUP: all count.
    """
    rows = []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        for number, (sequence, group) in enumerate(zip(sequences, groups, strict=True)):
            for n_bases in (one for one in LENGTHS if one <= len(sequence.digits)):
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


def print_figures(name: str, kinds: Sequence[str], fragments: Fragments) -> None:
    """Print the share of fragments that are called, by kind and length."""
    is_called = fragments.strength >= 1
    of_fragment = np.array(kinds)[fragments.sequence]
    for kind in ("all", *sorted(set(kinds))):
        figures: list[object] = [name, kind]
        for n_bases in LENGTHS:
            chosen = (fragments.n_bases == n_bases) & ((of_fragment == kind) | (kind == "all"))
            n_called, n = int(is_called[chosen].sum()), int(chosen.sum())
            figures.append(f"{n_called}/{n} {n_called / n:.4f}" if n else "")
        print(*figures, sep="\t", flush=True)


def false_calls(viruses: Fragments, cells: Fragments) -> list[dict[str, object]]:
    """The ratio of false to true calls by length and strength, with one more false call."""
    rows = []
    for n_bases in LENGTHS:
        of_viruses = viruses.strength[viruses.n_bases == n_bases]
        of_cells = cells.strength[cells.n_bases == n_bases]
        ratios: list[float] = []
        for strength in STRENGTHS:
            n_false, n_true = (of_cells >= strength).sum() + 1, (of_viruses >= strength).sum()
            ratio = n_false / (len(of_cells) + 1) * len(of_viruses) / max(1, n_true)
            ratios.append(min([*ratios, round(float(ratio), 7)]))
        rows.append({"n_bases": n_bases, "false_per_true": ratios})
    return rows


# The file


def index_tensors(hashes: NDArray[np.uint64], owners: IntArray) -> dict[str, NDArray[np.generic]]:
    """The hash table that known.c reads. (n,), (n,)

    Raises:
        ValueError: a bucket has too many entries.
    """
    bucket = (hashes & np.uint64((1 << BUCKET_BITS) - 1)).astype(np.int64)
    rest = (hashes >> np.uint64(BUCKET_BITS)).astype(np.int64) & ((1 << REST_BITS) - 1)
    order = np.lexsort((owners, rest, bucket))
    values = (rest << OWNER_BITS | owners)[order]
    sizes = np.bincount(bucket, minlength=1 << BUCKET_BITS)
    if sizes.max() > np.iinfo(np.uint8).max:
        raise ValueError(f"{sizes.max()} k-mers in one bucket")
    firsts = (np.cumsum(sizes) - sizes)[::BUCKETS_PER_GROUP]
    entries = np.stack([values >> shift & 0xFF for shift in (0, 8, 16)], axis=1)
    return {
        "firsts": firsts.astype(np.int32),
        "sizes": sizes.astype(np.uint8),
        "entries": np.append(entries.astype(np.uint8).reshape(-1), np.zeros(PADDING, np.uint8)),
    }


def main(
    out: Path, catalogues: Sequence[Path], fasta: Sequence[Path], left_out: Sequence[str]
) -> None:
    sequences = list(read_catalogues(catalogues))
    cells = [one for one in sequences if one.row["label"] == "cellular"]
    viruses = [one for one in sequences if one.row["label"] == "viral"]
    viruses += read_references(fasta)
    unknown = [one for one in viruses if one.folder in left_out]
    viruses = [one for one in viruses if one.folder not in left_out]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(cell_group(c.row) for c in cells))}
    groups = [numbers[cell_group(cell.row)] for cell in cells]
    with TemporaryDirectory() as folder:
        library = compile_library(Path(folder))
        table = KmerTable.for_viruses(library, viruses)
        species = species_of(viruses, library)
        owner, names = name_owners(viruses, species)
        fill_table(table, viruses, species, owner)
        for number, group in name_references(table, viruses, names).items():
            owner[number] = group
        table = KmerTable.for_viruses(library, viruses)
        fill_table(table, viruses, species, owner)
        for cell, group in zip(cells, groups, strict=True):
            if cell.folder not in left_out:
                table.mark_cell(cell.digits, group)
        in_index = table.in_index(table.n_species)
        chosen = np.flatnonzero(in_index)
        is_cellular = table.cells[chosen] != NO_GROUP
        owners = np.where(is_cellular, CELLULAR, np.maximum(0, table.owner[chosen]))
        counts = len(viruses), len(set(species.tolist())), len(chosen), int(is_cellular.sum())
        print("viruses, species, k-mers, cellular k-mers", *counts, sep="\t")
        print("fragments", "kind", *LENGTHS, sep="\t")
        kinds = [virus.row["kind"] for virus in viruses]
        no_groups = [NO_GROUP] * len(viruses)
        print_figures("known", kinds, draw_fragments(table, viruses, in_index, no_groups))
        if unknown:
            found = draw_fragments(table, unknown, in_index, [NO_GROUP] * len(unknown))
            print_figures("left out", [one.row["kind"] for one in unknown], found)
        without_own = table.in_index(np.maximum(table.n_species, 1) - np.uint8(1))
        relatives = draw_fragments(table, viruses, without_own, no_groups)
        print_figures("species left out", kinds, relatives)
        has_relative = relatives_in_genus(viruses, species)
        print_figures(
            "species left out, genus in the index",
            [kind if has else "-" for kind, has in zip(kinds, has_relative, strict=True)],
            relatives,
        )
        of_cells = draw_fragments(table, cells, in_index, groups)
        print_figures("cells", [cell.row["kind"] for cell in cells], of_cells)
    facts = {
        "format": FORMAT,
        "limit": limit_of(RATE_OF_SEVERAL),
        "owners": names,
        "needed": (FEWEST, OFFSET, KMERS_PER_HIT),
        "strengths": STRENGTHS,
        "false_calls": false_calls(relatives, of_cells),
    }
    tensors = index_tensors(table.hashes[chosen], owners)
    save_file(tensors, out, {"facts": json.dumps(facts)})
    print("sha256", hashlib.sha256(out.read_bytes()).hexdigest(), sep="\t")


def relatives_in_genus(viruses: Sequence[LabelledSequence], species: IntArray) -> list[bool]:
    """Whether the named genus of each virus has another species."""
    of_genus: dict[tuple[str, str], set[int]] = defaultdict(set)
    keys = [(virus.row["family"], virus.row["genus"]) for virus in viruses]
    for key, number in zip(keys, species.tolist(), strict=True):
        of_genus[key].add(number)
    return [key[1] not in NAMELESS and len(of_genus[key]) > 1 for key in keys]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("catalogues", type=Path, nargs="+")
    parser.add_argument("--fasta", type=Path, nargs="*", default=[])
    parser.add_argument("--leave-out", nargs="*", default=[])
    arguments = parser.parse_args()
    main(arguments.out, arguments.catalogues, arguments.fasta, arguments.leave_out)
