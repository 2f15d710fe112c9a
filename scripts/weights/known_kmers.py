"""Read labelled viruses and cells, and sample the k-mers of the index of known viruses.

``build_known_index.py`` documents the sample. ``known_kmers.c`` has the loops.
"""

from __future__ import annotations

import ctypes
import gzip
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from csv import QUOTE_NONE, DictReader
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scorer_manifest import MISSING_NAMES, Row, UnionFind

from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.sequences.open_codes import Digits, encode
from virnucpro.viral.features import RESIDUE_BY_CODON
from virnucpro.viral.windows import Windows, find_stretches

SOURCE = Path(__file__).with_name("known_kmers.c")
SHORTEST_STRETCH = 25  # codons
STRETCH_PIECE = 10_000  # bases searched for stretches at once
BATCH_BASES = 3_000_000
SHORT_GENOME = 50_000  # bases
# share of sampled k-mers in the index
RATE_OF_SEVERAL = 1
RATE_OF_SHORT = 2 / 5
RATE_OF_LONG = 1 / 6
MIN_DISTINCT_RESIDUES = 6  # in a k-mer
SMER_OFFSETS = range(6)  # 4-mers in a k-mer of nine residues, from its end (syncmers)
MIDDLE_SMER = 2
REFERENCE = "reference"  # kind of the viruses of FASTA files
SAME_SPECIES_SHARE = 0.5  # share of the k-mers of the shorter genome
SPECIES_RATE = 1 / 20  # of sampled k-mers that are compared to join species
MAX_KMER_GENOMES = 300  # genomes with a k-mer that is compared
MAX_UNKNOWN_SHARE = 0.05  # letters other than bases in a sequence
# segments of polydnaviruses have genes of their hosts, wasps
HOST_LIKE_TITLE = re.compile(
    "ichnovirus|bracovirus|Cotesia congregata virus|Venturia canescens virus"
)


@dataclass(frozen=True, slots=True)
class LabelledSequence:
    """A sequence of a catalogue or of a FASTA file, with its metadata."""

    digits: Digits
    row: Row
    folder: str


