"""Join the head that comes with VirNucPro, virnucpro/embedded/head.safetensors, with its scorer.

    virnucpro evaluate --data manifest.tsv --split examples/embedded_split.tsv --part validation \
        --allow-training-data --lengths 150,300,500,1000,3000,10000 -o validation/ --head HEAD
    python examples/join_embedded_head.py SCORER_MANIFEST SCORER_folds/ HEAD validation/ [test/]

The scorer of the package was trained on all groups, the head's validation groups too, so its
log-odds are too good there. The nets of its folds were not: ``train_embedded_scorer.py train``
leaves a scorer for each fold, and a fragment is scored by that of its group's fold. The first
evaluation is of the validation groups, to which the weights are fitted; the gain on them, by folds
again, and on the groups of further evaluations is written as a table. An evaluation may be made by
any join: the head's own scores of frames are what is read of it.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from virnucpro.labelled.records import read_data_manifest
from virnucpro.numeric import Values
from virnucpro.outputs.read import read_frame_scores
from virnucpro.outputs.sinks import FrameTable
from virnucpro.run.folder import RunDir
from virnucpro.scorer.nets import Scorer, embedded_scorer, load_scorer
from virnucpro.scorer.score import score_sequences
from virnucpro.scoring.calls import chunk_log_odds
from virnucpro.scoring.head import HeadFacts, load_head, save_head
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.translate import chunk_record, translate_six_frames
from virnucpro.training.gain import measure_gain, write_gains
from virnucpro.training.joining import ScoredFragments, fit_join
from virnucpro.training.scorer_folds import N_FOLDS, group_folds

SEED = 0


@dataclass(frozen=True, slots=True, eq=False)
class Unseen:
    """The scorers of the folds, and the fold of each record that one of them was fitted to."""

    scorers: list[Scorer]
    fold_of_record: dict[str, int]

    @classmethod
    def of(cls, manifest: Path, folder: Path) -> Unseen:
        files = read_data_manifest(manifest).files.values()
        records = [row for file in files for row in file.rows.values()]
        fold_of_group = group_folds(records)
        scorers = [load_scorer(folder / f"fold{fold}.safetensors") for fold in range(N_FOLDS)]
        return cls(scorers, {record.id: fold_of_group[record.group] for record in records})

    def log_odds(self, records: list[str], sequences: list[str]) -> Values:
        """The log-odds of sequences of these records by nets that have not seen their groups."""
        folds = np.array([self.fold_of_record.get(record, 0) for record in records])
        values = np.full(len(records), np.nan)
        for fold, scorer in enumerate(self.scorers):
            rows = np.flatnonzero(folds == fold)
            scores = score_sequences((sequences[row] for row in rows.tolist()), scorer)
            values[rows] = [np.nan if value is None else value for value in scores]
        return values


def read_fragments(folder: Path, unseen: Unseen, facts: HeadFacts) -> Iterator[ScoredFragments]:
    """The fragments of an evaluation with what scorer and head say of them, length by length."""
    with (folder / "fragments.tsv").open(encoding="utf-8", newline="") as table:
        rows = {row["fragment"]: row for row in csv.DictReader(table, delimiter="\t")}
    with RunDir(folder / "run").output(FrameTable).open(encoding="utf-8") as table:
        score_of = dict(read_frame_scores(table))
    records = {record.id: record for record in read_fasta(folder / "fragments.fa")}
    numbers = {name: i for i, name in enumerate(sorted({row["group"] for row in rows.values()}))}
    of_length: dict[str, list[str]] = defaultdict(list)
    for name, row in rows.items():
        of_length[row["length"]].append(name)
    of_length.pop("whole", None)
    for length, names in of_length.items():
        owners = [rows[name]["record"] for name in names]
        base = unseen.log_odds(owners, [records[name].sequence for name in names])
        head = []
        for name in names:
            chunks: dict[str, list[float]] = defaultdict(list)
            for orf in translate_six_frames(list(chunk_record(records[name], facts.chunk_size))):
                chunks[orf.chunk_id].append(score_of[orf.id])
            head.append(fmean(chunk_log_odds(chunks.values(), facts)) if chunks else np.nan)
        yield ScoredFragments(
            int(length),
            base,
            np.array(head),
            np.array([rows[name]["label"] == "virus" for name in names]),
            np.array([numbers[rows[name]["group"]] for name in names]),
        )


def main(unseen: Unseen, head_file: Path, folders: list[Path]) -> None:
    head = load_head(head_file)
    of_folders = [list(read_fragments(folder, unseen, head.facts)) for folder in folders]
    join = fit_join(of_folders[0], load_scorer(embedded_scorer()))
    assert join is not None, "the embedded head has validation groups of both labels"
    gains = [
        measure_gain(SEED, "test" if number else "validation", fragments, join)
        for number, of_lengths in enumerate(of_folders)
        for fragments in of_lengths
    ]
    write_gains(folders[0] / "gain.tsv", [gain for gain in gains if gain is not None])
    sys.stdout.write((folders[0] / "gain.tsv").read_text())
    save_head(head_file, replace(head, facts=replace(head.facts, join=join)))


if __name__ == "__main__":
    match [Path(name) for name in sys.argv[1:]]:
        case [manifest, folds, head_file, *folders] if folders:
            main(Unseen.of(manifest, folds), head_file, folders)
        case _:
            raise SystemExit(__doc__)
