"""Small labelled data sets, and ``virnucpro train`` on them in this process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

from virnucpro.core.events import Progress, RunEvent
from virnucpro.core.option_schema import build_options
from virnucpro.core.types import reverse_complement
from virnucpro.training.evaluation.calibration import Calibration
from virnucpro.training.frame_dataset import FrameStore, LabelledFrames, read_ids
from virnucpro.training.labelled_data import (
    Labelled,
    LabelledRecord,
    Split,
    read_data_manifest,
    read_records,
    read_split,
)
from virnucpro.training.options import TrainOptions
from virnucpro.training.train import train
from virnucpro.training.training_config import TrainingRun
from virnucpro.viral.head import EncoderInfo, HeadInfo

# without a T no frame of the strand has a stop
_CODONS = {
    "virus": [a + b + c for a in "ACG" for b in "AC" for c in "AC"],
    "other": [a + b + c for a in "ACG" for b in "CG" for c in "CG"],
}


def coding(label: str, n_bases: int, rng: np.random.Generator) -> str:
    """Return bases without T, so without a stop. One label has more of some codons."""
    return "".join(rng.choice(_CODONS[label], n_bases // 3 + 1))[:n_bases]


def write_labelled(folder: Path, n_groups: int = 6, per_group: int = 2) -> Path:
    """Write a manifest with this number of groups per label, of 300 to 800 bases."""
    rng = np.random.default_rng(3)
    rows = ["path\tid\tlabel\tgroup\tweight\tkingdom"]
    with (folder / "data.fa").open("w") as out:
        for i in range(2 * n_groups * per_group):
            label = ("virus", "other")[i % 2]
            group = i // 2 // per_group
            bases = coding(label, 300 + 50 * (i % 11), rng)
            bases = reverse_complement(bases) if i % 3 else bases
            out.write(f">{label}/{i}_chunk_1 of a test\n{bases}\n")
            kingdom = f"{label} kingdom"
            rows.append(
                f"data.fa\t{label}/{i}_chunk_1\t{label}\t{label} {group}\t{1 + i % 3}\t{kingdom}"
            )
    path = folder / "manifest.tsv"
    path.write_text("\n".join(rows) + "\n")
    return path


def relabelled(folder: Path, codons_of: dict[str, str], n_groups: int = 16) -> Path:
    """Return records whose bases fit the labels from ``codons_of``."""
    path = write_labelled(folder, n_groups, per_group=3)
    rng = np.random.default_rng(8)
    records = records_of(path)
    with (folder / "data.fa").open("w") as out:
        for record in records:
            out.write(f">{record.id}\n{coding(codons_of[record.label], 400, rng)}\n")
    return path


def pairs_of(data: Path, splits: dict[str, Split] | None = None, *parts: Split) -> list[Labelled]:
    """Return the records of a manifest with their sequences, or only of some split parts."""
    pairs = read_records(read_data_manifest(data))
    return [pair for pair in pairs if splits is None or splits[pair[0].group] in parts]


def records_of(
    data: Path, splits: dict[str, Split] | None = None, *parts: Split
) -> list[LabelledRecord]:
    return [labelled for labelled, _ in pairs_of(data, splits, *parts)]


def frames_of(training: Path, part: Split, chunk_size: int = 300) -> LabelledFrames:
    """Return the frames that a training made from the groups of one part."""
    splits = read_split(training / "split.tsv")
    return FrameStore.open(training / "frames").select(splits, part, [chunk_size])


def ids_of(training: Path, frames: LabelledFrames) -> list[str]:
    ids = read_ids(training / "frames")
    return [ids[row] for row in frames.rows.tolist()]


def options(data: Path, output: Path, **changes: object) -> TrainOptions:
    """Return options for a small training on the CPU, in float32."""
    small = {
        "epochs": 2,
        "batch_size": 16,
        **({} if changes.get("pretrain") else {"hidden": 8}),
        "chunk_size": (300,),
        "device": "cpu",
        "precision": "fp32",
    }
    return build_options(TrainOptions, {"data": data, "output_dir": output, **small, **changes})


def head_facts(found: Calibration, encoder: EncoderInfo, chunk_size: int) -> HeadInfo:
    return HeadInfo(
        encoders=(encoder,),
        chunk_size=chunk_size,
        threshold=found.threshold,
        frame_rule=found.frames,
        exponent=found.exponent,
        training="for a test",
    )


def train_and_be_killed(given: list[TrainOptions]) -> None:
    """Train up to the first step of the third epoch."""

    def kill(event: RunEvent) -> None:
        if isinstance(event, Progress) and event.stage.startswith("epoch 3 "):
            os.kill(os.getpid(), signal.SIGKILL)

    train(given[0], kill)


def train_here(asked: TrainOptions, told: list[RunEvent] | None = None) -> TrainingRun:
    """Train in this process, as the command does."""
    return train(asked, ([] if told is None else told).append)