def read_fasta(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the id, the rest of the header, and the letters of nucleotide sequences.

    Headers of reference collections are not always text.
    """
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for entry in re.split(rb"(?:^|\n)>", content)[1:]:
        header, _, lines = entry.partition(b"\n")
        letters = lines.replace(b"\n", b"").replace(b"\r", b"").decode("latin-1").upper()
        n_bases = sum(map(letters.count, "ACGTUN"))
        if n_bases >= (1 - MAX_UNKNOWN_SHARE) * len(letters):
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
            if HOST_LIKE_TITLE.search(title):
                continue
            fields = dict.fromkeys(("family", "genus", "cluster", "genome_group"), "")
            row = {"id": record, "label": "viral", "kind": REFERENCE, **fields}
            row |= {"organism": organism_of(title) or record, "source_id": f"{record} {title}"}
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


def compile_library(folder: Path) -> ctypes.CDLL:
    library = folder / "known_kmers.so"
    command = ("cc", "-std=c99", "-O3", "-shared", "-fPIC", "-o", str(library), str(SOURCE))
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def pointer_to(array: NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def max_hash(rate: float) -> int:
    """Return the largest hash of a sample with this rate."""
    return int(rate * 2**64) - 1


def is_sampled(
    hashes: NDArray[np.uint64], n_species: NDArray[np.uint8], is_short: BoolArray
) -> BoolArray:
    """Return whether each k-mer is in the index. 0 is no k-mer.

    Args:
        n_species: the number of species with the k-mer.
        is_short: whether it occurs in a short genome.
    """
    rate = np.where(is_short, RATE_OF_SHORT, RATE_OF_LONG)
    rate[n_species > 1] = RATE_OF_SEVERAL
    is_chosen: BoolArray = (hashes > 0) & (n_species > 0)
    chosen = np.flatnonzero(is_chosen)
    kmers = invert_hashes(hashes[chosen])
    is_chosen[chosen] = sampling_order(hashes[chosen], kmers) < rate[chosen]
    is_chosen[chosen] &= count_distinct_residues(kmers) >= MIN_DISTINCT_RESIDUES
    return is_chosen


def invert_hashes(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the k-mer of each hash of known.c. (n,)"""
    kmers = hashes ^ (hashes >> np.uint64(32))
    kmers *= np.uint64(pow(0x94D049BB133111EB, -1, 1 << 64))
    kmers ^= (kmers >> np.uint64(29)) ^ (kmers >> np.uint64(58))
    kmers *= np.uint64(pow(0xBF58476D1CE4E5B9, -1, 1 << 64))
    return kmers


def sampling_order(hashes: NDArray[np.uint64], kmers: NDArray[np.uint64]) -> FloatArray:
    """Order sampled k-mers by numbers from 0 to 1: those below a rate are in the index. (n,)

    K-mers whose middle 4-mer has the lowest rank, one in three, come first, since they overlap by
    six residues at most.
    """
    ranks = [smer_ranks(kmers, offset) for offset in SMER_OFFSETS]
    other_ranks = [rank for offset, rank in enumerate(ranks) if offset != MIDDLE_SMER]
    is_middle = ranks[MIDDLE_SMER] < np.minimum.reduce(other_ranks)
    shares = (hashes >> np.uint64(32)).astype(np.float64) / 2**32
    return np.where(is_middle, shares / 3, 1 / 3 + shares * 2 / 3)


def smer_ranks(kmers: NDArray[np.uint64], offset: int) -> NDArray[np.uint32]:
    """Return the rank of the 4-mer at an offset of each k-mer, as in known.c. (n,)"""
    smers = (kmers >> np.uint64(5 * offset)).astype(np.uint32) & np.uint32(2**20 - 1)
    return (smers * np.uint32(0x9E3779B1) + np.uint32(0x7F4A7C15)) >> np.uint32(16)


def count_distinct_residues(kmers: NDArray[np.uint64]) -> IntArray:
    """Count the distinct residues of each k-mer. (n,)"""
    seen = np.zeros(len(kmers), dtype=np.uint32)
    for shift in range(0, 45, 5):
        seen |= np.uint32(1) << ((kmers >> np.uint64(shift)) & np.uint64(31)).astype(np.uint32)
    n_distinct = np.zeros(len(kmers), dtype=np.int64)
    for residue in range(20):
        n_distinct += (seen >> np.uint32(residue)) & 1
    return n_distinct


def mark_coding(pieces: Windows) -> Digits:
    """Mark bases at which a codon of a kept stretch begins: 1 forward, 2 reverse, 3 both."""
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


def coding_marks(
    viruses: Sequence[LabelledSequence], order: Sequence[int]
) -> Iterator[tuple[int, Digits]]:
    """Yield the viruses in this order, each with its coding stretches as ``mark_coding`` does."""
    for batch in batch_by_bases(order, [len(virus.digits) for virus in viruses]):
        digits = [viruses[number].digits for number in batch]
        lengths = np.array(list(map(len, digits)), dtype=np.int64)
        pieces = Windows.concatenate(np.concatenate(digits), lengths)
        marks = np.split(mark_coding(pieces), np.cumsum(lengths)[:-1])
        yield from zip(batch, marks, strict=True)


def batch_by_bases(order: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    n_bases = 0
    for number in order:
        batch.append(number)
        n_bases += lengths[number]
        if n_bases >= BATCH_BASES:
            yield batch
            batch = []
            n_bases = 0
    if batch:
        yield batch


def are_genomes_short(viruses: Sequence[LabelledSequence]) -> list[bool]:
    """Return whether the genome of each virus is short."""
    n_bases = Counter[str]()
    genomes = [virus.row["genome_group"] or virus.row["id"] for virus in viruses]
    for genome, virus in zip(genomes, viruses, strict=True):
        n_bases[genome] += len(virus.digits)
    return [n_bases[genome] < SHORT_GENOME for genome in genomes]


def species_of(viruses: Sequence[LabelledSequence], library: ctypes.CDLL) -> IntArray:
    """Return the species of each virus, as ``build_known_index.py`` defines it. (n,)"""
    groups = UnionFind()
    names = [f"virus {number}" for number in range(len(viruses))]
    for name, virus in zip(names, viruses, strict=True):
        keys = [f"genome {virus.row['genome_group']}"] * (virus.row["genome_group"] != "")
        organism = virus.row["organism"].lower()
        keys += [f"organism {organism}"] * (organism.title() not in MISSING_NAMES)
        groups.union([name, *keys])
    for one, other in similar_pairs(viruses, library):
        groups.union([names[one], names[other]])
    return np.unique([groups.find(name) for name in names], return_inverse=True)[1]


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
        if 1 < len(members) <= MAX_KMER_GENOMES:
            n_common.update(
                (one, other) for i, one in enumerate(members) for other in members[i + 1 :]
            )
    for (one, other), n in n_common.items():
        if n >= 3 and n >= SAME_SPECIES_SHARE * min(n_kmers[one], n_kmers[other]):
            yield one, other


def sampled_hashes(library: ctypes.CDLL, digits: Digits, rate: float) -> NDArray[np.uint64]:
    hashes = np.empty(2 * len(digits) + 1, dtype=np.uint64)
    n_kmers = np.zeros(1, dtype=np.int64)
    library.list_kmers(
        *(pointer_to(digits), ctypes.c_int64(len(digits)), pointer_to(RESIDUE_BY_CODON)),
        *(ctypes.c_uint64(max_hash(rate)), pointer_to(hashes), pointer_to(n_kmers)),
    )
    return np.unique(hashes[: n_kmers[0]])


def read_viruses(catalogues: Sequence[Path], fasta: Sequence[Path]) -> list[LabelledSequence]:
    """Read the viruses of catalogues and of FASTA files, in the order of the index."""
    sequences = read_catalogues(catalogues)
    labelled = [sequence for sequence in sequences if sequence.row["label"] == "viral"]
    return [*labelled, *read_references(fasta)]
