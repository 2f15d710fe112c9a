"""What a training leaves, in words: its state, its head, its model card, several in one table.

The model card is a Markdown page in the folder of the model, for whoever gets that. It is made of
the tables of the training. ``evaluate --card`` adds its figures; a training that goes on begins the
card anew, so that no figure stays of other weights.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from virnucpro import __version__
from virnucpro.callers.head import Head, load_head
from virnucpro.encoders.catalogue import open_model
from virnucpro.encoders.esm2.checkpoint import HEAD_FILE
from virnucpro.ground.errors import InputMissingError, UsageError
from virnucpro.ground.files import open_plain, sha256, write_whole
from virnucpro.ground.log import counted, escaped, printable
from virnucpro.learning.evaluation.metrics import NOT_DEFINED
from virnucpro.learning.pages import number_in, read_table
from virnucpro.learning.training.request import CARD_FILE, EPOCHS, FACTS, GAIN, HELD_OUT, SPLIT
from virnucpro.page.facts import Facts

_KEYS = {HELD_OUT: ("split", "network"), GAIN: ("split", "n_bases")}
_FIGURES = {
    HELD_OUT: ("auroc_frames", "auroc_chunks"),
    GAIN: ("base", "head", "joined", "gain", "weight"),
}
_OVER_SEEDS = ("mean", "deviation")  # rows of gain.tsv that are of several seeds
_EVALUATION = "## Evaluation"
_NONE_YET = (
    f"{_EVALUATION}\n\nNone yet: `virnucpro evaluate --data MANIFEST --split split.tsv --model "
    "FOLDER --card` measures it and writes all figures here.\n"
)
_OF_DATA = ("data_sha256", "split_sha256")
# told elsewhere, or of this machine
_LEFT_OUT = {"manifest", "encoder", "encoder_id", "vectors", "name", "fasta_sha256", *_OF_DATA}


def _measure(folder: Path) -> dict[str, Any]:
    """How far each seed of a training is, and its best epoch."""
    settings = Facts(Facts.read(folder / FACTS).part("settings"))
    by_seed: dict[str, list[dict[str, str]]] = {}
    for row in read_table(folder / EPOCHS):
        by_seed.setdefault(row.get("seed", ""), []).append(row)
    by_loss = settings.text("mode") == "pretrain" or settings.text("best_by") == "loss"
    name = "validation_loss" if by_loss else settings.text("best_by") or "auroc"
    return {
        "kind": "training",
        "mode": settings.text("mode"),
        "epochs": settings.number("epochs"),
        "is_finished": _is_finished(folder),
        "seeds": {seed: _progress(rows, name) for seed, rows in by_seed.items()},
    }


def _is_finished(folder: Path) -> bool:
    """True if the results were written after the last checkpoint."""
    card = _model_of(folder) / CARD_FILE
    written = [card.stat().st_mtime_ns] if card.is_file() else []
    epochs = [path.stat().st_mtime_ns for path in (folder / "checkpoints").glob("epoch_*.pt")]
    return bool(written) and max(written) >= max(epochs, default=0)


def _model_of(folder: Path) -> Path:
    return folder / Facts.read(folder / FACTS).text("name")


def _progress(rows: Sequence[Mapping[str, str]], name: str) -> dict[str, Any]:
    """How far a seed is; its best epoch, by the figure of this name, and the last figures."""
    last = {key: number_in(value) for key, value in rows[-1].items() if key != "seed"}
    measured = [(number_in(row.get(name, "")), row) for row in rows]
    scored = [(-value if "loss" in name else value, row) for value, row in measured if value]
    best = max(scored, key=lambda one: one[0])[1] if scored else {}
    return {
        "n_epochs": len(rows),
        "best_epoch": int(number_in(best.get("epoch", "")) or 0),
        name: number_in(best.get(name, "")),
        "last": {key: value for key, value in last.items() if value is not None},
    }


def training_lines(folder: Path, *, as_json: bool) -> list[str] | None:
    """Lines on a training folder, for people or for programs; None if no training began there.

    Raises:
        ResumeError: ``training.json`` is damaged.
        InputError: ``epochs.tsv`` is damaged.
    """
    if not (folder / FACTS).is_file():
        return None
    figures = _measure(folder)
    return [json.dumps(figures, indent=2)] if as_json else list(_describe(folder, figures))


def _describe(folder: Path, figures: Mapping[str, Any]) -> Iterator[str]:
    """What is trained on what, how far it is, and what to do next."""
    facts = Facts.read(folder / FACTS)
    yield f"training    {figures['mode']}, {printable(facts.text('manifest'))}"
    yield f"encoder     {facts.text('encoder') or 'a new one, or none'}"
    for seed, one in figures["seeds"].items():
        last = ", ".join(f"{name} {value:.4g}" for name, value in one["last"].items())
        yield (
            f"seed {printable(seed):<6} epoch {one['n_epochs']} of {figures['epochs']}, "
            f"best {one['best_epoch'] or 'not known yet'}; last: {last}"
        )
    if not figures["seeds"]:
        yield f"epochs      0 of {figures['epochs']}"
    if figures["is_finished"]:
        yield "finished    its results are there; more --epochs with --resume go on"
        yield f"model       {printable(_model_of(folder))}: see `virnucpro models info`"
    else:
        yield "unfinished  the command of the training with --resume goes on"


def describe_head(path: Path) -> Iterator[str]:
    """What a head is for, how it calls, and what it was trained on, in lines.

    Raises:
        UnavailableError: it is damaged, or of an older version.
    """
    head = load_head(path)
    facts = head.facts
    yield f"head        {printable(path)}"
    yield f"sha256      {head.sha256}"
    for encoder in facts.encoders:
        yield (
            f"encoder     {printable(encoder.name)}, layer {encoder.layer}, {encoder.pooling} of "
            f"{encoder.dim} dimensions, id {encoder.encoder_id}"
        )
    yield f"chunks      {facts.chunk_size} bases; a chunk is the {facts.frame_rule} of its frames"
    yield f"threshold   {facts.threshold:.6f}, exponent {facts.exponent:.2f}"
    yield from _join_lines(head)
    yield (
        f"trained on  {counted(len(head.trained_records), 'record')} of "
        f"{counted(len(head.trained_groups), 'group')}: {printable(facts.training)}"
    )


def _join_lines(head: Head) -> Iterator[str]:
    join = head.facts.join
    if join is None:
        yield "join        none: it calls by itself"
        return
    weights = ", ".join(f"{knot.head:.2f} at {knot.n_bases:,} bases" for knot in join.knots)
    yield f"join        with the scorer; weight of the head {weights}"


def summary_lines(folders: Sequence[Path]) -> list[str]:
    """A table: mean and standard deviation of the held-out figures over trainings and seeds.

    Raises:
        UsageError: fewer than two trainings or seeds have figures.
        InputError: a table is damaged.
    """
    lines = ["table\trow\tfigure\tn\tmean\tdeviation"]
    for table in (HELD_OUT, GAIN):
        values = _figures_of(folders, table)
        for (row, figure), numbers in values.items():
            if len(numbers) > 1:
                cells = (table, row, figure, len(numbers), f"{fmean(numbers):.4f}")
                lines.append("\t".join(map(str, (*cells, f"{stdev(numbers):.4f}"))))
    if len(lines) == 1:
        raise UsageError(
            "no figure is there twice: a mean needs two trainings or seeds that are finished",
            hint="give the folders of several trainings, or one that was trained with --seeds",
        )
    return lines


def _figures_of(folders: Sequence[Path], table: str) -> dict[tuple[str, str], list[float]]:
    """The values of each row and figure of a table, of all folders and seeds."""
    values: dict[tuple[str, str], list[float]] = {}
    rows = [row for folder in folders for row in read_table(folder / table)]
    of_seeds = [row for row in rows if row.get("seed") not in _OVER_SEEDS]
    for row, figure in product(of_seeds, _FIGURES[table]):
        name = " ".join(row.get(key, NOT_DEFINED) for key in _KEYS[table])
        if (number := number_in(row.get(figure, ""))) is not None:
            values.setdefault((name, figure), []).append(number)
    return values


# The model card


def write_card(training: Path) -> None:
    """Write the card of the model in the folder of a training.

    Raises:
        ResumeError: ``training.json`` is damaged.
        InputError: a table is damaged.
        OutputError, StorageError: as ``files.writing``.
    """
    facts = Facts.read(training / FACTS)
    model = training / facts.text("name")
    write_whole(model / CARD_FILE, "\n".join([*_lines(training, model, facts), _NONE_YET]))


def find_card(model: str) -> Path:
    """The card of a model that ``--model`` names.

    Raises:
        InputMissingError: it has none.
    """
    head = open_model(model, lambda _: None).head
    path = head and head.with_name(CARD_FILE)
    if path is None or not path.is_file():
        raise InputMissingError(
            f"the model {printable(model)} has no card",
            hint="--card is for the folder of a model that `virnucpro train` wrote",
        )
    return path


def add_evaluation(card: Path, lines: Sequence[str]) -> None:
    """Put the figures of an evaluation into a card, in the place of those that are there."""
    with open_plain(card) as stored:
        text = stored.read().decode("utf-8", errors="replace")
    before = text.split(_EVALUATION)[0]
    write_whole(card, "\n".join([f"{before}{_EVALUATION}\n", *lines, ""]))


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """A table, and an empty line behind it."""
    yield _row([name.replace("_", " ") for name in names])
    yield "|---" * len(names) + "|"
    yield from map(_row, rows)
    yield ""


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(escaped(cell).replace('|', '&#124;') for cell in cells)} |"


def _lines(training: Path, model: Path, facts: Facts) -> Iterator[str]:
    settings = Facts(facts.part("settings"))
    mode, head = settings.text("mode"), model / HEAD_FILE
    encoder = f"{Path(facts.text('encoder')).name}, id {facts.text('encoder_id')}"
    yield f"# {printable(model.name)}\n"
    if head.is_file():
        yield "A virus classifier for VirNucPro: an encoder of proteins, and a head that calls.\n"
        yield f"    virnucpro predict -i contigs.fa -o results/ --model {printable(model.name)}/\n"
        yield f"- head: SHA-256 {sha256(head)}"
    else:
        yield "An encoder of proteins for VirNucPro, trained on masked residues.\n"
    yield f"- made by VirNucPro {__version__}, mode {mode}"
    yield f"- encoder at the start: {encoder if facts.text('encoder') else 'a new one, or none'}\n"
    yield "## Data and split\n"
    yield "Whole groups are in one part; the test part was neither trained on nor tuned to.\n"
    yield from markdown_table(("part", "label", "groups", "records"), list(_parts(training)))
    for name in _OF_DATA:
        yield f"- {name.removesuffix('_sha256')}: SHA-256 {facts.text(name)}"
    for digest in facts.sequence("fasta_sha256"):
        yield f"- sequences: SHA-256 {escaped(digest)}"
    yield "\n## Settings\n"
    content = {**facts.content, **settings.content}
    told = {name: value for name, value in content.items() if name not in {*_LEFT_OUT, "settings"}}
    yield from markdown_table(("option", "value"), list(told.items()))
    yield from _figures(training, HELD_OUT, "AUROC on the groups that were held out")
    yield from _figures(training, GAIN, "Gain of the head over the scorer, by length")


def _parts(training: Path) -> Iterator[tuple[object, ...]]:
    groups: Counter[tuple[str, str]] = Counter()
    records: Counter[tuple[str, str]] = Counter()
    for row in read_table(training / SPLIT):
        part = row.get("split", ""), row.get("label", "")
        groups[part] += 1
        records[part] += int(number_in(row.get("n_records", "")) or 0)
    for part in sorted(groups):
        yield *part, groups[part], records[part]


def _figures(training: Path, name: str, title: str) -> Iterator[str]:
    rows: Sequence[Mapping[str, str]] = read_table(training / name)
    if rows:
        yield f"## {title}\n"
        yield from markdown_table(list(rows[0]), [list(row.values()) for row in rows])
