"""``virnucpro train --regions``: from chromosomes with known prophages to ``regions.json``.

The rarity of regions is chosen by leaving one chromosome out: what is learned from the others finds
its regions, and the mean of the F1 of bases over chromosomes decides. The table of figures leaves
each out of its own choice, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from virnucpro.errors import InputError
from virnucpro.evaluation.region_story import region_lines
from virnucpro.evaluation.regions import Figures, check_truth, measure, read_truth
from virnucpro.files import atomic
from virnucpro.log import announce, counted, printable
from virnucpro.options import TrainOptions
from virnucpro.run.folder import RunDir
from virnucpro.scorer.nets import embedded_scorer, load_scorer
from virnucpro.scoring.chain import region_model_text
from virnucpro.scoring.contrast import Items
from virnucpro.scoring.regions import SHORTEST_RECORD, regions_of_items
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.sequences.inputs import list_sources
from virnucpro.training.region_model import SIZE, STEP, Chromosome, learn_region_model

MODEL, TABLE = "regions.json", "regions_left_out.tsv"
_FEWEST = 3  # chromosomes: one is left out, one more to choose, and one is learned from
RARITIES = (1.0, 3.0, 10.0)


def train_regions(options: TrainOptions, truth_table: Path) -> list[str]:
    """Learn how regions are told, write it with the figures of what was left out, and return these.

    Raises:
        VirnucproError: see ``errors``; or there are too few chromosomes.
    """
    with RunDir(options.output_dir).in_use():
        chromosomes = read_chromosomes(options.data, truth_table)
        learner = _Learner(chromosomes)
        each = {}
        for name in learner.names:
            rarity = learner.choose(name)
            each[name] = learner.figures(name, rarity, without=(name,))
            announce(f"{printable(name)} left out: rarity {rarity:g}, F1 {each[name].f1:.3f}")
        lines = region_lines(each, options.seed)
        with atomic(options.output_dir / TABLE) as temporary:
            temporary.write_text("\n".join([*lines, ""]), encoding="utf-8")
        rarity = learner.choose()
        n_prophages = sum(len(one.truth.prophages) for one in chromosomes)
        training = f"{n_prophages} prophages of {len(chromosomes)} chromosomes"
        announce(f"regions: rarity {rarity:g}, of {training}")
        model = learn_region_model(chromosomes, rarity, training)
        with atomic(options.output_dir / MODEL) as temporary:
            temporary.write_text(region_model_text(model), encoding="utf-8")
    return lines


def read_chromosomes(data: Path, truth_table: Path) -> list[Chromosome]:
    """The sequences that the truth has prophages in, with their pieces scored.

    Raises:
        InputError: one is missing, or there are too few.
    """
    truths = {name: one for name, one in read_truth(truth_table).items() if one.prophages}
    scorer = load_scorer(embedded_scorer())
    chromosomes = []
    for source in list_sources(data):
        for record in read_fasta(source.path, source.name):
            truth = truths.pop(record.id, None)
            if truth is None:
                continue
            check_truth(record.id, truth, len(record.sequence))
            if len(record.sequence) < SHORTEST_RECORD:
                raise InputError(
                    f"{printable(record.id)} has {len(record.sequence):,} bases; regions are "
                    f"learned from {SHORTEST_RECORD:,} and more",
                    hint="leave it out of the truth",
                )
            items = Items.of(record.sequence, scorer, SIZE, STEP)
            chromosomes.append(Chromosome(record.id, record.sequence, items, truth))
    if truths:
        raise InputError(
            f"the sequences have no {', '.join(map(printable, sorted(truths)[:8]))} of the truth",
            hint="name the FASTA files of all sequences of the truth with --data",
        )
    if len(chromosomes) < _FEWEST:
        raise InputError(
            f"{counted(len(chromosomes), 'chromosome')} with prophages; {_FEWEST} are needed, "
            "as each is left out once",
            hint="add more to the truth",
        )
    return chromosomes


class _Learner:
    """Figures of chromosomes by what is learned from others, each computed once."""

    def __init__(self, chromosomes: Sequence[Chromosome]) -> None:
        self.by_name = {one.name: one for one in chromosomes}
        self._figures: dict[tuple[str, float, tuple[str, ...]], Figures] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    def choose(self, *without: str) -> float:
        """The rarity with the best mean F1 over all but these, each left out; first of equals."""
        names = [name for name in self.names if name not in without]

        def mean_f1(rarity: float) -> float:
            each = [self.figures(name, rarity, (*without, name)) for name in names]
            return float(np.mean([one.f1 for one in each]))

        return max(RARITIES, key=mean_f1)

    def figures(self, name: str, rarity: float, without: tuple[str, ...]) -> Figures:
        """Figures of a chromosome by what is learned from all but these."""
        key = (name, rarity, tuple(sorted(without)))
        if key not in self._figures:
            others = [one for other, one in self.by_name.items() if other not in without]
            model = learn_region_model(others, rarity, "")
            one = self.by_name[name]
            regions, _ = regions_of_items(one.sequence, one.items, model, STANDARD, is_virus=False)
            intervals = [(region.start, region.end) for region in regions]
            self._figures[key] = measure(intervals, one.truth, len(one.sequence))
        return self._figures[key]
