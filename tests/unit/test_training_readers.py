"""Networks that read the residues of a frame. Their result does not depend on other frames."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fair_esm_reference import AMINO_ACIDS, random_protein
from training_helpers import SHAPE, frames

from virnucpro.models.esm2.model import ESM2
from virnucpro.models.frame_networks import FrameNetwork
from virnucpro.models.packing import PackedBatch, use_device
from virnucpro.training.distributed import Ranks
from virnucpro.training.frame_dataset import LabelledFrames, given_weights
from virnucpro.training.networks import Classifier, FrameClassifier, FrameLabels, frame_batch

ARCHITECTURES = ("mlp", "cnn", "lstm", "unet")
ENCODINGS = ("onehot", "blosum62", "esm2")
PROTEINS = [random_protein(length, length) for length in (166, 60, 60, 33, 5, 4, 3, 2, 1)]

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
encodings = pytest.mark.parametrize("encoding", ENCODINGS)


def make_reader(encoding: str, architecture: str) -> FrameNetwork:
    torch.manual_seed(0)
    esm2 = ESM2.create(SHAPE) if encoding == "esm2" else None
    return FrameNetwork.create(encoding, architecture, esm2).eval()


def classifier_of(reader: FrameNetwork) -> FrameClassifier:
    return FrameClassifier(reader, Classifier(reader.width, 16, 0.0))


@encodings
@architectures
@torch.no_grad()
def test_frame_vector_ignores_neighbours(encoding, architecture):
    reader = make_reader(encoding, architecture)
    for parameter in reader.parameters():  # biases and norms that are not 0 and 1
        parameter += 0.1 * torch.randn(parameter.shape)
    together = reader(PackedBatch.from_sequences(PROTEINS))
    assert together.shape == (len(PROTEINS), reader.width)
    for protein, vector in zip(PROTEINS, together, strict=True):
        (alone,) = reader(PackedBatch.from_sequences([protein]))
        # sums of at most 9 x 128 terms, in another order, through at most eight layers: n / 2
        # roundings of 2^-24 for each (see oracle.tolerance), which add up as squares
        limit = 2 * 0.42 * 2**-24 * np.sqrt(8 * 9 * 128 / 2)
        assert float((alone - vector).norm() / vector.norm()) < limit


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("encoding", ["onehot", "blosum62"])
@architectures
@torch.no_grad()
def test_gpu_reads_in_float32_like_a_cpu(encoding, architecture):
    reader = make_reader(encoding, architecture)
    batch = PackedBatch.from_sequences(PROTEINS)
    expected = reader(batch)
    use_device(torch.device("cuda:0"))
    found = reader.to("cuda:0")(batch).cpu()
    # 128 roundings of float32, and a sixty-fourth of one of TF32
    assert float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 2**-17


@encodings
@architectures
@torch.no_grad()
def test_vector_distinguishes_residues(encoding, architecture):
    reader = make_reader(encoding, architecture)
    one, other = reader(PackedBatch.from_sequences(["MKVLAAGH", "MKVLAAGW"]))
    assert float((one - other).norm() / one.norm()) > 1e-3


@pytest.mark.parametrize("architecture", ["cnn", "lstm", "unet"])
@torch.no_grad()
def test_all_but_the_mean_depend_on_order(architecture):
    def apart(name: str) -> float:
        one, other = make_reader("onehot", name)(
            PackedBatch.from_sequences(["MKVLAAGH", "HGAALVKM"])
        )
        return float((one - other).norm() / one.norm())

    assert apart(architecture) > 1e-3
    # a mean of eight terms, in another order
    assert apart("mlp") < 8 * 2**-24


@encodings
@architectures
def test_every_weight_is_learned(encoding, architecture):
    module = classifier_of(make_reader(encoding, architecture))
    again = make_reader(encoding, architecture).state_dict()
    for name, weight in module.reader.state_dict().items():
        assert torch.equal(weight, again[name]), name
    learned = frames()
    module(frame_batch(learned, np.arange(20), learned.weight)).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


@architectures
def test_frozen_encoder_keeps_no_graph(architecture):
    reader = make_reader("esm2", architecture)
    reader.encoder.requires_grad_(False)
    assert not reader.encoder(PackedBatch.from_sequences(PROTEINS)).requires_grad
    module = classifier_of(reader)
    learned = frames()
    module(frame_batch(learned, np.arange(20), learned.weight)).backward()
    assert all(parameter.grad is None for parameter in reader.encoder.parameters())
    assert all(parameter.grad.any() for parameter in module.classifier.parameters())


def test_composition_sees_no_residue():
    module = classifier_of(FrameNetwork(None, 0))
    learned = frames()
    batch = frame_batch(learned, np.arange(20), learned.weight)
    logits = module.logits(batch)
    assert logits.shape == (1, 20)
    proteins = learned.proteins(np.arange(len(learned)))
    other = LabelledFrames.from_store(
        ["M" * len(one) for one in proteins], learned.all_compositions
    )
    same = frame_batch(other, batch.rows, learned.weight)
    assert np.array_equal(same.rows, batch.rows)
    assert torch.equal(module.logits(same), logits)
    figures = FrameLabels(learned, learned, given_weights).validate(
        module.eval().requires_grad_(False), Ranks(0, 1, torch.device("cpu"))
    )
    assert set(figures) == {"validation_loss", "auroc", "auprc", "accuracy", "f1"}


def test_one_hot_has_a_channel_per_residue():
    rows = make_reader("onehot", "mlp").encoder(PackedBatch.from_sequences([AMINO_ACIDS + "XBU*"]))[
        1:-1
    ]
    assert torch.equal(rows.sum(dim=1), torch.ones(24))
    assert torch.equal(rows[:20].argmax(dim=1), torch.arange(20))
    assert rows[20:].argmax(dim=1).tolist() == [20] * 4


def test_blosum62_rows_are_its_scores_by_one_scale():
    rows = make_reader("blosum62", "mlp").encoder(PackedBatch.from_sequences([AMINO_ACIDS + "XJ"]))[
        1:-1
    ]
    square = rows[:20]
    assert torch.equal(square, square.T)
    assert float(square.square().mean()) == pytest.approx(1, rel=1e-6)
    place = AMINO_ACIDS.index
    w, c, i, v = (place(letter) for letter in "WCIV")
    # W with W 11, C with C 9, I with V 3 (Henikoff and Henikoff 1992)
    assert float(square[w, w] / square[c, c]) == pytest.approx(11 / 9, rel=1e-6)
    assert float(square[i, v] / square[c, c]) == pytest.approx(3 / 9, rel=1e-6)
    assert torch.equal(rows[20], rows[21])


@pytest.mark.parametrize("architecture", ["cnn", "lstm", "unet"])
def test_baseline_is_small(architecture):
    n_parameters = sum(p.numel() for p in make_reader("onehot", architecture).parameters())
    assert 1e5 < n_parameters < 1e6
