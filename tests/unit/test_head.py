"""Classifier heads: scores can be recomputed by hand, and no head file runs code."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from head_helpers import ENCODER, FACTS
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from virnucpro.core.errors import UnavailableError
from virnucpro.sequences.kmers import N_FEATURES, frame_composition
from virnucpro.viral.classifier import RecordClassifier
from virnucpro.viral.head import EncoderInfo, Head, HeadInfo, Layer, Network

DIGESTS = ("trained_records", "trained_groups", "encoder_records", "encoder_groups")


def make_head(*widths: int, facts: HeadInfo = FACTS) -> Head:
    """Make a head with hidden layers of these widths, and with clearly different logits."""
    rng = np.random.default_rng(len(widths))
    protein = Network(make_layers(rng, facts.dim, *widths, 2), temperature=1.25)
    nucleotide = make_layers(rng, facts.dim + N_FEATURES, *widths, 2)
    digests = np.sort(rng.integers(0, 2**64 - 1, 9, dtype=np.uint64))
    parts = (digests, digests[::2], digests[1::2], digests[5:])
    return Head(facts, protein, Network(nucleotide, 0.8), *parts)


def make_layers(rng: np.random.Generator, *sizes: int) -> tuple[Layer, ...]:
    return tuple(
        (
            rng.standard_normal((n_out, n_in)).astype(np.float32),
            rng.standard_normal(n_out).astype(np.float32),
        )
        for n_in, n_out in pairwise(sizes)
    )


def some_vectors(n: int = 50) -> np.ndarray:
    return np.random.default_rng(9).standard_normal((n, FACTS.dim)).astype(np.float32)


def some_frames(n: int = 50) -> list[str]:
    rng = np.random.default_rng(3)
    return ["".join(rng.choice(list("ACGT"), 3 * (10 + i))) for i in range(n)]


def by_hand(network: Network, vector: np.ndarray) -> float:
    """Return the softmax of the logits, one multiplication at a time, in float64."""
    values = [float(value) for value in vector]
    for i, (weight, bias) in enumerate(network.layers):
        if i:
            values = [max(0.0, value) for value in values]
        values = [
            sum(float(w) * x for w, x in zip(row, values, strict=True)) + float(b)
            for row, b in zip(weight, bias, strict=True)
        ]
    others, virus = np.exp((np.array(values) - max(values)) / network.temperature)
    return float(virus / (others + virus))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "head.safetensors"
    make_head(4).save(path)
    return path


def metadata(**changes: object) -> dict[str, str]:
    """Return the metadata of ``make_head(4)``, with these changes."""
    encoder = asdict(ENCODER)
    facts = asdict(FACTS)
    temperatures = {"protein": 1.25, "nucleotide": 0.8}
    for name, value in changes.items():
        next((part for part in (encoder, facts) if name in part), temperatures)[name] = value
    facts["encoders"] = changes.get("encoders", [encoder])
    stored = {**facts, "temperatures": temperatures}
    return {"virnucpro_head": json.dumps(stored)}


def refusal_of(path: Path, why: str) -> UnavailableError:
    with pytest.raises(UnavailableError, match=re.escape(why)) as caught:
        Head.load(path)
    assert path.name in str(caught.value)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("widths", [(), (4,), (5, 3)])
def test_head_is_read_as_saved(tmp_path: Path, widths: tuple[int, ...]) -> None:
    head = make_head(*widths)
    path = tmp_path / "head.safetensors"
    other = tmp_path / "other"
    head.save(path)
    head.save(other)
    assert path.read_bytes() == other.read_bytes()
    found = Head.load(path)
    assert found.facts == head.facts
    for network, saved in ((found.protein, head.protein), (found.nucleotide, head.nucleotide)):
        assert network.temperature == saved.temperature
        for layer, saved_layer in zip(network.layers, saved.layers, strict=True):
            assert all(map(np.array_equal, layer, saved_layer))
    for name in DIGESTS:
        assert np.array_equal(getattr(found, name), getattr(head, name))
    given = some_vectors(), some_frames()
    assert np.array_equal(found.classify(given[0]), head.classify(given[0]))
    assert np.array_equal(found.classify_frames(*given), head.classify_frames(*given))


def test_head_may_have_only_the_protein_network(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    Head(FACTS, make_head(4).protein).save(path)
    found = Head.load(path)
    vectors = some_vectors()
    assert found.nucleotide is None
    assert not len(found.trained_records) and not len(found.trained_groups)
    assert np.array_equal(found.classify_frames(vectors, some_frames()), found.classify(vectors))


def test_saved_head_has_usual_permissions(tmp_path: Path) -> None:
    make_head(4).save(tmp_path / "head.safetensors")
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_head_id_is_the_hash_of_its_file(stored: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    shutil.copy(stored, other)
    assert len(Head.load(stored).sha256) == 64
    assert Head.load(stored).sha256 == Head.load(other).sha256
    make_head(4, facts=replace(FACTS, threshold=0.5)).save(other)
    assert Head.load(stored).sha256 != Head.load(other).sha256


@pytest.mark.parametrize("widths", [(), (4,), (5, 3)])
def test_scores_equal_the_formula_in_float64(widths: tuple[int, ...]) -> None:
    head = make_head(*widths)
    vectors = some_vectors()
    # half a unit of the last of 6 decimals, and the rounding error of a dozen float64 sums
    expected = [by_hand(head.protein, vector) for vector in vectors]
    np.testing.assert_allclose(head.classify(vectors), expected, rtol=0, atol=0.5e-6 + 1e-12)
    frames = some_frames()
    inputs = np.hstack([vectors, frame_composition(frames)])
    expected = [by_hand(head.nucleotide, values) for values in inputs]
    found = head.classify_frames(vectors, frames)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.5e-6 + 1e-12)


def test_scores_do_not_depend_on_other_rows() -> None:
    head = make_head(5, 3)
    vectors = some_vectors()
    assert head.classify(some_vectors(0)).shape == (0,)
    assert head.classify_frames(some_vectors(0), []).shape == (0,)
    scores = head.classify(vectors)
    order = np.random.default_rng(1).permutation(len(vectors))
    assert np.array_equal(head.classify(vectors[order]), scores[order])
    for i, vector in enumerate(vectors):
        assert head.classify(vector[None])[0] == scores[i]
    frames = some_frames()
    scores = head.classify_frames(vectors, frames)
    for i, (vector, frame) in enumerate(zip(vectors, frames, strict=True)):
        assert head.classify_frames(vector[None], [frame])[0] == scores[i]


def test_scores_have_six_decimals() -> None:
    scores = make_head(4).classify(1000 * some_vectors())
    assert ((scores >= 0) & (scores <= 1)).all()
    assert {0.0, 1.0} < {*scores.tolist(), 0.5}
    scores = make_head(4).classify(some_vectors())
    assert [float(f"{score:.6f}") for score in scores] == scores.tolist()


# Refusals


NO_HEADER = "not a VirNucPro head file: Error while deserializing header"


def test_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    refusal_of(path, "No such file or directory")
    for content in (b"", b"no head", b"\x10\0\0\0\0\0\0\0{}", b">a\nACGT\n", b"PK\x03\x04"):
        path.write_bytes(content)
        refusal_of(path, NO_HEADER)


def test_truncated_head_is_refused_wherever_it_ends(stored: Path) -> None:
    content = stored.read_bytes()
    n_header = 8 + int.from_bytes(content[:8], "little")
    for length in (*range(0, n_header, 7), *range(n_header, len(content), 97), len(content) - 1):
        stored.write_bytes(content[:length])
        refusal_of(stored, NO_HEADER)


NEEDED = {*HeadInfo.__slots__, *EncoderInfo.__slots__, "temperatures"} - {"classes", "join"}


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_head_without_a_description_is_refused(stored: Path, name: str) -> None:
    facts = json.loads(metadata()["virnucpro_head"])
    del (facts if name in facts else facts["encoders"][0])[name]
    save_file(load_file(stored), stored, metadata={"virnucpro_head": json.dumps(facts)})
    refusal_of(stored, f"'{name}'")


def test_tensors_without_metadata_are_refused(stored: Path) -> None:
    save_file(load_file(stored), stored)
    refusal_of(stored, "'virnucpro_head'")


NO_NUMBERS = (np.inf, -np.inf, np.nan)
ABSURD = {
    "classes": ("virus,others", "others,phage,virus"),
    "threshold": (1.5, -0.1, True, "high", *NO_NUMBERS),
    "exponent": (1.5, -0.5, True, *NO_NUMBERS),
    "frame_rule": ("median",),
    "encoders": ([],),
    "training": (None,),
    "pooling": ("none", "max"),
    "name": (1,),
}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        *((name, value, "do not describe a") for name in ABSURD for value in ABSURD[name]),
        *(("protein", number, "the temperature is") for number in (0, -1, *NO_NUMBERS)),
        ("nucleotide", "warm", "could not convert string to float: 'warm'"),
        ("dim", 7, "a layer has 6 inputs for 7 values"),
        *(("chunk_size", size, f"{size!r} is not a count") for size in ("", "6", 300.5)),
        *((name, "last", "'last' is not a count") for name in ("dim", "layer")),
        ("join", [], "list indices must be integers"),
        ("join", {}, "'scorer_sha256'"),
    ],
)
def test_senseless_metadata_is_refused(stored: Path, name, value, why: str) -> None:
    save_file(load_file(stored), stored, metadata=metadata(**{name: value}))
    refusal_of(stored, why)


@pytest.mark.parametrize("number", NO_NUMBERS)
@pytest.mark.parametrize("name", ["protein.layers.0.weight", "nucleotide.layers.0.bias"])
def test_weights_that_are_not_finite_are_refused(stored: Path, name: str, number: float) -> None:
    tensors = load_file(stored)
    tensors[name].flat[-1] = number
    save_file(tensors, stored, metadata())
    refusal_of(stored, "a weight is not a finite float32")


def test_infinite_scores_are_refused() -> None:
    rng = np.random.default_rng(2)
    layers = tuple(
        (np.float32(3e37) * weight, bias)
        for weight, bias in make_layers(rng, FACTS.dim, *[8] * 12, 2)
    )
    with pytest.raises(ValueError, match="scores would not be finite"):
        Network(layers)
    with pytest.raises(ValueError, match="scores would not be finite"):
        Network(make_layers(rng, FACTS.dim, 2), temperature=1e-320)


def test_head_needs_a_float32_network_for_vectors() -> None:
    head = make_head(4)
    with pytest.raises(ValueError, match="the head has no network"):
        Head(FACTS, None, head.nucleotide)
    doubles = tuple((weight.astype(float), bias) for weight, bias in head.protein.layers)
    with pytest.raises(ValueError, match="a weight is not a finite float32"):
        Network(doubles)


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ([], "the head has no network"),
        ([(2, 5)], "a layer has 5 inputs for 6 values"),
        ([(3, 6)], "3 outputs for the classes"),
        ([(4, 6), (2, 3)], "a layer has the shape (2, 3), for 4 inputs"),
        ([(2, 6, 1)], "a layer has the shape (2, 6, 1)"),
        ([(6,)], "a layer has the shape (6,)"),
    ],
)
def test_layers_that_do_not_fit_are_refused(tmp_path: Path, shapes: list, why: str) -> None:
    path = tmp_path / "head.safetensors"
    tensors = {}
    for i, shape in enumerate(shapes):
        tensors[f"protein.layers.{i}.weight"] = np.ones(shape, dtype=np.float32)
        tensors[f"protein.layers.{i}.bias"] = np.ones(shape[:1], dtype=np.float32)
    save_file(tensors, path, metadata=metadata())
    refusal_of(path, why)


@pytest.mark.parametrize("network", ["protein", "nucleotide"])
@pytest.mark.parametrize("other", ["layers.2.weight", "layers.2", "weights"])
def test_layer_without_bias_or_weights_is_refused(stored: Path, network: str, other: str) -> None:
    tensors = load_file(stored)
    tensors[f"{network}.{other}"] = tensors.pop(f"{network}.layers.1.bias")
    save_file(tensors, stored, metadata=metadata())
    refusal_of(stored, f"'{network}.layers.1.bias'")


NO_ROW = "digests are not a rising row of uint64"


@pytest.mark.parametrize(
    ("name", "values", "dtype", "why"),
    [
        ("protein.layers.0.bias", [1.0], np.float32, "a layer has the shape (4, 6), for 6 inputs"),
        ("nucleotide.layers.0.weight", [[1.0] * 6] * 4, np.float32, "6 inputs for 6 + 336 values"),
        *((name, [1, 2], np.int64, NO_ROW) for name in DIGESTS),
        *((name, [[1, 2]], np.uint64, NO_ROW) for name in DIGESTS),
        *((name, [2, 1], np.uint64, NO_ROW) for name in DIGESTS),
        *((name, [1, 1], np.uint64, NO_ROW) for name in DIGESTS),
    ],
)
def test_tensors_that_do_not_fit_are_refused(stored: Path, name, values, dtype, why) -> None:
    save_file(load_file(stored) | {name: np.array(values, dtype)}, stored, metadata=metadata())
    refusal_of(stored, why)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_unknown_number_format_is_refused(tmp_path: Path, dtype) -> None:
    path = tmp_path / "head.safetensors"
    tensors = {
        "protein.layers.0.weight": torch.ones(2, FACTS.dim).to(dtype),
        "protein.layers.0.bias": torch.zeros(2).to(dtype),
    }
    save_torch_file(tensors, path, metadata=metadata())
    refusal_of(path, str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(
    ("n_short", "n_shards", "begins"),
    [(5, 1, []), (6, 1, ["calls of records shorter"]), (0, 0, ["no record has a frame to embed"])],
)
def test_short_records_give_a_warning(tiny, n_short, n_shards, begins):
    warnings = RecordClassifier(frame_head=tiny.head).warnings(500, 10, n_short, n_shards)
    for warning, begin in zip(warnings, begins, strict=True):
        assert warning.startswith(begin)
