"""``models check`` passes for correct vectors, and fails for wrong ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import faulty_encoders as faults
import numpy as np
import pytest
from conftest import TINY
from fair_esm_reference import make_fair_esm, save_contact_head, save_fair_esm
from forkserver_runner import run_command, virnucpro

from virnucpro.core.device_options import ComputeOptions
from virnucpro.core.errors import UnavailableError
from virnucpro.core.events import Progress, RunEvent
from virnucpro.core.recipe import Alphabet, Precision
from virnucpro.models.device_choice import DeviceChoice
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.models.trained_encoder import _TrainedEncoderInfo, save_trained_encoder
from virnucpro.models.validation.compare_reference import (
    check,
    check_on,
    find_deviations,
    make_panel,
)

PANEL_SHA256 = "3b4a4a847851cec74aba954be386d06d7e323ca3876f7e529336cf1141a5db67"
DEEP = ESM2Shape(n_layers=12, dim=32, n_heads=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_fair_esm(make_fair_esm(TINY), tmp_path_factory.mktemp("check") / "tiny.pt")


@pytest.fixture
def short_panel(monkeypatch) -> set[str]:
    """Use the shorter half of the panel, which takes a tenth of the time."""
    panel = {name: protein for name, protein in make_panel().items() if len(protein) < 200}
    assert len(panel) > 20 and "odd_J" in panel
    monkeypatch.setattr("virnucpro.models.validation.compare_reference.make_panel", lambda _: panel)
    return set(panel)


def run_check(*words: object, run: Callable[[list[str]], None] = run_command):
    """Run the command with one thread, because other tests use the cores."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return virnucpro("models", "check", *words, env=env, run=run)


def run(model: object, precision: Precision = "fp32", events: list[RunEvent] | None = None):
    options = ComputeOptions(device="cpu", precision=precision)
    (outcome,) = check(str(model), options, (events if events is not None else []).append)
    return outcome


# The panel


def test_panel_is_the_same_everywhere():
    """It has proteins of 1 to 1022 residues, and every unusual letter in upper and lower case."""
    text = "".join(f">{name}\n{protein}\n" for name, protein in make_panel().items())
    assert hashlib.sha256(text.encode()).hexdigest() == PANEL_SHA256


# Correct vectors


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_check_passes_in_both_formats(model, tiny, precision):
    for path in (model, tiny.model):
        outcome = run(path, precision)
        assert not outcome.failures, outcome.report_lines()
        assert {one.sequence for one in outcome.deviations} == set(make_panel())
        shares = [outcome.share(one) for one in outcome.deviations]
        assert shares[0] <= 1 and shares == sorted(shares, reverse=True)
        assert all(one.mean > 0 and one.row > 0 for one in outcome.deviations)
        assert outcome.tokens_per_second > 0 and outcome.oracle.tokens_per_second > 0


@pytest.mark.usefixtures("short_panel")
def test_tolerance_follows_layers_and_precision(tmp_path, model):
    """Rounding in bf16 is 2^16 times that in float32, but long sums in float32 round often."""
    path = save_fair_esm(make_fair_esm(DEEP), tmp_path / "deep.pt")
    for precision, least, most in (
        ("fp32", 0, 1e-5),
        ("bf16", 1e-3, 2e-2),
        ("fp8", 1e-2, 0.4),
        ("int8", 2e-3, 0.2),
    ):
        shallow = run(model, precision)
        deep = run(path, precision)
        assert not deep.failures, deep.report_lines()
        assert deep.oracle.row > shallow.oracle.row
        assert least < shallow.oracle.mean < most
        assert least < shallow.oracle.row < most


def test_built_in_model_passes(short_panel):
    outcome = run("virnucpro-tiny")
    assert not outcome.failures, outcome.report_lines()
    assert {one.sequence for one in outcome.deviations} == short_panel


def test_panel_of_bases() -> None:
    letters = set().union(*make_panel(Alphabet.DNA).values())
    assert set("ACGTNRUa") <= letters <= set("ACGTNRU-acgt")


def test_command_checks_a_model(tiny):
    answer = run_check(tiny.model, "--device", "cpu", "--quiet")
    assert answer.returncode == 0, answer.stderr
    assert "passed: all" in answer.stdout and "worst " in answer.stdout
    assert answer.stdout.count("tokens/s") == 2
    assert "random_1022" in answer.stdout and "odd_J" in answer.stdout


def test_both_programs_use_the_files_rotary_table(tmp_path):
    """Both fair-esm and we read it from the file."""
    fair_esm = make_fair_esm(TINY)
    for layer in fair_esm.layers:
        layer.self_attn.rot_emb.inv_freq.mul_(1.01)
    outcome = run(save_fair_esm(fair_esm, tmp_path / "turned.pt"))
    assert not outcome.failures, outcome.report_lines()


# Wrong vectors


SMALL = [faults.scale_a_norm, faults.scale_rotary, faults.round_rotary, faults.change_a_weight]
SMALL += [faults.forget_the_last_norm, faults.exchange_two_rows, faults.give_nan]
# A limit of bf16 is larger, so float32 finds these too.
PLAIN = [faults.take_an_earlier_layer, faults.pool_the_start, faults.pool_all_tokens]
PLAIN += [faults.read_j_as_leucine]
LARGE = [faults.scale_a_norm_much, faults.take_bf16_angles]  # compared with roundings of bf16


