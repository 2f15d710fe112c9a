"""A large model is converted once. Workers then map the copy, and damage is noticed."""

from __future__ import annotations

import json
import os
import shutil
from itertools import compress
from pathlib import Path

import psutil
import pytest
import torch
from conftest import TINY
from fair_esm_reference import make_fair_esm, random_protein, save_fair_esm
from safetensors.torch import load

from virnucpro.core.errors import UnavailableError
from virnucpro.core.events import Progress, WorkerEvent
from virnucpro.core.recipe import Precision
from virnucpro.models.converted import prepare
from virnucpro.models.esm2.loading import load_esm2
from virnucpro.models.esm2.model_files import ESM2Model, inspect_esm2
from virnucpro.models.packing import PackedBatch
from virnucpro.models.transformer import DTYPES

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture
def checkpoint(tmp_path: Path) -> ESM2Model:
    return inspect_esm2(save_fair_esm(make_fair_esm(TINY), tmp_path / "model.pt"))


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path: Path) -> Path:
    """The folder with converted copies."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return tmp_path / "hub" / "virnucpro"


def prepared(model: ESM2Model, precision: Precision = "bf16") -> tuple[Path, bool]:
    """Return the copy that workers map, and whether it was just made."""
    heard: list[WorkerEvent] = []
    path, digest = prepare(model, precision, heard.append)
    assert digest == model.sha256()
    return path, any(isinstance(one, Progress) and "converting" in one.stage for one in heard)


@pytest.fixture
def converted(checkpoint: ESM2Model) -> Path:
    path, is_new = prepared(checkpoint)
    assert is_new
    return path


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layer", [1, 2])
def test_converted_model_gives_the_same_bits(checkpoint, precision, layer):
    made, _ = prepared(checkpoint, precision)
    batch = PackedBatch.from_sequences([random_protein(length) for length in (90, 50, 50, 7)])
    direct = load_esm2(checkpoint.path, layer, DTYPES[precision], CPU)(batch)
    assert made != checkpoint.path
    assert torch.equal(load_esm2(made, layer, DTYPES[precision], CPU)(batch), direct)


def test_changed_source_is_another_model(checkpoint, converted):
    in_float32 = prepared(checkpoint, "fp32")
    save_fair_esm(make_fair_esm(TINY, seed=1), checkpoint.path)
    changed = prepared(inspect_esm2(checkpoint.path))
    assert in_float32[1] and changed[1]
    assert len({converted, in_float32[0], changed[0]}) == 3


def test_damaged_copy_is_noticed(checkpoint, converted, kept):
    content = converted.read_bytes()
    for damaged in (content[:-100], content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]):
        converted.write_bytes(damaged)
        assert prepared(checkpoint) == (converted, True)
        assert prepared(checkpoint) == (converted, False)
    copy_facts = converted.with_suffix(".json")
    for note in kept.glob("*.json"):
        keys = json.loads(note.read_text()).keys()
        texts = ("", "[]", json.dumps({"format": 1}), json.dumps({"source_sha256": "../../x"}))
        for text in (*texts, "[" * 100_000):
            note.write_text(text)
            assert prepared(checkpoint) == (converted, note == copy_facts)
            assert json.loads(note.read_text()).keys() == keys
        note.unlink()
        assert prepared(checkpoint) == (converted, note == copy_facts)
    assert prepared(checkpoint) == (converted, False)


def test_copy_of_another_model_is_not_used(checkpoint, converted, tmp_path):
    content = load(converted.read_bytes())
    other = inspect_esm2(save_fair_esm(make_fair_esm(TINY, seed=1), tmp_path / "other.pt"))
    stranger, _ = prepared(other)
    converted.write_bytes(stranger.read_bytes())
    converted.with_suffix(".json").write_text(stranger.with_suffix(".json").read_text())
    assert prepared(checkpoint) == (converted, True)
    again = load(converted.read_bytes())
    assert all(torch.equal(tensor, again[name]) for name, tensor in content.items())
    assert prepared(other) == (stranger, False)


def test_checkpoint_copies_share_a_conversion(checkpoint, converted, tmp_path, kept):
    copy = tmp_path / "scratch.pt"
    copy.write_bytes(checkpoint.path.read_bytes())
    assert prepared(inspect_esm2(copy)) == (converted, False)
    assert len(list(kept.glob("*.safetensors"))) == 1


def test_converted_copy_is_readable_by_others(converted, tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    assert converted.stat().st_mode == plain.stat().st_mode


def test_leftovers_are_deleted_after_a_day(checkpoint, converted, kept):
    old = kept / ".tmpABC"
    new = kept / ".tmpDEF"
    for leftover in (old, new):
        leftover.touch()
    os.utime(old, (0, 0))
    prepared(checkpoint, "fp32")
    assert not old.exists() and new.exists()


def test_model_folder_may_have_any_name(tiny, tmp_path):
    folder = tmp_path / "my.virnucpro.safetensors"
    shutil.copytree(tiny.model, folder)
    batch = PackedBatch.from_sequences([random_protein(50)])
    expected = load_esm2(tiny.model, 1, BF16, CPU)(batch)
    assert torch.equal(load_esm2(folder, 1, BF16, CPU)(batch), expected)


def test_foreign_file_by_that_name_is_refused(converted, tmp_path):
    with pytest.raises(UnavailableError, match=r"it contains torch\.bfloat16"):
        load_esm2(converted, 1, torch.float32, CPU)
    other = tmp_path / "other.virnucpro.safetensors"
    other.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(UnavailableError, match="cannot be used"):
        load_esm2(other, 1, BF16, CPU)


def test_weights_are_mapped_and_not_copied(converted):
    """Otherwise every worker would have its own copy."""
    weight = load_esm2(converted, 2, BF16, CPU).layers[0].qkv.weight
    maps = psutil.Process().memory_maps(grouped=False)
    bounds = [[int(bound, 16) for bound in one.addr.split("-")] for one in maps]
    is_in_file = [low <= weight.data_ptr() < high for low, high in bounds]
    (path,) = (one.path for one in compress(maps, is_in_file))
    assert path == str(converted)
