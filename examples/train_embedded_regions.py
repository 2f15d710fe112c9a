"""Make the region model that comes with VirNucPro, virnucpro/embedded/regions.json, or measure it.

    python examples/train_embedded_regions.py FOLDER [regions.json]

FOLDER holds prophages.tsv (seq_id, start, end, kind: prophage counts, remnant and unclear are left
out of every count), genomes.tsv (seq_id, file, sha256_of_upper_case_sequence) and the FASTA files;
coordinates are 0-based and half-open.

One line is written for each chromosome, which is left out when its model is learned: the bins, the
rates, and the choice of weight and rarity, which is made among the others in the same way. In the
last line one choice is made for all, by the best F1, which flatters it. A region is false if less
than half of it is prophage; a prophage is found if half of it or more is in regions. With a file,
the model of all chromosomes, with that choice, is written to it.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

import numpy as np

from virnucpro.scorer.nets import embedded_scorer, load_scorer
from virnucpro.scorer.score import score_windows
from virnucpro.scoring.chain import RegionModel, region_model_text
from virnucpro.scoring.regions import regions_of_pieces
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.training.region_model import SIZE, STEP, Chromosome, learn_region_model

WEIGHTS = (0.9, 1.0, 1.1, 1.25)
RARITIES = (1.0, 3.0, 10.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """What was found in one chromosome, or in several."""

    bases_right: int = 0
    bases_false: int = 0
    bases_missed: int = 0
    found: int = 0
    prophages: int = 0
    false_regions: int = 0
    regions: int = 0
    n_bases: int = 0
    ends: tuple[int, ...] = ()  # bases between the ends of found prophages and of their regions

    @property
    def f1(self) -> float:
        wrong = self.bases_false + self.bases_missed
        return 2 * self.bases_right / max(1, 2 * self.bases_right + wrong)

    def row(self) -> str:
        right = self.bases_right
        ends = np.percentile(self.ends, (50, 90)) if self.ends else (np.nan, np.nan)
        values = (
            f"{right / max(1, right + self.bases_false):.2f}",
            f"{right / max(1, right + self.bases_missed):.2f}",
            f"{self.f1:.3f}",
            f"{self.found}/{self.prophages}",
            f"{self.false_regions}/{self.regions}",
            f"{1e6 * self.false_regions / self.n_bases:.2f}",
            f"{ends[0]:.0f}",
            f"{ends[1]:.0f}",
        )
        return "\t".join(values)


COLUMNS = ("precision", "recall", "f1", "found", "false", "false_per_mbp", "end_p50", "end_p90")


def main(folder: Path, target: Path | None) -> None:
    chromosomes = read_chromosomes(folder)
    print("left_out", "weight", "rarity", *COLUMNS, sep="\t")
    each = []
    for left_out in chromosomes:
        others = [one for one in chromosomes if one is not left_out]
        weight, rarity = choose(others)
        each.append(measure(left_out, learn_region_model(others, weight, rarity, "")))
        print(left_out.name, weight, rarity, each[-1].row(), sep="\t")
    print("all", "", "", total(each).row(), sep="\t")
    weight, rarity = choose(chromosomes)
    print("one choice", weight, rarity, leave_one_out(chromosomes, weight, rarity).row(), sep="\t")
    if target is not None:
        n_prophages = sum(len(one.prophages) for one in chromosomes)
        text = f"{n_prophages} prophages of {len(chromosomes)} chromosomes"
        model = learn_region_model(chromosomes, weight, rarity, text)
        target.write_text(region_model_text(model), encoding="utf-8")


def read_chromosomes(folder: Path) -> list[Chromosome]:
    scorer = load_scorer(embedded_scorer())
    with (folder / "prophages.tsv").open(encoding="utf-8", newline="") as table:
        known = list(csv.DictReader(table, delimiter="\t"))
    with (folder / "genomes.tsv").open(encoding="utf-8", newline="") as table:
        genomes = list(csv.DictReader(table, delimiter="\t"))
    chromosomes = []
    for genome in genomes:
        path, name = folder / genome["file"], genome["seq_id"]
        if not path.is_file():  # one that is made of others
            continue
        sequence = next(read_fasta(path)).sequence.upper()
        digest = hashlib.sha256(sequence.encode()).hexdigest()
        assert digest == genome["sha256_of_upper_case_sequence"], f"{path} is another sequence"
        of_kind = {
            kind: tuple(
                (int(row["start"]), int(row["end"]))
                for row in known
                if row["seq_id"] == name and row["kind"] in kinds
            )
            for kind, kinds in (("prophage", ("prophage",)), ("unclear", ("remnant", "unclear")))
        }
        pieces = score_windows(sequence, scorer, SIZE, STEP)
        chromosomes.append(
            Chromosome(name, sequence, pieces, of_kind["prophage"], of_kind["unclear"])
        )
    return chromosomes


def choose(chromosomes: Sequence[Chromosome]) -> tuple[float, float]:
    """Weight and rarity with the best F1 over all, each left out in its turn; first of equals."""
    choices = product(WEIGHTS, RARITIES)
    return max(choices, key=lambda choice: leave_one_out(chromosomes, *choice).f1)


def leave_one_out(chromosomes: Sequence[Chromosome], weight: float, rarity: float) -> Figures:
    """Figures of each by what is learned from the others, with one choice for all."""
    figures = []
    for left_out in chromosomes:
        others = [one for one in chromosomes if one is not left_out]
        figures.append(measure(left_out, learn_region_model(others, weight, rarity, "")))
    return total(figures)


def measure(chromosome: Chromosome, model: RegionModel) -> Figures:
    pieces = chromosome.pieces
    regions, _ = regions_of_pieces(
        chromosome.sequence, pieces.start, pieces.log_odds, model, STANDARD, is_virus=False
    )
    intervals = [(region.start, region.end) for region in regions]
    is_virus = chromosome.bases(chromosome.prophages)
    counts = is_virus | ~chromosome.bases(chromosome.unclear)
    is_called = chromosome.bases(intervals)
    ends: list[int] = []
    found = 0
    for start, end in chromosome.prophages:
        if is_called[start:end].mean() >= 0.5:
            found += 1
            touching = [one for one in intervals if one[0] < end and one[1] > start]
            ends += [abs(touching[0][0] - start), abs(touching[-1][1] - end)]
    counted = [(a, b) for a, b in intervals if counts[a:b].any()]
    n_false = sum(is_virus[a:b][counts[a:b]].mean() < 0.5 for a, b in counted)
    return Figures(
        int(np.count_nonzero(is_called & is_virus)),
        int(np.count_nonzero(is_called & ~is_virus & counts)),
        int(np.count_nonzero(~is_called & is_virus)),
        found,
        len(chromosome.prophages),
        int(n_false),
        len(counted),
        len(chromosome.sequence),
        tuple(ends),
    )


def total(each: Sequence[Figures]) -> Figures:
    return Figures(
        bases_right=sum(one.bases_right for one in each),
        bases_false=sum(one.bases_false for one in each),
        bases_missed=sum(one.bases_missed for one in each),
        found=sum(one.found for one in each),
        prophages=sum(one.prophages for one in each),
        false_regions=sum(one.false_regions for one in each),
        regions=sum(one.regions for one in each),
        n_bases=sum(one.n_bases for one in each),
        ends=tuple(chain.from_iterable(one.ends for one in each)),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
