"""A training gives the same weights on one device or more, interrupted or not."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import training_helpers
from fair_esm_reference import tolerance
from forkserver_runner import Beside
from run_helpers import our_processes, wait_until
from sklearn.metrics import accuracy_score, f1_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from training_helpers import (
    GRADIENT_LIMIT,
    N_ROWS,
    SHAPE,
    Interrupting,
    Training,
    distance,
    frames,
    history,
    last_checkpoint,
    run_here,
    run_on_two,
    settings,
    state_of,
    under_torchrun,
    weights,
    weights_limit,
)

from virnucpro.core.errors import (
    InputError,
    ResumeError,
    StorageError,
    UsageError,
    VirnucproError,
)
from virnucpro.core.safe_dir import SafeDir
from virnucpro.models.attention import attend_runs, attend_to_train
from virnucpro.models.esm2.model import ESM2
from virnucpro.models.frame_networks import FrameNetwork
from virnucpro.training import distributed as ranks
from virnucpro.training.distributed import Ranks, Started, started_by_torchrun
from virnucpro.training.frame_dataset import balanced_weights, given_weights
from virnucpro.training.networks import (
    Classifier,
    FrameClassifier,
    FrameLabels,
    frame_log_odds,
    frame_samples,
)
from virnucpro.training.train import _Board, _show_best
from virnucpro.training.trainer import _Clock, lr_factor, profile_lines, speed_lines

CPU = Ranks(0, 1, torch.device("cpu"))
pytestmark = pytest.mark.usefixtures("quick_starts_in_module")


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


# Batches cut in different ways


@dataclass(frozen=True)
class Cut:
    """How an effective batch is divided into parts."""

    n_processes: int
    n_steps: int  # whose gradients are added up
    fsdp: bool = False  # weights are cut too

    def __str__(self) -> str:
        return f"{self.n_processes} processes, {self.n_steps} steps{', fsdp' * self.fsdp}"

    def of(self, training: Training) -> Training:
        whole = training.settings.batch_size
        changes = {
            "batch_size": whole // (self.n_processes * self.n_steps),
            "grad_accum_steps": self.n_steps,
            "fsdp": self.fsdp,
        }
        return replace(
            training,
            folder=training.folder / str(self),
            settings=replace(training.settings, **changes),
        )


OVER_TWO = Cut(2, 1, fsdp=True)
WHOLE = Cut(1, 1)
CUTS = [Cut(2, 1), Cut(1, 2), Cut(2, 2), OVER_TWO]
N_STEPS = settings().epochs * (N_ROWS // settings().batch_size)
# both use the same loop to cut, so for residues one copy and one part per device suffice
CASES = [*(("labels", cut) for cut in CUTS), ("residues", Cut(2, 1)), ("residues", OVER_TWO)]
cases = pytest.mark.parametrize(("task", "cut"), CASES, ids=str)


@pytest.fixture(scope="module")
def trained(made_once) -> Path:
    """For each task and cut, one step (``TASK_once/CUT``) and a training (``TASK/CUT``)."""
    return made_once("cuts", train_every_cut)


def train_every_cut(root: Path) -> None:
    once = settings(batch_size=48, epochs=1, warmup_epochs=0)
    kinds = [
        kind
        for task in ("labels", "residues")
        for kind in (
            Training(root / f"{task}_once", once, task, shrunk=100),
            Training(root / task, settings(), task),
        )
    ]
    by_cut = {cut: [kind for kind in kinds if (kind.task, cut) in CASES] for cut in CUTS}
    here, halved = (
        [cut.of(kind) for cut in CUTS for kind in by_cut[cut] if cut.n_processes == n]
        for n in (1, 2)
    )
    run_here(*map(WHOLE.of, kinds), *here)
    fp16 = Training(root / "fp16", settings(precision="fp16"))
    run_on_two(*halved, Cut(2, 1).of(fp16), OVER_TWO.of(fp16))


def first_moments(folder: Path) -> Tensor:
    """Return Adam's first moments of all weights.

    After one step, that is a tenth of the gradient.
    """
    states = torch.load(last_checkpoint(folder), weights_only=True)["optimizer"]["state"]
    return torch.cat([states[i]["exp_avg"].flatten() for i in sorted(states)])


@cases
def test_gradient_does_not_depend_on_cuts(trained, task, cut):
    folder = trained / f"{task}_once"
    expected, found = (first_moments(folder / str(each)) for each in (WHOLE, cut))
    assert float(expected.norm()) < 0.05, "a gradient that is shortened to 1 hides its size"
    assert float((found - expected).norm() / expected.norm()) < GRADIENT_LIMIT


@cases
def test_weights_equal_those_of_one_process(trained, task, cut):
    one, other = (trained / task / str(each) for each in (WHOLE, cut))
    start = Training(one, settings(), task).trainer(CPU).module.state_dict()
    assert distance(weights(one), weights(other), start) < weights_limit(N_STEPS)
    for ours, theirs in zip(history(one), history(other), strict=True):
        assert ours == pytest.approx(theirs, rel=weights_limit(N_STEPS))


def test_weight_limit_detects_other_batches(trained, tmp_path):
    one = trained / "labels" / str(WHOLE)
    start = Training(one, settings()).trainer(CPU).module.state_dict()
    other = run_here(Training(tmp_path, settings(batch_size=15)))
    assert distance(weights(one), other, start) > 5 * weights_limit(N_STEPS)


# Kill and resume


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """One process, with dropout. The checkpoints of all epochs are kept."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_here(Training(folder, settings(keep_checkpoints=3), dropout=0.3))
    return folder


