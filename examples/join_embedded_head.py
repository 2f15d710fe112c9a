"""Join the head that comes with VirNucPro, virnucpro/embedded/head.safetensors, with its scorer.

    virnucpro evaluate --data manifest.tsv --split examples/embedded_split.tsv --part validation \
        --allow-training-data --lengths 500,1000,3000,10000 -o validation/ --head HEAD
    python examples/join_embedded_head.py UNSEEN.safetensors HEAD validation/ [test/]

The scorer of the package was trained on the head's validation groups, so its log-odds are too
good there. UNSEEN is a scorer that was trained without them (``train_embedded_scorer.py train``,
with a table in which the groups that share a record with them have another part): it stands for
that of the package, whose hash the head gets. The first folder is of the validation groups, to
which the weights are fitted; the gain on them, by folds, and on the groups of further folders is
written as a table.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from virnucpro.outputs.sinks import FrameTable, read_frame_scores
from virnucpro.run.folder import RunDir
from virnucpro.scorer.nets import Scorer, embedded_scorer, load_scorer
from virnucpro.scorer.score import score_sequences
from virnucpro.scoring.calls import chunk_log_odds
from virnucpro.scoring.head import HeadFacts, load_head, save_head
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.translate import chunk_record, translate_six_frames
from virnucpro.training.gain import measure_gain, write_gains
from virnucpro.training.joining import Fragments, fit_join

SEED = 0


def read_fragments(folder: Path, scorer: Scorer, facts: HeadFacts) -> Iterator[Fragments]:
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
        base = score_sequences((records[name].sequence for name in names), scorer)
        head = []
        for name in names:
            chunks: dict[str, list[float]] = defaultdict(list)
            for orf in translate_six_frames(list(chunk_record(records[name], facts.chunk_size))):
                chunks[orf.chunk_id].append(score_of[orf.id])
            head.append(fmean(chunk_log_odds(chunks.values(), facts)) if chunks else np.nan)
        yield Fragments(
            int(length),
            np.array([np.nan if value is None else value for value in base]),
            np.array(head),
            np.array([rows[name]["label"] == "virus" for name in names]),
            np.array([numbers[rows[name]["group"]] for name in names]),
        )


def main(scorer_file: Path, head_file: Path, folders: list[Path]) -> None:
    scorer, head = load_scorer(scorer_file), load_head(head_file)
    of_folders = [list(read_fragments(folder, scorer, head.facts)) for folder in folders]
    join = fit_join(of_folders[0], load_scorer(embedded_scorer()).sha256)
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
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