@pytest.mark.parametrize(
    ("fault", "precision"),
    [*((one, "fp32") for one in SMALL), *((one, "bf16") for one in PLAIN + LARGE)],
)
def test_fault_larger_than_rounding_fails(model, fault, precision):
    with faults.crooked(fault):
        outcome = run(model, precision)
    assert outcome.failures
    assert f"worst {outcome.deviations[0].sequence} (" in outcome.report_lines()[-1]
    failed = {one.sequence for one in outcome.failures}
    assert (failed == {"odd_J", "odd_all"}) == (fault is faults.read_j_as_leucine)


@pytest.mark.usefixtures("short_panel")
@pytest.mark.parametrize(
    ("fault", "output"),
    [(faults.scale_lm_head, "logits"), (faults.scale_contact_head, "contacts")],
)
def test_fault_of_a_head_fails(tmp_path, fault, output):
    module = make_fair_esm(TINY)
    path = save_fair_esm(module, tmp_path / "tiny.pt")
    save_contact_head(module, tmp_path / "tiny-contact-regression.pt")
    intact = run(path)
    kinds = {one.output.partition("_layer")[0] for one in intact.outputs}
    assert kinds == {
        *("mean", "max", "std", "bos", "residues"),
        *("logits", "contacts", "perplexity", "perplexity_single_pass"),
    }
    assert not intact.has_failed, intact.report_lines()
    with faults.crooked(fault):
        outcome = run(path)
    assert not outcome.failures and outcome.has_failed
    assert output in {one.output for one in outcome.output_failures}
    assert "failed: the outputs " in outcome.verdict()


def run_crooked(words: list[str]) -> None:
    with faults.crooked(faults.scale_rotary):
        run_command(words)


def test_failed_check_ends_with_1_and_a_hint(model):
    words = (model, "--device", "cpu", "--precision", "fp32")
    answer = run_check(*words, run=run_crooked)
    assert answer.returncode == 1, answer.stderr
    assert "failed: " in answer.stdout and "worst " in answer.stdout
    assert "the vectors differ from the reference" in answer.stderr
    assert "hint:  try `--precision fp32` and `--device cpu`" in answer.stderr


# Checks that cannot run


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (faults.have_no_kernel, "virnucpro in fp32 does not run on cpu: no kernel image"),
        (faults.have_no_room, "virnucpro in fp32 does not fit into the memory of cpu"),
    ],
    ids=["kernel", "room"],
)
def test_missing_program_is_named_with_a_remedy(model, fault, words):
    with faults.crooked(fault), pytest.raises(UnavailableError, match=words) as caught:
        run(model)
    assert "--device cpu" in caught.value.hint


def test_overflow_of_the_precision_is_reported(tmp_path):
    """A CPU refuses fp16. The same code reports it on a GPU, with that rounding."""
    fair_esm = make_fair_esm(TINY)
    fair_esm.layers[0].fc1.weight.mul_(1e6)
    model = save_fair_esm(fair_esm, tmp_path / "large.pt")
    cpu = DeviceChoice(("cpu",), ("CPU",), has_bf16=True, memory=1 << 30)
    with pytest.raises(UnavailableError, match="the model large cannot run in fp16"):
        check_on(cpu, inspect_esm2(model), "fp16", lambda _: None)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        ("nonsense", 69, "there is no model named nonsense"),
        ("", 64, "NAME|PATH is missing"),
        ("virnucpro-tiny --gpus 0 --device cpu", 64, "--gpus does not go with"),
        ("virnucpro-tiny --precision fp16 --device cpu", 69, "fp16 is not possible on CPUs\n"),
    ],
)
def test_impossible_checks_are_reported(arguments, exit_code, words):
    answer = run_check(*arguments.split())
    assert answer.returncode == exit_code and words in answer.stderr
    assert exit_code == 64 or "hint:  " in answer.stderr


def test_model_unknown_to_fair_esm_is_refused(tmp_path):
    facts = _TrainedEncoderInfo(encoding="onehot", architecture="cnn", dim=8)
    save_trained_encoder(
        tmp_path / "encoder.safetensors", facts, {"weight": np.ones(3, np.float32)}
    )
    with pytest.raises(UnavailableError, match="no other program computes") as caught:
        run(tmp_path / "encoder.safetensors")
    assert caught.value.hint


# Progress


def test_progress_is_reported_in_tokens(model):
    events: list[RunEvent] = []
    run(model, "fp32", events)
    stages = {event.stage: event for event in events if isinstance(event, Progress)}
    n_tokens = sum(len(protein) + 2 for protein in make_panel().values())
    told = [event for event in stages.values() if event.unit == "tokens"]
    assert len(told) == 7  # the other totals are of masked proteins, or of a larger panel
    assert all(event.done == event.total > 0 for event in told)
    assert n_tokens in [event.total for event in told]


def test_vectors_are_compared_by_id():
    rng = np.random.default_rng(0)
    residues = {name: rng.random((len(text), 8)) for name, text in make_panel().items()}
    means = {name: rows.mean(axis=0, keepdims=True) for name, rows in residues.items()}
    turned = [dict(reversed(vectors.items())) for vectors in (means, residues)]
    assert all(one.mean == one.row == 0 for one in find_deviations(*turned, residues))
