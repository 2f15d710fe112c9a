"""From options to a run: what is sized, converted and kept before any work begins."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from conftest import TINY
from oracle import make_fair_esm, save_fair_esm
from runs import assert_same_vectors, vectors

from virnucpro import request
from virnucpro.engine.executor import InlineExecutor
from virnucpro.engine.processes import ProcessExecutor
from virnucpro.pipeline import run
from virnucpro.request import Options, resolve


@pytest.fixture
def options(tmp_path, contigs):
    """An extraction with a fair-esm checkpoint; keywords change it."""
    model = save_fair_esm(make_fair_esm(TINY), tmp_path / "model.pt")

    def make(name: str = "run", **changes: object) -> Options:
        given: dict[str, object] = {
            "command": "extract",
            "input": [contigs],
            "output_dir": tmp_path / name,
            "input_type": "auto",
            "chunk_size": None,
            "min_length": 0,
            "model": str(model),
            "gpus": None,
            "device": "cpu",
            "workers": 2,
            "esm_batch_size": "auto",
            "precision": "auto",
            "worker_timeout": 60.0,
            "resume": False,
            "force": False,
            "keep_intermediate": False,
            "argv": (),
            "cuda_visible_devices": None,
            "converted": tmp_path / "kept",
            **changes,
        }
        return Options(**given)

    return make


@pytest.fixture
def kept(monkeypatch, tmp_path) -> Path:
    """Every model is large enough to be converted, and this is where it is kept."""
    monkeypatch.setattr(request, "WORTH_CONVERTING", 0)
    return tmp_path / "kept"


def test_a_batch_size_of_auto_is_what_stands_without_one_and_a_number_is_taken(options):
    sized, _ = resolve(options(), lambda _: None)
    given, _ = resolve(options(esm_batch_size="9999"), lambda _: None)
    assert sized.resources.tokens_per_batch == 2048
    assert given.resources.tokens_per_batch == 9999


def test_a_small_model_is_not_converted(options):
    config, _ = resolve(options(), lambda _: None)
    assert config.weights == config.checkpoint


def test_a_large_model_is_converted_once_and_gives_the_same_vectors(options, kept, monkeypatch):
    first, _ = resolve(options("first"), lambda _: None)
    (made,) = kept.glob("*.safetensors")
    before = made.stat().st_mtime_ns
    second, _ = resolve(options("second"), lambda _: None)
    assert first.weights == second.weights == made.resolve() != first.checkpoint
    assert made.stat().st_mtime_ns == before
    run(second, None, ProcessExecutor(second.resources.devices), lambda _: None)

    monkeypatch.setattr(request, "WORTH_CONVERTING", 1 << 40)
    plain, _ = resolve(options("plain"), lambda _: None)
    assert plain.weights == plain.checkpoint
    run(plain, None, InlineExecutor(), lambda _: None)
    assert_same_vectors(vectors(second.output), vectors(plain.output))


def test_the_converted_model_has_the_recipe_of_its_source(options, kept, monkeypatch):
    converted, _ = resolve(options(), lambda _: None)
    monkeypatch.setattr(request, "WORTH_CONVERTING", 1 << 40)
    direct, _ = resolve(options(), lambda _: None)
    assert converted.recipe.fingerprint == direct.recipe.fingerprint


def test_where_nothing_can_be_kept_the_run_goes_on_with_the_model_itself(options, kept, caplog):
    kept.write_text("a file where the folder would be")
    with caplog.at_level(logging.WARNING):
        config, _ = resolve(options(), lambda _: None)
    assert config.weights == config.checkpoint
    assert "cannot be kept" in caplog.text
