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
from scorer_manifest import NAMELESS, Groups, Row

from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.sequences.open_codes import Digits, encode
from virnucpro.viral.features import RESIDUE_BY_CODON
from virnucpro.viral.windows import Windows, find_stretches

SOURCE = Path(__file__).with_name("known_kmers.c")
SHORTEST_STRETCH = 25  # codons
STRETCH_PIECE = 10_000  # bases searched for stretches at once
BASES_AT_ONCE = 3_000_000
SHORT_GENOME = 50_000  # bases
# share of sampled k-mers in the index
RATE_OF_SEVERAL = 1
RATE_OF_SHORT = 2 / 5
RATE_OF_LONG = 1 / 6
MIN_DISTINCT_RESIDUES = 6  # different ones in a k-mer
WORDS = range(6)  # k-mers of four residues in a k-mer, from its end
MIDDLE_WORD = 2
REFERENCE = "reference"  # kind of the viruses of FASTA files
SAME_SPECIES = 0.5  # share of the k-mers of the shorter genome
SPECIES_RATE = 1 / 20  # of sampled k-mers that are compared to join species
MAX_KMER_GENOMES = 300  # genomes with a k-mer that is compared
MAX_UNKNOWN_SHARE = 0.05  # letters other than bases in a sequence
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
            if HOST_LIKE.search(title):
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


def address_of(array: NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def limit_of(rate: float) -> int:
    """The highest hash of a sample."""
    return int(rate * 2**64) - 1


def is_sampled(
    hashes: NDArray[np.uint64], n_species: NDArray[np.uint8], is_short: BoolArray
) -> BoolArray:
    """Whether each k-mer is in the index; 0 is none.

    Args:
        n_species: that have the k-mer.
        is_short: whether a short genome has it.
    """
    rate = np.where(is_short, RATE_OF_SHORT, RATE_OF_LONG)
    rate[n_species > 1] = RATE_OF_SEVERAL
    is_chosen: BoolArray = (hashes > 0) & (n_species > 0)
    chosen = np.flatnonzero(is_chosen)
    kmers = invert_hashes(hashes[chosen])
    is_chosen[chosen] = sampling_order(hashes[chosen], kmers) < rate[chosen]
    is_chosen[chosen] &= different_residues(kmers) >= MIN_DISTINCT_RESIDUES
    return is_chosen


def invert_hashes(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The k-mer of each hash of known.c. (n,)"""
    kmers = hashes ^ (hashes >> np.uint64(32))
    kmers *= np.uint64(pow(0x94D049BB133111EB, -1, 1 << 64))
    kmers ^= (kmers >> np.uint64(29)) ^ (kmers >> np.uint64(58))
    kmers *= np.uint64(pow(0xBF58476D1CE4E5B9, -1, 1 << 64))
    return kmers


def sampling_order(hashes: NDArray[np.uint64], kmers: NDArray[np.uint64]) -> FloatArray:
    """Numbers from 0 to 1 of sampled k-mers: those below a rate are in the index. (n,)

    The k-mers whose middle k-mer has the lowest rank, one in three, come first, since they overlap
    by six residues at most.
    """
    ranks = [word_ranks(kmers, kmer) for kmer in WORDS]
    others = [rank for kmer, rank in enumerate(ranks) if kmer != MIDDLE_WORD]
    is_middle = ranks[MIDDLE_WORD] < np.minimum.reduce(others)
    shares = (hashes >> np.uint64(32)).astype(np.float64) / 2**32
    return np.where(is_middle, shares / 3, 1 / 3 + shares * 2 / 3)


def word_ranks(kmers: NDArray[np.uint64], kmer: int) -> NDArray[np.uint32]:
    """The ranks by which known.c compares the k-mers of each k-mer. (n,)"""
    kmers = (kmers >> np.uint64(5 * kmer)).astype(np.uint32) & np.uint32(2**20 - 1)
    return (kmers * np.uint32(0x9E3779B1) + np.uint32(0x7F4A7C15)) >> np.uint32(16)


def different_residues(kmers: NDArray[np.uint64]) -> IntArray:
    """The number of different residues in each k-mer. (n,)"""
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


def coding_marks(
    viruses: Sequence[LabelledSequence], order: Sequence[int]
) -> Iterator[tuple[int, Digits]]:
    """Yield the viruses in this order, each with its coding stretches as ``mark_coding`` does."""
    for some in batches(order, [len(virus.digits) for virus in viruses]):
        digits = [viruses[number].digits for number in some]
        lengths = np.array(list(map(len, digits)), dtype=np.int64)
        pieces = Windows.concatenate(np.concatenate(digits), lengths)
        marks = np.split(mark_coding(pieces), np.cumsum(lengths)[:-1])
        yield from zip(some, marks, strict=True)


def batches(order: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    some: list[int] = []
    n_bases = 0
    for number in order:
        some.append(number)
        n_bases += lengths[number]
        if n_bases >= BASES_AT_ONCE:
            yield some
            some = []
            n_bases = 0
    if some:
        yield some


def are_genomes_short(viruses: Sequence[LabelledSequence]) -> list[bool]:
    """Whether the genome of each virus is short."""
    n_bases = Counter[str]()
    genomes = [virus.row["genome_group"] or virus.row["id"] for virus in viruses]
    for genome, virus in zip(genomes, viruses, strict=True):
        n_bases[genome] += len(virus.digits)
    return [n_bases[genome] < SHORT_GENOME for genome in genomes]


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
        if 1 < len(members) <= MAX_KMER_GENOMES:
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
        *(address_of(digits), ctypes.c_int64(len(digits)), address_of(RESIDUE_BY_CODON)),
        *(ctypes.c_uint64(limit_of(rate)), address_of(hashes), address_of(n_kmers)),
    )
    return np.unique(hashes[: n_kmers[0]])


def read_viruses(catalogues: Sequence[Path], fasta: Sequence[Path]) -> list[LabelledSequence]:
    """The viruses of catalogues and of FASTA files, in the order of the index."""
    sequences = read_catalogues(catalogues)
    labelled = [one for one in sequences if one.row["label"] == "viral"]
    return [*labelled, *read_references(fasta)]
