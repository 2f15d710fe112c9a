"""Small trainings, some with a built-in fault. Spawned processes import them."""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Literal

import numpy as np
import torch
from fair_esm_reference import AMINO_ACIDS, tolerance
from forkserver_runner import Beside
from torch import Tensor
from torch.nn import Module

from virnucpro.core.errors import (
    InputError,
    VirnucproError,
)
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.model import ESM2
from virnucpro.models.frame_networks import FrameNetwork
from virnucpro.sequences.kmers import N_FEATURES
from virnucpro.training.distributed import (
    Ranks,
    run_on,
    run_under_torchrun,
    started_by_torchrun,
)
from virnucpro.training.frame_dataset import LabelledFrames, given_weights
from virnucpro.training.networks import (
    Classifier,
    FrameClassifier,
    FrameLabels,
    MaskedLanguageModel,
    MaskedResidues,
)
from virnucpro.training.options import TrainOptions
from virnucpro.training.trainer import (
    Trainer,
    _ProgressState,
    is_complete,
)

SHAPE = ESM2Shape(n_layers=2, dim=32, n_heads=2)
N_ROWS = 50  # not a multiple of any batch
Task = Literal["residues", "labels"]
Fault = Literal["", "told", "untold", "killed", "hanging", "full disk", "frail"]


def frames(n: int = N_ROWS, seed: int = 0) -> LabelledFrames:
    """Make proteins of 20 to 60 residues. Viral ones have more of the first ten amino acids."""
    rng = np.random.default_rng([n, seed])
    is_virus = np.arange(n) % 3 == 0
    letters = np.array(list(AMINO_ACIDS))
    share = np.where(np.arange(20) < 10, 3.0, 1.0) / 40
    proteins = [
        "".join(rng.choice(letters, rng.integers(20, 60), p=share if viral else share[::-1]))
        for viral in is_virus
    ]
    return replace(
        LabelledFrames.from_store(proteins, rng.random((n, N_FEATURES), dtype=np.float32)),
        is_virus=is_virus,
        weight=(0.5 + rng.random(n)).astype(np.float32),
        group=np.arange(n) % 7,
    )


def settings(**changes: object) -> TrainOptions:
    chosen = {
        "precision": "fp32",
        "epochs": 3,
        "batch_size": 16,
        "lr": 1e-3,
        "seed": 5,
        **changes,
    }
    return TrainOptions(data=Path("m.tsv"), output_dir=Path("out"), finetune=True, **chosen)


@dataclass(frozen=True)
class Training:
    """A training process. The first one writes ``weights.pt`` and ``state.json``."""

    folder: Path
    settings: TrainOptions
    task: Task = "labels"
    dropout: float = 0.0
    fault: Fault = ""  # at the end of the second epoch
    faulty_rank: int = 0
    measured: tuple[float, ...] = ()  # what validation finds, one after the other
    shrunk: float = 1.0  # what losses are divided by, so that no gradient is shortened

    def __call__(self, ranks: Ranks) -> None:
        (self.folder / "processes").mkdir(parents=True, exist_ok=True)
        (self.folder / "processes" / str(os.getpid())).touch()
        torch.set_num_threads(1)
        trainer = self.trainer(ranks)
        state = trainer.run()
        weights = {name: is_complete(one) for name, one in trainer.module.state_dict().items()}
        if ranks.is_first:
            torch.save(weights, self.folder / "weights.pt")
            (self.folder / "state.json").write_text(json.dumps(state.history))

    def trainer(self, ranks: Ranks) -> Trainer:
        torch.manual_seed(self.settings.seed)
        learned = frames()
        held_out = frames(20, seed=1)
        with torch.device("meta" if self.settings.fsdp and not ranks.is_first else "cpu"):
            module = self.module()
        if self.task == "residues":
            objective = MaskedResidues(learned, held_out, self.settings.seed)
        else:
            objective = FrameLabels(learned, held_out, given_weights)
        trainer = Trainer(module, objective, self.settings, ranks, self.folder)
        self.disturb(trainer)
        return trainer

    def module(self) -> Module:
        encoder = ESM2.create(SHAPE)
        if self.settings.fsdp:
            encoder.forget_activations()
        if self.task == "residues":
            return MaskedLanguageModel(encoder)
        classifier = Classifier(SHAPE.dim, 16, self.dropout)
        return FrameClassifier(FrameNetwork(encoder, SHAPE.dim), classifier)

    def disturb(self, trainer: Trainer) -> None:
        objective = trainer.objective
        measured = iter(self.measured)
        weight = objective.weight
        measure = objective.validate

        def measure_and_fail(*given: object) -> dict[str, float]:
            found = measure(*given)
            if trainer.state.epoch == 2 and trainer.ranks.rank == self.faulty_rank:
                self.fail()
            return found | {objective.best: next(measured)} if self.measured else found

        if self.shrunk != 1:
            objective.weight = lambda rows: self.shrunk * weight(rows)
        if self.fault or self.measured:
            objective.validate = measure_and_fail

    def fail(self) -> None:
        match self.fault:
            case "frail":
                atexit.register(os.abort)  # as torch's threads do now and then
            case "told":
                raise InputError("the second epoch is [red]bad[/red]", hint="take another")
            case "untold":
                raise RuntimeError("a fault of ours")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hanging":
                (self.folder / "hanging").touch()
                Event().wait()
            case "full disk":
                raise OSError(28, "No space left on device", str(self.folder / "epoch_2"))