# batches that are made in other threads are the same, which is seen here as well
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stopped_training_resumes_to_same_weights(undisturbed, tmp_path, num_workers):
    changed = settings(num_workers=num_workers)
    with pytest.raises(InputError):
        run_here(Training(tmp_path, settings(), dropout=0.3, fault="told"))
    assert state_of(last_checkpoint(tmp_path)).epoch == 1
    again = run_here(Training(tmp_path, changed, dropout=0.3))
    assert_same_bits(again, weights(undisturbed))
    assert history(tmp_path) == history(undisturbed)


def flip(content: bytes) -> bytes:
    """Flip a bit of a weight, which torch itself does not notice."""
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


@pytest.mark.parametrize("damage", [lambda _: b"", lambda content: content[:-1], flip])
def test_damaged_checkpoint_is_named(undisturbed, tmp_path, damage):
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    damaged = last_checkpoint(tmp_path)
    damaged.write_bytes(damage(damaged.read_bytes()))
    training = Training(tmp_path, settings(), dropout=0.3)
    with pytest.raises(ResumeError, match=r"epoch_0003\.pt cannot be read") as caught:
        run_here(training)
    assert "delete it" in caught.value.hint
    damaged.unlink()
    assert_same_bits(run_here(training), weights(undisturbed))
    assert history(tmp_path) == history(undisturbed)


def test_training_resumes_from_the_best(tmp_path):
    measured = (0.5, 0.9, 0.7, 0.6)
    undisturbed = Training(tmp_path, settings(epochs=4), dropout=0.3, measured=measured)
    run_here(undisturbed)
    expected = torch.load(last_checkpoint(tmp_path), weights_only=True)
    assert state_of(tmp_path / "checkpoints" / "best.pt").epoch == 2
    last_checkpoint(tmp_path).unlink()
    run_here(replace(undisturbed, measured=measured[2:]))
    found = torch.load(last_checkpoint(tmp_path), weights_only=True)
    assert_same_bits(found["module"], expected["module"])
    assert found["state"]["best_epoch"] == 2 and found["state"]["epoch"] == 4


def test_best_and_last_checkpoints_are_kept(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "epoch_0001 (copy).pt").write_text("mine")
    run_here(
        Training(
            tmp_path, settings(epochs=5, keep_checkpoints=2), measured=(0.5, 0.9, 0.6, 0.5, 0.4)
        )
    )
    assert {path.name for path in folder.iterdir()} == {
        "best.pt",
        "epoch_0001 (copy).pt",
        *("epoch_0004.pt", "epoch_0005.pt"),
    }
    assert state_of(folder / "best.pt").epoch == 2


