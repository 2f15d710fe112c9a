"""Features of a piece and common k-mers in plain Python: the reference for the C library.

It is slow and simple, and reads letter by letter. It shares only the codon tables with the package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from math import log, log1p, prod, sqrt

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from scorer_kmers import kmer_class_table

from virnucpro.core.types import reverse_complement
from virnucpro.sequences.genetic_code import GENETIC_CODES, STANDARD, GeneticCode
from virnucpro.viral.features import AMINO_ACIDS, KmerClass, KmerClassTable

PAIRS = str.maketrans("ACGT", "TGCA")
# of a piece whose codons are counted; codons of those but one
MOST_STRETCHES = 6
LONG = 20
LETTERS = STANDARD.meanings
TETRA = ["".join(kmer) for kmer in product("ACGT", repeat=4)]
# how much a codon suggests a gene, in the order AAA, AAC, ...
CODING = dict(
    zip(
        STANDARD.codons,
        (
            *(6, 4, 6, 3, 0, 1, 2, 0, -5, -2, -5, -4, -2, 2, 4, 4),
            *(0, -3, 1, -4, -5, -2, 0, -2, -2, 0, -1, 1, -6, 1, 1, 1),
            *(8, 4, 4, 7, -1, 1, 2, 1, 3, 1, 1, 3, -2, 1, 1, 2),
            *(0, 4, 0, 4, -5, -2, -1, -3, 0, -9, 0, -14, -3, 3, -1, 1),
        ),
        strict=True,
    )
)
Stretch = tuple[int, int, int]  # codons, strand, start on the strand


def letters_of(sequence: str) -> str:
    """Return A, C, G and T, and N for any other letter."""
    upper = sequence.upper().replace("U", "T")
    return "".join(letter if letter in "ACGT" else "N" for letter in upper)


def strands_of(sequence: str) -> tuple[str, str]:
    return sequence, sequence.translate(PAIRS)[::-1]


def frames_of(sequence: str, code: GeneticCode = STANDARD) -> list[list[Stretch]]:
    """Return all stretches in the six frames, base by base, including those without a codon."""
    frames = []
    for strand, bases in enumerate(strands_of(sequence)):
        for frame in range(3):
            found = []
            start = frame
            for place in range(frame, len(bases) - 2, 3):
                if bases[place : place + 3] in code.stops:
                    found.append(((place - start) // 3, strand, start))
                    start = place + 3
            found.append((max(0, (len(bases) - start) // 3), strand, start))
            frames.append(found)
    return frames


def first_base(stretch: Stretch, sequence: str) -> int:
    n_codons, strand, start = stretch
    return len(sequence) - start - 3 * n_codons if strand else start


def kept_of(
    sequence: str, code: GeneticCode = STANDARD, shortest: int = 5
) -> tuple[list[Stretch], int]:
    """Return the stretches that are kept, and the number of bases that they cover."""
    return kept_in_order(in_order(sequence, code, shortest), sequence)


def kept_in_order(found: Sequence[Stretch], sequence: str) -> tuple[list[Stretch], int]:
    """Keep each stretch that earlier ones hardly cover."""
    covered: set[int] = set()
    kept = []
    for stretch in found:
        first = first_base(stretch, sequence)
        places = range(first, first + 3 * stretch[0])
        if len(covered.intersection(places)) <= 0.3 * 3 * stretch[0]:
            covered.update(places)
            kept.append(stretch)
    return sorted(kept, key=lambda one: -one[0]), len(covered)


def in_order(sequence: str, code: GeneticCode, shortest: int) -> list[Stretch]:
    """Sort by length, but the most gene-like of those at most one codon shorter come first.

    Among equally long ones, those on the strand that comes first in lexical order come first.
    """
    frames = frames_of(sequence, code)
    forward, reverse = (strand.replace("N", "Z") for strand in strands_of(sequence))
    if reverse < forward:
        frames = frames[3:] + frames[:3]
    found = [one for frame in frames for one in frame if one[0] >= shortest]
    found.sort(key=lambda one: -one[0])
    longest = [one for one in found if one[0] >= found[0][0] - 1]
    if not longest:
        return []
    best = max(longest, key=lambda one: coding_sum(one, sequence))
    found.remove(best)
    return [best, *found]


def coding_sum(stretch: Stretch, sequence: str) -> int:
    n_codons, strand, start = stretch
    bases = strands_of(sequence)[strand]
    places = range(start, start + 3 * n_codons, 3)
    return sum(CODING.get(bases[place : place + 3], 0) for place in places)


def codons_of(stretch: Stretch, sequence: str, code: GeneticCode) -> list[str]:
    n_codons, strand, start = stretch
    bases = strands_of(sequence)[strand]
    synonyms = code.standard_synonyms
    codons = (bases[place : place + 3] for place in range(start, start + 3 * n_codons, 3))
    return [synonyms.get(codon, codon) for codon in codons]


def roots(counts: Counter[str], names: Sequence[str]) -> list[float]:
    total = max(1, sum(counts[name] for name in names))
    return [sqrt(counts[name] / total) for name in names]


def log_ratios(counts: Counter[str], gc: float) -> list[float]:
    """Return log-ratios of codons over what single bases predict."""
    share = min(max(gc, np.float32(0.05)), np.float32(0.95))
    chance = {base: share / 2 if base in "GC" else (1 - share) / 2 for base in "ACGT"}
    total = sum(counts[codon] for codon in STANDARD.codons)
    return [
        log((counts[codon] + 0.5) / (total * prod(chance[base] for base in codon) + 0.5))
        for codon in STANDARD.codons
    ]


def palindromes_of(sequence: str) -> list[float]:
    n = len(sequence) - sequence.count("N")
    strong = (sequence.count("G") + sequence.count("C")) / 2 / max(1, n)
    weak = (sequence.count("A") + sequence.count("T")) / 2 / max(1, n)
    chance = {"A": weak**2, "T": weak**2, "C": strong**2, "G": strong**2}
    counts = {}
    for size in (2, 4, 6):
        kmers = [sequence[i : i + size] for i in range(len(sequence) - size + 1)]
        counts[size] = Counter(
            kmer for kmer in kmers if "N" not in kmer and kmer == strands_of(kmer)[1]
        )
    values = []
    for one, other in product("ACGT", repeat=2):
        kmer = one + other + strands_of(one + other)[1]
        expected = max(0, chance[one] * chance[other] * (n - 3))
        values.append(log((counts[4][kmer] + 0.5) / (expected + 0.5)))
    for size in (4, 6, 2):
        expected = max(0, sum(chance.values()) ** (size // 2) * (n - size + 1))
        values.append(log((counts[size].total() + 1) / (expected + 1)))
    return values


def switches_of(stretches: Sequence[Stretch], sequence: str) -> tuple[int, int]:
    """Return how often neighbours change strands, and how many are on the more frequent strand."""
    ordered = sorted(stretches, key=lambda one: first_base(one, sequence))
    n_reverse = sum(strand for _, strand, _ in ordered)
    n_switches = sum(left[1] != right[1] for left, right in pairwise(ordered))
    return n_switches, max(n_reverse, len(ordered) - n_reverse)


def figures_of(sequence: str, code: GeneticCode) -> list[float]:
    """Return the 36 plain figures."""
    n_bases = max(1, len(sequence))
    frames = frames_of(sequence, code)
    kept, n_covered = kept_of(sequence, code)
    a, c, g, t = (sequence.count(base) for base in "ACGT")
    known = max(1, a + c + g + t)
    lengths = [n_codons for n_codons, _, _ in kept[:3]]
    lengths += [0] * (3 - len(lengths))
    long = [stretch for stretch in kept if stretch[0] >= 30]
    n_switches, n_commoner = switches_of(long, sequence)
    n_stops = sorted(len(frame) - 1 for frame in frames)
    longest = sorted((max(frame)[0] for frame in frames), reverse=True)
    shares = {base: sequence.count(base) / known for base in "ACGT"}
    chances = [
        sum(prod(shares[base] for base in strands_of(stop)[strand]) for stop in code.stops)
        for strand in range(2)
    ]
    chance = sum(chances) / 2
    expected = log(max(2, 2 * n_bases * chance)) / max(chance, 1e-4)
    codons = codons_of(kept[0], sequence, code) if kept else []
    at = [Counter(codon[i] for codon in codons) for i in range(3)]
    n_at = [max(1, sum(of[base] for base in "ACGT")) for of in at]
    kmers = [sequence[i : i + 4] for i in range(len(sequence) - 3)]
    tetra = Counter(min(kmer, strands_of(kmer)[1]) for kmer in kmers if "N" not in kmer)
    n_kmers = max(1, tetra.total())
    return [
        *((c + g) / known, abs(c - g) / max(1, c + g), abs(a - t) / max(1, a + t)),
        *(*map(log1p, lengths), 3 * lengths[0] / n_bases),
        *(1000 * len(long) / n_bases, n_covered / n_bases),
        *(n_switches / max(1, len(long) - 1), n_commoner / max(1, len(long))),
        *(*(3 * n / n_bases for n in n_stops), *map(log1p, longest)),
        *(2 * chance, log1p(longest[0]) - log1p(min(n_bases / 3, expected))),
        sum(n_stops) / (2 * n_bases) - chance,
        *((of["C"] + of["G"]) / n for of, n in zip(at, n_at, strict=True)),
        *((of["A"] + of["G"]) / n for of, n in zip(at, n_at, strict=True)),
        *(of["A"] / n for of, n in zip(at, n_at, strict=True)),
        log(n_kmers) - sum(n * log(n) for n in tetra.values()) / n_kmers,
    ]


def features_of(
    text: str, code: GeneticCode, owner_of: Callable[[str], int]
) -> NDArray[np.float64]:
    """Return the 1,229 features of a piece, by the owner of each residue k-mer (0: none)."""
    sequence = letters_of(text)
    kept, _ = kept_of(sequence, code)
    read = kept[:1] + [stretch for stretch in kept[1:MOST_STRETCHES] if stretch[0] >= LONG]
    stretch_codons = [codons_of(stretch, sequence, code) for stretch in read]
    longest = Counter(stretch_codons[0] if stretch_codons else [])
    long = Counter(codon for codons in stretch_codons for codon in codons)
    met = [left + right for codons in stretch_codons for left, right in pairwise(codons)]
    met = [six for six in met if "N" not in six]
    proteins = ["".join(LETTERS.get(codon, "*") for codon in codons) for codons in stretch_codons]
    residues = Counter(left + right for left, right in pairwise(proteins[0] if proteins else ""))
    kmers = [
        protein[i : i + KmerClassTable.K] for protein in proteins for i in range(len(protein) - 8)
    ]
    owners = Counter(owner_of(kmer) for kmer in kmers if "*" not in kmer)
    n_kmers = max(1, owners.total())
    figures = figures_of(sequence, code)
    gc = np.float32(figures[0])
    values = [
        *roots(longest, STANDARD.codons),
        *roots(long, STANDARD.codons),
        *roots(Counter(six[1:5] for six in met), TETRA),
        *roots(Counter(six[2:] for six in met), TETRA),
        *roots(residues, ["".join(pair) for pair in product(AMINO_ACIDS, repeat=2)]),
        *palindromes_of(sequence),
        *figures,
        *(
            sqrt(
                owners[owner] * (KmerClassTable.SAMPLED_ONE_IN if owner in (2, 4) else 1) / n_kmers
            )
            for owner in range(1, len(KmerClass) + 1)
        ),
        *log_ratios(longest, gc),
        *log_ratios(long, gc),
    ]
    # a root is that of a share in float32, rounded there twice
    return np.array(values, dtype=np.float64)


def layout_of(text: str, code: GeneticCode) -> list[float]:
    """Return the 12 figures about the arrangement of gene-like stretches."""
    sequence = letters_of(text)
    kept, _ = kept_of(sequence, code, shortest=30)
    lengths = [n_codons for n_codons, _, _ in kept]
    ordered = sorted(kept, key=lambda one: first_base(one, sequence))
    kilobases = max(1, len(sequence)) / 1000
    n = len(kept)
    total = sum(lengths)
    genes = [stretch for stretch in kept if stretch[0] >= 60]
    n_switches, n_commoner = switches_of(genes, sequence)
    gaps = [
        min(2000, max(-200, first_base(right, sequence) - first_base(left, sequence) - 3 * left[0]))
        for left, right in pairwise(ordered)
    ]
    return [
        n / kilobases,
        3 * total / 1000 / kilobases,
        log(lengths[(n - 1) // 2] if n else 1),
        log(total / n if n else 1),
        log(lengths[0] if n else 1),
        log(sqrt(sum(length**2 for length in lengths) / total) if n else 1),
        len(genes) / kilobases,
        sum(3 * n_codons for n_codons, _, _ in genes) / 1000 / kilobases,
        n_switches / max(1, len(genes) - 1),
        n_commoner / len(genes) if len(genes) > 1 else 0,
        sum(abs(gap) < 60 for gap in gaps) / max(1, n - 1),
        sum(gaps) / 1000 / max(1, n - 1),
    ]


def common_words(left: str, right: str, size: int, longest: int) -> list[tuple[int, int, int]]:
    """Return the longest common texts of known letters that begin with a rare k-mer of the left."""
    found = []
    for j in range(len(right) - size + 1):
        kmer = right[j : j + size]
        places = [i for i in range(len(left) - size + 1) if left[i : i + size] == kmer]
        if "N" in kmer or len(places) > 2:
            continue
        for i in places:
            if i and j and left[i - 1] == right[j - 1] != "N":
                continue
            n = size
            while (n < longest and max(i + n - len(left), j + n - len(right)) < 0) and left[
                i + n
            ] == right[j + n] != "N":
                n += 1
            found.append((i, j, n))
    return found


def is_plain(repeat: str) -> bool:
    """Return True if a repeat is unknown, has one base, or consists of a short unit."""
    n = len(repeat)
    if repeat.count("N") > 0.2 * n or max(map(repeat.count, "ACGT")) > 0.75 * n:
        return True
    moved = (zip(repeat, repeat[unit:], strict=False) for unit in range(1, min(6, n - 1) + 1))
    shares = [[left == right for left, right in pairs] for pairs in moved]
    return any(sum(same) / len(same) > 0.8 for same in shares)


def terminal_repeats(text: str) -> tuple[int, int]:
    """Return the bases of the direct and of the inverted terminal repeat (0: none)."""
    sequence, other = strands_of(letters_of(text))
    inverted = 0
    while inverted < len(sequence) // 2 and sequence[inverted] == other[inverted]:
        inverted += 1
    is_repeat = inverted >= 21 and not is_plain(sequence[:inverted])
    return max(map(direct_repeat, (sequence, other))), inverted if is_repeat else 0


def direct_repeat(sequence: str) -> int:
    """Return the bases of the direct repeat whose first 21 agree (0: none)."""
    half = len(sequence) // 2
    seed = sequence[:21]
    if half < 21 or is_plain(seed) or sequence.count(seed) > 8:
        return 0
    for n in range(half, 20, -1):
        first = sequence[:n]
        last = sequence[-n:]
        n_different = sum(a != b for a, b in zip(first, last, strict=True))
        if last.startswith(seed) and n_different <= n // 50 and not is_plain(first):
            return n
    return 0


def longest_open(text: str, stops: Sequence[str]) -> int:
    """Return the codons of the longest stretch in any frame without one of these stops."""
    longest = 0
    for bases in strands_of(letters_of(text)):
        for frame in range(3):
            codons = [bases[i : i + 3] for i in range(frame, len(bases) - 2, 3)]
            ends = [-1, *(i for i, codon in enumerate(codons) if codon in stops), len(codons)]
            longest = max(longest, *(end - start - 1 for start, end in pairwise(ends)))
    return longest


Layers = Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]  # weights and biases


def log_odds_in_whole_numbers(
    features: NDArray[np.float32],
    mean: NDArray[np.float32],
    deviation: NDArray[np.float32],
    nets: Sequence[tuple[int, Layers, int]],
    prokaryotic: tuple[int, Layers, int] | None = None,
) -> NDArray[np.float64]:
    """Return the mean log-odds of networks from their integer weights. (n,)

    The network for prokaryotes moves the result towards its own, by half their probability in the
    other networks.
    """
    scale = np.float32(127 / 6) / deviation
    centre = (np.rint(mean.astype(np.float64) * scale) / scale).astype(np.float32)
    levels = np.rint(((features - centre) * scale).clip(-127, 127)).astype(np.int64) + 128
    moved = (centre.astype(np.float64) - mean) / deviation
    each = []
    likely = []
    for column, (first, second, last), n_viral in [*nets, *filter(None, [prokaryotic])]:
        here = slice(column, column + first[0].shape[1])
        first_layer = first[0], first[1] + first[0] @ moved[here]
        hidden = _gelus(*_sums(levels[:, here], *first_layer, 6 / 127, 128))
        hidden = _gelus(*_sums(hidden, *second, 1 / 20, 4))
        sums, worth = _sums(hidden, *last, 1 / 20, 4)
        logits = sums * worth.astype(np.float32).astype(np.float64)
        viral, cellular = (
            np.logaddexp.reduce(some, axis=1) for some in np.split(logits, [n_viral], 1)
        )
        each.append(viral - cellular)
        if logits.shape[1] > 2:
            chances = np.exp(logits - np.logaddexp.reduce(logits, axis=1)[:, None])
            likely.append(chances[:, 0] + chances[:, n_viral])
    if prokaryotic is None:
        return np.asarray(np.mean(each, axis=0))
    usual = np.mean(each[:-1], axis=0)
    return np.asarray(usual + np.mean(likely[: len(nets)], axis=0) * (each[-1] - usual) / 2)


def _sums(
    levels: NDArray[np.int64],
    weight: NDArray[np.float64],
    bias: NDArray[np.float64],
    step: float,
    zero: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return integer sums of a layer, and the value of one unit. (n, n_outputs), (n_outputs,)"""
    smallest = np.maximum(abs(bias) / step / 2**22, np.finfo(np.float32).tiny)
    unit_scale = np.maximum(abs(weight).max(axis=1) / 63, smallest)
    numbers = np.rint(weight / unit_scale[:, None]).astype(np.int64)
    start = np.rint(bias / (unit_scale * step)).astype(np.int64)
    return (levels - zero) @ numbers.T + start, unit_scale * step


