"""Exported models give the scores of the trained network, and know their training data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Tiny, random_dna
from labelled_data_helpers import head_facts
from numpy.typing import NDArray

from virnucpro.core.numeric import DECIMALS, sigmoid
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.sequences.kmers import N_FEATURES, Sketch, frame_composition
from virnucpro.training.evaluation.calibration import Calibration
from virnucpro.training.export import find_trained, write_head
from virnucpro.training.frame_dataset import LabelledFrames
from virnucpro.training.labelled_data import LabelledRecord, group_digest, record_digest
from virnucpro.training.networks import Classifier
from virnucpro.viral.head import EncoderInfo, Head, Network

DIM = 32
HIDDEN = 16
N = 40
CALIBRATION = Calibration("mean", 0.75, 1.5, 0.3, 0.25)


KMERS = Sketch(np.array([7, 2**20, 2**32 - 2], dtype=np.uint32))


@pytest.fixture
def frames() -> list[str]:
    rng = np.random.default_rng(1)
    return [random_dna(3 * int(rng.integers(20, 100)), rng) for _ in range(N)]


@pytest.fixture
def vectors() -> NDArray[np.float32]:
    return np.random.default_rng(2).standard_normal((N, DIM)).astype(np.float32)


@pytest.fixture
def classifier(frames: list[str]) -> Classifier:
    """A classifier standardised on half of the frames, in training mode."""
    torch.manual_seed(3)
    found = Classifier(DIM, HIDDEN, dropout=0.5)
    found.standardise(
        LabelledFrames.from_store(["M"] * (N // 2), frame_composition(frames[: N // 2]))
    )
    return found


@pytest.fixture
def head(classifier: Classifier, tiny: Tiny, tmp_path: Path) -> Head:
    known = find_trained(
        records(("ACGT", "b"), ("GGG", "a"), ("acgt", "b")), KMERS, None, is_finetuned=False
    )
    return written(tmp_path / "head.safetensors", classifier, tiny, known)


def written(path: Path, classifier: Classifier, tiny: Tiny, known: dict[str, object]) -> Head:
    facts = head_facts(CALIBRATION, EncoderInfo.from_spec(inspect_esm2(tiny.model)), 300)
    write_head(path, classifier, facts, CALIBRATION, known)
    return Head.load(path)


def records(*trained: tuple[str, str]) -> list[LabelledRecord]:
    """Make viral records with these bases and groups."""
    return [
        LabelledRecord(bases, True, group, digest=record_digest(bases)) for bases, group in trained
    ]


def limit(network: Network, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far scores may differ if the weights of two layers are rounded to float32. (n,)

    A rounding is at most half of eps. Its effect on the logits is bounded by the largest weights on
    the way, and a score differs by at most a quarter of its logit. The decimals of a score come on
    top.
    """
    half = np.finfo(np.float32).eps / 2
    (w1, b1), (w2, b2) = ([np.abs(v.astype(np.float64)) for v in layer] for layer in network.layers)
    hidden = np.abs(inputs) @ w1.T + b1
    logits = 2 * half * hidden @ w2.T + half * b2
    return logits.sum(axis=1) / network.temperature / 4 + 0.5 * 10.0**-DECIMALS + 1e-12


def scores_of(
    classifier: Classifier, vectors: NDArray[np.float32], frames: list[str]
) -> NDArray[np.float64]:
    """Return scores of both networks, by torch in float64, with log-odds over temperatures.

    (2, n)
    """
    exact = classifier.double().eval()
    composition = torch.from_numpy(frame_composition(frames)).double()
    with torch.inference_mode():
        odds = exact(torch.from_numpy(vectors).double(), composition).numpy()
    temperatures = [[CALIBRATION.protein_temperature], [CALIBRATION.temperature]]
    return sigmoid(odds / temperatures)


def test_head_scores_with_its_temperature(head, classifier, vectors, frames):
    assert head.nucleotide is not None
    protein, nucleotide = scores_of(classifier, vectors, frames)
    assert nucleotide.std() > 0.01, "scores that are all the same prove nothing"
    composition = frame_composition(frames).astype(np.float64)
    beside = np.hstack([vectors.astype(np.float64), composition])
    off = np.abs(head.classify_frames(vectors, frames) - nucleotide)
    assert (off <= limit(head.nucleotide, beside)).all()
    off = np.abs(head.classify(vectors) - protein)
    assert (off <= limit(head.protein, vectors.astype(np.float64))).all()
    assert limit(head.nucleotide, beside).max() < 1e-4, "the limit tells"


def test_head_lists_training_records_and_groups(head):
    assert set(head.trained_records.tolist()) == {record_digest("ACGT"), record_digest("GGG")}
    assert len(head.trained_records) == 2
    assert sorted(head.trained_groups.tolist()) == sorted(map(group_digest, "ab"))
    assert not len(head.encoder_records) and not len(head.encoder_groups)


def test_training_data_of_an_encoder_is_passed_on(head):
    more = Sketch(KMERS.hashes + 1)
    kept, finetuned = (
        find_trained(records(("CCC", "c")), more, head, is_finetuned)
        for is_finetuned in (False, True)
    )
    own = {
        "records": {record_digest("CCC")},
        "groups": {group_digest("c")},
        "kmers": set(more.hashes),
    }
    encoder_info = {
        "records": set(map(record_digest, ("ACGT", "GGG"))),
        "groups": set(map(group_digest, "ab")),
        "kmers": set(KMERS.hashes),
    }
    for one in (kept, finetuned):
        one |= {name: one[name].hashes for name in ("trained_kmers", "encoder_kmers")}
    for name in own:
        assert set(kept[f"trained_{name}"]) == set(finetuned[f"trained_{name}"]) == own[name]
        assert set(kept[f"encoder_{name}"]) == encoder_info[name]
        assert set(finetuned[f"encoder_{name}"]) == encoder_info[name] | own[name]


def test_word_unseen_in_training_has_finite_weights(tiny, tmp_path):
    torch.manual_seed(4)
    classifier = Classifier(DIM, HIDDEN, dropout=0.0)
    classifier.standardise(
        LabelledFrames.from_store(["M"] * 5, np.zeros((5, N_FEATURES), dtype=np.float32))
    )
    nothing = find_trained(records(), KMERS, None, is_finetuned=False)
    head = written(tmp_path / "head.safetensors", classifier, tiny, nothing)
    assert head.nucleotide is not None
    assert all(np.isfinite(values).all() for layer in head.nucleotide.layers for values in layer)