def test_training_resumes_on_other_device_count(trained, tmp_path):
    """One process is stopped, two continue with parts of half the size, and then one again.

    The two shard the weights, and the one does not.
    """
    with pytest.raises(InputError):
        run_here(Training(tmp_path, settings(), fault="told"))
    assert state_of(last_checkpoint(tmp_path)).epoch == 1
    again = run_on_two(Training(tmp_path, settings(batch_size=8, fsdp=True)))
    one = trained / "labels" / str(WHOLE)
    start = Training(one, settings()).trainer(CPU).module.state_dict()
    assert distance(weights(one), again, start) < weights_limit(N_STEPS)
    assert len(history(tmp_path)) == settings().epochs
    assert_same_bits(run_here(Training(tmp_path, settings())), again)
    run_here(Training(tmp_path, settings(epochs=4)))
    assert len(history(tmp_path)) == 4


def test_finished_training_continues_for_more_epochs(undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    before = history(undisturbed)
    run_here(Training(tmp_path, settings(epochs=5), dropout=0.3))
    assert history(tmp_path)[:3] == before and len(history(tmp_path)) == 5
    assert history(tmp_path)[3]["lr"] > before[-1]["lr"], "the rate is that of five epochs"
    assert state_of(last_checkpoint(tmp_path)).epoch == 5


def test_foreign_or_damaged_checkpoint_is_refused(undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    with pytest.raises(ResumeError, match="another network"):
        run_here(Training(tmp_path, settings(), "residues"))
    last, best = (tmp_path / "checkpoints" / name for name in ("epoch_0009.pt", "best.pt"))
    torch.save({"weights": torch.zeros(3)}, last)
    with pytest.raises(ResumeError, match=r"epoch_0009\.pt is not a checkpoint"):
        run_here(Training(tmp_path, settings()))
    last.unlink()
    best.write_bytes(best.read_bytes()[:1000])
    with pytest.raises(ResumeError, match=r"best\.pt cannot be read") as caught:
        run_here(Training(tmp_path, settings(), dropout=0.3))
    assert "another --output-dir" in caught.value.hint


@pytest.mark.parametrize(
    "change",
    [
        {"state": {}},
        {"state": {"epoch": 3, "other": 1}},
        {"state": {"epoch": "3"}},
        {"state": {"epoch": -3}},
        {"state": {"epoch": 10**9}},
        {"state": {"epoch": 3, "best_epoch": 99}},
        {"state": 5},
        {"module": [1, 2]},
        {"module": {"weight": "none"}},
        {"optimizer": {}},
        {"optimizer": {"state": {99: {"exp_avg": torch.zeros(3)}}}},
        {"optimizer": {"state": {0: 5}}},
    ],
    ids=str,
)
def test_checkpoint_with_other_content_is_refused(undisturbed, tmp_path, change):
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    last = last_checkpoint(tmp_path)
    torch.save({**torch.load(last, weights_only=True), **change}, last)
    with pytest.raises(ResumeError, match=r"epoch_0003\.pt is not a checkpoint of this training"):
        run_here(Training(tmp_path, settings(), dropout=0.3))


def wait_until_it_hangs(folder: Path, parent: Beside) -> list[psutil.Process]:
    """Wait for the second epoch, in which nothing is sent. -> the training processes"""
    wait_until(lambda: (folder / "hanging").exists() or parent.returncode is not None)
    family = [psutil.Process(int(path.name)) for path in (folder / "processes").iterdir()]
    assert len(family) == 2
    return family


def test_ctrl_c_ends_all_processes_at_once(tmp_path):
    parent = Beside(tmp_path, "hanging", run=training_helpers.main)
    family = wait_until_it_hangs(tmp_path, parent)
    os.kill(parent.process.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in parent.said(10)
    assert_all_gone(family)


def test_killed_parent_ends_all_processes(trained, tmp_path):
    parent = Beside(tmp_path, "hanging", run=training_helpers.main)
    family = wait_until_it_hangs(tmp_path, parent)
    parent.process.kill()
    parent.said()
    assert_all_gone(family)
    again = run_on_two(Training(tmp_path, settings(batch_size=8)))
    folder = trained / "labels" / str(Cut(2, 1))
    assert_same_bits(again, weights(folder))
    assert history(tmp_path) == history(folder)


# Errors of one process


@pytest.mark.parametrize(
    ("fault", "kind", "message", "hint"),
    [
        ("told", InputError, r"the second epoch is \[red\]bad", "take another"),
        (
            "untold",
            VirnucproError,
            "process on cpu ended: RuntimeError: a fault of ours",
            "--resume",
        ),
        ("killed", VirnucproError, "process on cpu ended: SIGKILL", "--resume"),
        ("full disk", StorageError, "epoch_2: No space left on device", "make room there"),
    ],
)
def test_first_error_ends_all_processes(tmp_path, fault, kind, message, hint):
    training = Training(tmp_path, settings(batch_size=8), fault=fault, faulty_rank=1)
    with pytest.raises(kind, match=message) as caught:
        run_on_two(training)
    assert hint in caught.value.hint
    assert not our_processes()


def test_ctrl_c_while_processes_start_leaves_none(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_on_two(Interrupting(tmp_path, settings(batch_size=8)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not our_processes()


def test_finished_process_may_end_with_any_code(trained, tmp_path):
    job = Training(tmp_path, settings(batch_size=8), fault="frail", faulty_rank=1)
    assert_same_bits(run_on_two(job), weights(trained / "labels" / str(Cut(2, 1))))


def test_two_trainings_do_not_disturb_each_other(tmp_path):
    short = settings(batch_size=8, epochs=1)
    with ThreadPoolExecutor(2) as pool:
        jobs = [Training(tmp_path / name, short) for name in ("one", "two")]
        assert_same_bits(*pool.map(run_on_two, jobs))


# torchrun


def test_error_beside_the_store_owner_is_reported(tmp_path):
    said = [
        process.said() for process in under_torchrun(tmp_path, "told", run=training_helpers.main)
    ]
    assert "65: the second epoch is" in said[1] and "the second epoch" not in said[0], said


@pytest.mark.parametrize(
    ("device", "backend", "told"), [("cuda:1", "nccl", "cuda:1"), ("cpu", "gloo", None)]
)
def test_processes_wait_for_a_slow_first(monkeypatch, device, backend, told):
    """NCCL asks the store for its address, with the store's timeout, and guesses no device."""
    joined = {}
    monkeypatch.setattr(
        ranks.dist, "init_process_group", lambda *words, **facts: joined.update(facts, to=words)
    )
    store = ranks.open_store(0, is_master=True)
    ranks.join_group(store, 0, 1, torch.device(device))
    assert store.timeout == joined["timeout"] == timedelta(hours=6)
    assert joined["to"] == (backend,)
    assert joined["device_id"] == (torch.device(told) if told else None)


def test_torchrun_is_known_by_its_environment():
    known = {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "16",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
    }
    assert started_by_torchrun({}) is None
    started = started_by_torchrun(known)
    assert started == Started(rank=9, local_rank=1, world_size=16)
    assert (started.device("cuda"), started.device("cpu")) == ("cuda:1", "cpu")
    with pytest.raises(UsageError, match="RANK is set, but MASTER_PORT is not"):
        started_by_torchrun({k: v for k, v in known.items() if k != "MASTER_PORT"})


# Epochs, rates and speed


def test_weights_of_the_best_epoch_are_kept(tmp_path):
    kept = settings(epochs=4, keep_checkpoints=3)
    found = run_here(Training(tmp_path, kept, measured=(0.5, 0.9, 0.7, 0.9)))
    best = torch.load(tmp_path / "checkpoints" / "best.pt", weights_only=True)
    second = torch.load(tmp_path / "checkpoints" / "epoch_0002.pt", weights_only=True)
    assert_same_bits(found, second["module"])
    assert_same_bits(best["module"], second["module"])
    last = torch.load(last_checkpoint(tmp_path), weights_only=True)
    assert last["state"]["best_epoch"] == 2 and last["state"]["epoch"] == 4


def test_epoch_accuracy_and_f1_use_weights():
    torch.manual_seed(3)
    module = FrameClassifier(FrameNetwork(None, 0), Classifier(0, 8, 0.0)).eval()
    objective = FrameLabels(frames(), frames(), given_weights)
    figures = objective.validate(module, CPU)
    known = frames()
    called = frame_log_odds(module, known, CPU)[-1] >= 0
    assert 0 < called.sum() < len(known)
    expected = {
        "accuracy": accuracy_score(known.is_virus, called, sample_weight=known.weight),
        "f1": f1_score(known.is_virus, called, sample_weight=known.weight),
    }
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, rel=1e-6), name  # weights are float32


def test_kill_between_two_files_keeps_a_new_best(tmp_path):
    run_here(Training(tmp_path, settings(epochs=2), measured=(0.5, 0.9)))
    best = tmp_path / "checkpoints" / "best.pt"
    last = last_checkpoint(tmp_path)
    assert state_of(best).epoch == state_of(last).epoch == 2
    assert best.stat().st_mtime_ns < last.stat().st_mtime_ns, "the last is the later one"


def test_best_file_without_figure_is_not_loaded(tmp_path):
    run_here(Training(tmp_path, settings(epochs=1), measured=(math.nan,)))
    assert not (tmp_path / "checkpoints" / "best.pt").exists()


@pytest.mark.parametrize(
    ("changes", "measured", "n_epochs"),
    [
        ({"early_stopping": 2}, (0.5, 0.9, 0.8, 0.7, 1.0, 1.0), 4),
        ({"early_stopping": 1, "eval_every": 2}, (0.9, 0.8, 1.0), 4),
    ],
)
def test_early_stopping_ends_a_training(tmp_path, changes, measured, n_epochs):
    run_here(Training(tmp_path, settings(epochs=6, **changes), measured=measured))
    assert [row["epoch"] for row in history(tmp_path)] == list(range(1, n_epochs + 1))


def test_figures_are_measured_at_intervals(tmp_path):
    run_here(Training(tmp_path, settings(epochs=5, eval_every=2)))
    assert [row["epoch"] for row in history(tmp_path) if "auroc" in row] == [2, 4, 5]


def test_rate_rises_linearly_and_falls_by_cosine():
    chosen = settings(epochs=4, warmup_epochs=1)
    shares = [lr_factor(step, 10, chosen) for step in range(40)]
    assert shares[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert shares[10] == 1
    assert shares[25] == pytest.approx(0.5)
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert 0 < shares[-1] < 0.01


@pytest.mark.parametrize(
    ("scale_lr", "expected"), [("none", 0.01), ("linear", 0.08), ("sqrt", 0.01 * 8**0.5)]
)
def test_rate_is_scaled_for_the_effective_batch(scale_lr, expected):
    chosen = settings(lr=0.01, scale_lr=scale_lr, grad_accum_steps=2)
    assert chosen.scaled_lr(world_size=4) == pytest.approx(expected)


def test_fewer_rows_than_parts_of_a_batch_are_refused(tmp_path):
    with pytest.raises(UsageError, match=f"{N_ROWS} rows to train on, for 64 parts"):
        run_here(Training(tmp_path, settings(grad_accum_steps=64)))


def test_loss_that_is_nan_ends_the_training(tmp_path):
    told = []
    watched = replace(CPU, on_event=told.append)
    trainer = Training(tmp_path, settings(batch_size=5)).trainer(watched)  # 10 steps in an epoch
    weight = trainer.objective.weight
    asked = count(1)
    trainer.objective.weight = lambda rows: math.nan if next(asked) == 13 else weight(rows)
    with pytest.raises(VirnucproError, match=r"epoch 2, step 3: the loss .* not finite") as caught:
        trainer.run()
    assert "--lr" in caught.value.hint
    assert len(told) <= 10 + 4, "it is seen one step later"
    for path in (last_checkpoint(tmp_path), tmp_path / "checkpoints" / "best.pt"):
        stored = torch.load(path, weights_only=True)
        assert stored["state"]["epoch"] == 1
        assert all(tensor.isfinite().all() for tensor in stored["module"].values())


def test_fp16_overflow_skips_the_step(trained, tmp_path):
    one = trained / "labels" / str(WHOLE)
    start = Training(one, settings()).trainer(CPU).module.state_dict()
    found = run_here(Training(tmp_path / "fp16", settings(precision="fp16")))
    # the roundings of fp16 are larger by the ratio of the tolerances
    coarser = tolerance(SHAPE.n_layers, torch.float16) / tolerance(SHAPE.n_layers, torch.float32)
    assert distance(found, weights(one), start) < weights_limit(N_STEPS) * math.sqrt(coarser)
    # two processes leave out more steps at the start: their losses are twice as large
    whole, cut = (weights(trained / "fp16" / str(each)) for each in (Cut(2, 1), OVER_TWO))
    assert distance(cut, whole, start) < weights_limit(N_STEPS) * math.sqrt(coarser)
    (tmp_path / "over").mkdir()
    training = Training(tmp_path / "over", settings(precision="fp16", epochs=1, batch_size=5))
    trainer = training.trainer(CPU)
    weight = trainer.objective.weight
    asked = count(1)
    moved = []
    trainer.objective.weight = lambda rows: weight(rows) / (1e35 if next(asked) == 3 else 1)
    classifier = trainer.module.classifier.nucleotide
    trainer.on_step = lambda step, _: moved.append(classifier[1].weight.detach().clone())
    trainer.run()
    assert trainer.scaler.get_scale() < 2**16
    # a step is logged when the next one is done
    assert torch.equal(moved[0], moved[1]) and not torch.equal(moved[1], moved[2])
    stored = torch.load(last_checkpoint(training.folder), weights_only=True)
    assert stored["scaler"]["scale"] == trainer.scaler.get_scale()
    again = replace(training, settings=settings(precision="fp16", epochs=2, batch_size=5))
    trainer = again.trainer(CPU)
    trainer.objective.weight = lambda rows: math.nan
    with pytest.raises(VirnucproError, match="gradient is not finite"):
        trainer.run()


@pytest.mark.parametrize("weigh", [given_weights, balanced_weights])
def test_validation_loss_equals_training_loss(tmp_path, weigh):
    """One step over all frames that hardly moves a weight, and then the same frames again."""
    training = Training(tmp_path, settings(batch_size=N_ROWS, epochs=1, lr=1e-12))
    trainer = training.trainer(CPU)
    trainer.objective = FrameLabels(frames(), frames(), weigh)
    (row,) = trainer.run().history
    # two sums of 100 terms of float32, each rounded at every step
    assert row["validation_loss"] == pytest.approx(row["loss"], rel=2 * 100 * 2**-24)


def test_smaller_last_batch_waits_for_next_epoch(tmp_path):
    told = []
    watched = replace(CPU, on_event=told.append)
    trainer = Training(tmp_path, settings(epochs=1)).trainer(watched)
    trainer.run()
    assert [event.done for event in told] == [16, 32, 48]
    assert {event.total for event in told} == {48}
    assert [words.split()[0] for words in told[-1].also] == ["loss", "rate"]
    assert trainer.clock.n_rows == 48


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_training_has_the_gradients_of_sdpa(device: str) -> None:
    found = []
    for name, kernel in (("cpu", attend_runs), (device, attend_to_train)):
        torch.manual_seed(0)
        encoder = ESM2.create(SHAPE)
        encoder.attend = kernel
        reader = FrameNetwork(encoder, SHAPE.dim)
        module = FrameClassifier(reader, Classifier(SHAPE.dim, 16, 0.0)).to(name)
        known = frames()
        objective = FrameLabels(known, known, given_weights)
        module(objective.batch(np.arange(len(known)), 0)).backward()
        found.append({n: p.grad.cpu() for n, p in module.named_parameters() if p.grad is not None})
    one, other = found
    nothing = {name: torch.zeros_like(gradient) for name, gradient in one.items()}
    assert one.keys() == other.keys()
    assert distance(one, other, nothing) < GRADIENT_LIMIT


# Log and files


CLOCKS = [
    _Clock(torch.device("cuda:0"), n_rows=6000,
          seconds={"waiting for data": 1.0, "forward and backward": 2.0, "validation": 9}),
    _Clock(torch.device("cuda:1"), n_rows=6000,
          seconds={"waiting for data": 3.0, "forward and backward": 1.0, "optimizer": 2}),
]  # fmt: skip


def test_speed_excludes_other_work():
    lines = [line.split() for line in speed_lines(CLOCKS)]
    assert lines == [
        ["rank", "frames", "seconds", "frames/s"],
        ["0", "cuda:0", "6,000", "3.0", "2,000.0"],
        ["1", "cuda:1", "6,000", "6.0", "1,000.0"],
        ["all", "12,000", "6.0", "3,000.0"],
    ]


def test_profile_has_shares_per_device():
    lines = profile_lines(CLOCKS)
    assert lines[0].split() == ["seconds", "0", "cuda:0", "1", "cuda:1"]
    assert [line.split() for line in lines[1:]] == [
        ["waiting", "for", "data", "1.0", "8.3%", "3.0", "50.0%"],
        ["forward", "and", "backward", "2.0", "16.7%", "1.0", "16.7%"],
        ["validation", "9.0", "75.0%", "0.0", "0.0%"],
        ["optimizer", "0.0", "0.0%", "2.0", "33.3%"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_training_time_is_divided_by_stage(tmp_path):
    trainer = Training(tmp_path, settings(epochs=1)).trainer(CPU)
    begun = time.perf_counter()
    trainer.run()
    spent = time.perf_counter() - begun
    parts = {"waiting for data", "forward and backward", "optimizer", "validation", "checkpoint"}
    assert trainer.clock.seconds.keys() == parts and all(trainer.clock.seconds.values())
    assert trainer.clock.training_seconds < sum(trainer.clock.seconds.values()) <= spent


@gpu
def test_profile_waits_for_the_device():
    device = torch.device("cuda")
    big = torch.randn(8192, 8192, device=device)
    for _ in range(2):  # the first product loads what it needs
        clock = _Clock(device, waits=True)
        begun = time.perf_counter()
        for _ in range(20):
            big @ big
        queued = time.perf_counter() - begun
        clock.lap("products")
    assert clock.seconds["products"] > 5 * queued


def points(folder, name: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return [(point.step, point.value) for point in found.Scalars(name)]


def row(epoch: int, loss: float, **figures: float) -> dict[str, float]:
    return {"epoch": float(epoch), "loss": loss, **figures}


def test_repeated_epoch_is_shown_once(tmp_path):
    killed = _Board(SafeDir(tmp_path), tmp_path)
    killed.on_epoch(row(1, 0.5))
    killed.on_epoch(row(2, 0.25))  # it was logged, but killed before it was stored
    with closing(_Board(SafeDir(tmp_path), tmp_path)) as again:
        again.on_epoch(row(2, 0.26))
        again.on_epoch(row(3, 0.125, auroc=0.75))
    assert points(tmp_path, "loss") == [(1, 0.5), (2, pytest.approx(0.26)), (3, 0.125)]
    assert points(tmp_path, "auroc") == [(3, 0.75)]
    killed.close()


def test_training_that_learns_nothing_leaves_no_file(tmp_path):
    _Board(SafeDir(tmp_path), tmp_path / "logs").close()
    assert not (tmp_path / "logs").exists()


def test_steps_and_end_are_logged(tmp_path):
    told: list[tuple[int, dict[str, float]]] = []
    trainer = Training(tmp_path, settings(epochs=2, warmup_epochs=0)).trainer(CPU)
    trainer.on_step = lambda step, figures: told.append((step, figures))
    history = trainer.run().history
    n_steps = len(told) // 2
    assert [step for step, _ in told] == list(range(1, 2 * n_steps + 1))
    for epoch, part in enumerate((told[:n_steps], told[n_steps:])):
        losses = [figures["loss"] for _, figures in part]
        assert np.mean(losses) == pytest.approx(history[epoch]["loss"], rel=1e-6)
    _, last = told[-1]
    assert last["lr"] == history[-1]["lr"] and "gpu_gib" not in last
    assert min(last[name] for name in ("gradient_norm", "frames_per_second")) > 0
    assert last["tokens_per_second"] > 20 * last["frames_per_second"], "proteins of 20 and more"
    logits = np.array([-2.0, -1.0, 1.0, 2.0], dtype=np.float32)
    samples = frame_samples(logits, frames(4), np.ones(4, np.float32))
    for _ in range(2):  # a training that goes on
        with closing(_Board(SafeDir(tmp_path), tmp_path / "logs")) as board:
            board.on_step(1, last)
        given = {"lora": 8, "model": None}
        _show_best(SafeDir(tmp_path), tmp_path / "logs", given, row(2, 0.25), samples)
    assert points(tmp_path / "logs" / "steps", "loss") == [(1, pytest.approx(last["loss"]))]
    curve = points(tmp_path / "logs" / "best", "reliability")
    assert [place for place, _ in curve] == [12, 27, 73, 88], "scores in percent"
    found = EventAccumulator(str(tmp_path / "logs" / "best"))
    found.Reload()
    assert {"precision and recall", "_hparams_/session_start_info"} <= found.summary_metadata.keys()