def _gelus(sums: NDArray[np.int64], worth: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return GELU levels, twenty per 1, of a number rounded to a 64th. Halves are rounded up."""
    inner = sums.astype(np.float32) * (worth.astype(np.float32) * np.float32(64))
    x = np.rint(inner.clip(-256, 803)).astype(np.float64) / 64
    tangent = np.tanh(0.7978845608028654 * (x + 0.044715 * x**3))
    return np.floor(20 * x * (1 + tangent) / 2 + 4.500001).astype(np.int64)


CODES = st.sampled_from(GENETIC_CODES).map(GeneticCode.from_number)
ANY_CASE = st.text("ACGTacgtUuNnRYKMSWBDHV-", max_size=300)
# many codons of few kinds: long stretches, k-mers and repeats
CODON_TEXT = st.lists(st.sampled_from(["ATG", "GCC", "CAG", "TTA", "CTG"]), max_size=300).map(
    "".join
)


def random_text(n_bases: int, seed: int, odd: float) -> str:
    rng = np.random.default_rng(seed)
    letters = rng.choice(list("ACGT"), n_bases)
    is_odd = rng.random(n_bases) < odd
    letters[is_odd] = rng.choice(list("NRYacgtu"), int(is_odd.sum()))
    return "".join(letters)


RANDOM = st.builds(
    random_text, st.integers(0, 3000), st.integers(0, 2**32), st.sampled_from([0.0, 0.01, 0.3])
)
PIECE = st.one_of(ANY_CASE, CODON_TEXT, RANDOM)


def number_of(kmer: str) -> int:
    number = 0
    for residue in kmer:
        number = 20 * number + AMINO_ACIDS.index(residue)
    return number


def owner_of(kmer: str) -> int:
    """Return an owner for most k-mers, by their letters."""
    return sum(kmer.encode()) % 7


def kmers_in(text: str) -> set[str]:
    """Return all k-mers that any frame of a text may spell in any code."""
    found = set()
    for code in map(GeneticCode.from_number, GENETIC_CODES):
        letters = code.meanings
        bases = letters_of(text)
        for strand in (bases, reverse_complement(bases)):
            for frame in range(3):
                codons = (strand[i : i + 3] for i in range(frame, len(strand) - 2, 3))
                protein = "".join(letters.get(codon, "*") for codon in codons)
                found.update(
                    protein[i : i + KmerClassTable.K]
                    for i in range(len(protein) - KmerClassTable.K + 1)
                )
    return {kmer for kmer in found if "*" not in kmer}


def table_of(texts: list[str]) -> KmerClassTable:
    kmers = sorted({kmer for text in texts for kmer in kmers_in(text) if owner_of(kmer)})
    return kmer_class_table(
        np.array([*map(number_of, kmers)], dtype=np.int64),
        np.array([*map(owner_of, kmers)], dtype=np.uint8),
    )