class Interrupting(Training):
    """Sends Ctrl-C when it is pickled, that is, while its first process starts."""

    def __getstate__(self) -> dict[str, object]:
        os.kill(os.getpid(), signal.SIGINT)
        return vars(self)


@dataclass(frozen=True)
class Several:
    """Runs several trainings in one process, because processes take seconds to start."""

    trainings: tuple[Training, ...]

    def __call__(self, ranks: Ranks) -> None:
        for training in self.trainings:
            training(ranks)


def run_here(*trainings: Training) -> dict[str, Tensor]:
    """Run the trainings in this process. -> the weights of the last one"""
    Several(trainings)(Ranks(0, 1, torch.device("cpu")))
    return weights(trainings[-1].folder)


def run_on_two(*trainings: Training) -> dict[str, Tensor]:
    run_on(["cpu", "cpu"], Several(trainings), lambda _: None)
    return weights(trainings[-1].folder)


def variables_of_torchrun(rank: int) -> dict[str, str]:
    """Return torchrun's variables for one of two processes, except the port. Each uses a thread."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return {**os.environ, **own, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def under_torchrun(*words: object, run: Callable[..., None] | None = None) -> list[Beside]:
    """Start a command or a function in two processes, as torchrun does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = {"MASTER_PORT": str(probe.getsockname()[1])}
    return [Beside(*words, run=run, env=variables_of_torchrun(rank) | port) for rank in (0, 1)]


def weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "weights.pt", weights_only=True)


def history(folder: Path) -> list[dict[str, float]]:
    """Return the figures of each epoch, except the speed, which always differs."""
    rows = json.loads((folder / "state.json").read_text())
    return [{k: v for k, v in row.items() if k != "frames_per_second"} for row in rows]


def last_checkpoint(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("epoch_*.pt"))


def state_of(checkpoint: Path) -> _ProgressState:
    return _ProgressState(**torch.load(checkpoint, weights_only=True)["state"])


def main(given: tuple[Path, str]) -> None:
    """Run a training in a process that a test can kill, or with a fault as torchrun starts it."""
    folder, how = given
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if how == "hanging":  # a parent and its processes
        run_on(["cpu", "cpu"], Training(folder, settings(batch_size=8), fault="hanging"), print)
        return
    found = started_by_torchrun(os.environ)
    assert found is not None
    training = Training(folder, settings(batch_size=8), fault=how, faulty_rank=1)
    try:
        run_under_torchrun(found, "cpu", nullcontext(), training, print)
    except VirnucproError as error:
        sys.exit(f"{error.exit_code}: {error}")


# the roundings of a gradient are those of the forward pass, three times (see test_esm2_model)
GRADIENT_LIMIT = 3 * tolerance(SHAPE.n_layers, torch.float32)


def weights_limit(n_steps: int) -> float:
    """Return how far rounding may separate weights, as a share of how far they were moved.

    Adam moves a weight by about lr, whatever the size of its gradient g, and by min(2, d / g) lr
    too much or too little if g is off by d. Let d be a share r of the root mean square of all g,
    and g normally distributed, with a density of 0.8 at 0. The mean square of the error is then
    lr^2 times the integral of 0.8 min(2, r / x)^2 dx from 0, which is 3.2 r. In n steps, errors add
    up to n at worst, and random moves to the root of n.
    """
    return math.sqrt(3.2 * GRADIENT_LIMIT * n_steps)


def distance(one: dict[str, Tensor], other: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Return the distance of weights, as a share of how far they were moved from ``start``."""
    apart = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    moved = sum(float((one[name] - start[name]).double().square().sum()) for name in one)
    return math.sqrt(apart / moved)
