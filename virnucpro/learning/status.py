"""A training folder and a head in lines for the user, and several trainings in one table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from virnucpro.callers.head import Head, load_head
from virnucpro.ground.errors import UsageError
from virnucpro.ground.log import counted, printable
from virnucpro.learning.evaluation.metrics import NOT_DEFINED
from virnucpro.learning.pages import number_in, read_table
from virnucpro.learning.training.request import EPOCHS, FACTS, GAIN, HEAD_FILE, HELD_OUT
from virnucpro.page.facts import Facts

_KEYS = {HELD_OUT: ("split", "network"), GAIN: ("split", "n_bases")}
_FIGURES = {
    HELD_OUT: ("auroc_frames", "auroc_chunks"),
    GAIN: ("base", "head", "joined", "gain", "weight"),
}
_OVER_SEEDS = ("mean", "deviation")  # rows of gain.tsv that are of several seeds


def _find_head(path: Path) -> Path | None:
    """The head file that is meant: the file itself, or that of a training folder."""
    if path.is_dir():
        path = path / HEAD_FILE
    return path if path.suffix == ".safetensors" and path.is_file() else None


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
    name = Facts.read(folder / FACTS).text("name")
    results = [folder / HEAD_FILE, *(folder / name).glob("*.safetensors")]
    written = [path.stat().st_mtime_ns for path in results if path.is_file()]
    epochs = [path.stat().st_mtime_ns for path in (folder / "checkpoints").glob("epoch_*.pt")]
    return bool(written) and max(written) >= max(epochs, default=0)


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
        if head := _find_head(folder):
            yield f"head        {printable(head)}: see `virnucpro models info`"
    else:
        yield "unfinished  the command of the training with --resume goes on"


def head_lines(path: Path) -> list[str] | None:
    """Lines on a head, by its file or the training folder with it; None if there is none.

    Raises:
        UnavailableError: it is damaged, or of an older version.
    """
    head = _find_head(path)
    return None if head is None else list(_describe_head(head))


def _describe_head(path: Path) -> Iterator[str]:
    """What it is for, how it calls, and what it was trained on."""
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
