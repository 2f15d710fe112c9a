"""The network on codons: what it computes, its file, and its calls together with the scorer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from unittest.mock import ANY

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import random_dna
from hypothesis import given, settings
from hypothesis import strategies as st
from run_helpers import CONTIGS, invoke, rows, tables, write_fasta
from safetensors.torch import load_file, save_file

from virnucpro.core.errors import UnavailableError
from virnucpro.core.recipe import Precision
from virnucpro.core.types import reverse_complement
from virnucpro.models.base import Encoder, Rows, load_encoder
from virnucpro.models.codon_cnn import CodonNetwork, load_network, save_network
from virnucpro.models.lookup import open_model
from virnucpro.models.registry import NETWORK
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.translate import Chunk
from virnucpro.viral.head import Head, combine_log_odds, log_odds, probability
from virnucpro.viral.networks import Scorer
from virnucpro.viral.scoring import score_sequences

U = torch.finfo(torch.float32).eps / 2
SIZES = {
    "of_codon": 6,
    "channels": 8,
    "dilations": [1, 4],
    "hidden": 10,
    "n_viral": 2,
    "n_kinds": 5,
}


@pytest.fixture(scope="module")
def network() -> CodonNetwork:
    torch.manual_seed(1)
    network = CodonNetwork(**SIZES)
    for parameter in network.parameters():
        parameter.data.normal_(std=0.4)
    return network.eval().requires_grad_(False)


def by_convolutions(network: CodonNetwork, bases: str) -> torch.Tensor:
    """The vector of one chunk by PyTorch's own convolutions, in float64."""
    network, pooled = network.double(), []
    for strand in (bases, reverse_complement(bases)):
        digits = ["ACGT".find(base) for base in strand]
        codons = [
            64 if min(codon) < 0 else 16 * codon[0] + 4 * codon[1] + codon[2]
            for codon in zip(digits[:-2], digits[1:-1], digits[2:], strict=True)
        ]
        n = len(bases) // 3 - 1
        tokens = torch.tensor(codons[: 3 * n]).reshape(n, 3)
        x = convolve(network.codons(tokens).flatten(1).T[None], network.stem, 1)
        for block in network.blocks:
            inner = scaled(block.before, x)
            inner = F.gelu(convolve(inner, block.conv, block.dilation), approximate="tanh")
            x = x + convolve(inner, block.mix, 1)
        x = scaled(network.norm, x)[0].T
        shares = network.query(x).softmax(0)
        parts = [(x * share[:, None]).sum(0) for share in shares.T]
        pooled.append(torch.cat([*parts, x.mean(0), x.amax(0)]))
    both = torch.cat([pooled[0] + pooled[1], (pooled[0] - pooled[1]).abs()])
    inner = F.gelu(network.inner(both))
    kinds = network.kinds(inner).exp()
    odds = kinds[: network.n_viral].sum() / kinds[network.n_viral :].sum()
    return torch.cat([inner, odds.log()[None]])


def convolve(x: torch.Tensor, linear: torch.nn.Linear, dilation: int) -> torch.Tensor:
    n_channels = x.shape[1]
    kernel = linear.weight.reshape(len(linear.weight), -1, n_channels).transpose(1, 2)
    reach = dilation * (kernel.shape[2] // 2)
    return F.conv1d(x, kernel, linear.bias, padding=reach, dilation=dilation)


def scaled(scaling: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    shape = (1, -1, 1)
    inner = x * scaling.scale.reshape(shape) + scaling.shift.reshape(shape)
    return F.gelu(inner, approximate="tanh")


@settings(max_examples=25)
@given(st.lists(st.text("ACGTN", min_size=6, max_size=80), min_size=1, max_size=5))
def test_vector_equals_pytorch_in_any_batch(network, chunks):
    expected = torch.stack([by_convolutions(network, chunk) for chunk in chunks])
    found = network.float()(chunks)
    # some 20 sums of up to 120 products, none of which exceeds the largest number by far
    slack = 200 * U * expected.abs().max().clamp(min=1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=slack)


def test_strand_case_and_the_letter_u_make_no_difference(network):
    bases = random_dna(61, np.random.default_rng(1))
    expected, *others = network(
        [bases, reverse_complement(bases), bases.lower(), bases.replace("T", "U")]
    )
    for other in others:
        torch.testing.assert_close(other, expected, rtol=0, atol=1e-5)
    assert (network(["A" + bases[1:].replace("A", "C")])[0] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("bases", ["A", "ACGTA", "NNNNNNNN", "RYKM" * 5])
def test_chunk_without_tokens_has_finite_vector(network, bases):
    assert network([bases]).isfinite().all()


def test_file_restores_the_network(network, tmp_path):
    path = tmp_path / "model.safetensors"
    save_network(network.float(), path)
    first = path.read_bytes()
    back = load_network(path)
    save_network(back, path)
    assert path.read_bytes() == first
    assert back.sizes == SIZES
    chunk = random_dna(90, np.random.default_rng(2))
    torch.testing.assert_close(back([chunk]), network([chunk]), rtol=1e-2, atol=1e-2)


OTHER_WEIGHTS = {
    "NaN": lambda tensors: {"stem.bias": tensors["stem.bias"] * torch.nan},
    "missing": lambda _: {"norm.scale": None},
    "more": lambda _: {"more": torch.zeros(1)},
    "shape": lambda _: {"kinds.bias": torch.zeros(7)},
    "type": lambda tensors: {"norm.scale": tensors["norm.scale"].long()},
}
OTHER_SIZES = [{"n_viral": 9}, {"channels": -1}, {"channels": "8"}, {"dilations": [0, 4]}]
OTHER_SIZES += [{"dilations": [1, 1 << 40]}, {"dilations": [1] * 300_000}]


@pytest.mark.parametrize(
    ("spoil", "sizes"),
    [
        *((spoil, SIZES) for spoil in OTHER_WEIGHTS.values()),
        *((lambda _: {}, sizes) for sizes in ([], *(SIZES | other for other in OTHER_SIZES))),
    ],
    ids=[*OTHER_WEIGHTS, "no sizes", *map(str, range(len(OTHER_SIZES)))],
)
def test_foreign_weights_are_refused(network, tmp_path, spoil, sizes):
    path = tmp_path / "model.safetensors"
    save_network(network.float(), path)
    tensors = load_file(path)
    tensors = {k: v for k, v in (tensors | spoil(tensors)).items() if v is not None}
    save_file(tensors, path, metadata={"virnucpro_codons": json.dumps(sizes)})
    with pytest.raises(UnavailableError, match="not a network on codons"):
        open_model(str(path), lambda _: None)


# The network that comes with the package

FEW = 4  # records of the example


@pytest.fixture(scope="module")
def contigs(tmp_path_factory) -> Path:
    """Some records of the example, one again under another name, and two that nobody can call."""
    records = {record.id: record.sequence for record in list(read_fasta(CONTIGS))[:FEW]}
    more = {"again": next(iter(records.values())), "unknown": "N" * 900, "short": "ACGT" * 37}
    return write_fasta(tmp_path_factory.mktemp("contigs") / "contigs.fa", records | more)


@pytest.fixture(scope="module")
def called(contigs, tmp_path_factory) -> Path:
    """The folder of a run that reads all records with the network."""
    return predict(contigs, tmp_path_factory.mktemp("runs") / "called", "--embed", "all")


def predict(contigs: Path, folder: Path, *more: str) -> Path:
    words = ["predict", "-q", "-i", contigs, "-o", folder, "--model", NETWORK]
    words += ["--device", "cpu", "--workers", "1", "--precision", "fp32", "--no-report", *more]
    assert invoke(*words) == (0, ANY)
    return folder


def load_shipped(precision: Precision, device: str = "cpu") -> Encoder:
    model = open_model(NETWORK, lambda _: None)
    spec = model.spec(sha256="", precision=precision)
    return load_encoder(spec, model.path, torch.device(device))


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_shipped("fp32")


@pytest.fixture(scope="module")
def chunks() -> list[str]:
    return [chunk.sequence for chunk in Chunk.from_record(next(iter(read_fasta(CONTIGS))), 1000)]


def worst(found: Rows, expected: Rows) -> float:
    """The largest distance of a vector, relative to its length."""
    distances = np.linalg.norm(found - expected, axis=1)
    return float((distances / np.linalg.norm(expected, axis=1)).max())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_vector_has_the_same_bits_alone_and_in_a_batch(chunks, precision):
    encoder = load_shipped(precision)
    together = encoder.start([*chunks, chunks[0][:333]]).rows()
    for chunk, row in zip(chunks, together, strict=False):
        assert encoder.start([chunk]).rows()[0].tolist() == row.tolist()


def test_worker_refuses_replaced_weights(encoder, network, tmp_path):
    shipped, path = open_model(NETWORK, lambda _: None), tmp_path / "model.safetensors"
    of_the_run = replace(encoder.spec, sha256=shipped.encoder_id)
    path.write_bytes(shipped.path.read_bytes())
    load_encoder(of_the_run, path, torch.device("cpu"))
    save_network(network.float(), path)
    with pytest.raises(UnavailableError, match="was replaced since the run began"):
        load_encoder(of_the_run, path, torch.device("cpu"))


def test_bf16_moves_a_vector_by_some_roundings(chunks, encoder):
    """A number keeps 8 bits; each block adds what it computes to a stream of float32."""
    distance = worst(load_shipped("bf16").start(chunks).rows(), encoder.start(chunks).rows())
    assert 0 < distance < 4 * 2**-8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("bf16", 4 * 2**-8)])
def test_a_gpu_gives_the_vectors_of_a_cpu(chunks, precision, limit):
    here, there = (load_shipped(precision, kind).start(chunks).rows() for kind in ("cpu", "cuda"))
    assert worst(there, here) < limit


def test_record_uses_weighted_log_odds(contigs, called, encoder):
    head, scorer = Head.load(open_model(NETWORK, lambda _: None).head), Scorer.load_builtin()
    found = {row["record"]: row for row in rows(called / "predictions.tsv")}
    records = {record.id: record for record in read_fasta(contigs)}
    for name in (*list(records)[:FEW], "again"):
        cut = Chunk.cut_evenly(records[name], head.facts.chunk_size)
        chunks = [chunk.sequence for chunk in cut]
        odds = [encoder.start([chunk]).rows()[0, -1] for chunk in chunks]
        scores = [log_odds(probability(float(each))) for each in odds]
        base = np.array([*score_sequences([records[name].sequence], scorer)])
        length = np.array([len(records[name].sequence)])
        both = combine_log_odds(head.facts.join.knots, base, np.array([fmean(scores)]), length)
        row = found[name]
        assert float(row["virus_score"]) == pytest.approx(probability(both.item()), abs=1e-5)
        assert float(row["base_score"]) == probability(base.item())
        assert row["n_chunks"] == row["n_frames_scored"] == str(len(chunks))
    assert found["again"]["virus_score"] == found[next(iter(records))]["virus_score"]
    reasons = {name: (found[name]["status"], found[name]["note"]) for name in ("unknown", "short")}
    log = (called / "virnucpro.log").read_text()
    assert f"called by the scorer and the head of {NETWORK}; weights of scorer and head" in log
    assert reasons == {
        "unknown": ("no_orf", "no known base"),
        "short": ("too_short", "148 of at least 150"),
    }
    assert found["unknown"]["call"] == ""


def test_network_alone_ranks_the_example(tmp_path):
    """Of all sixteen, so that weights that were mixed up could not pass."""
    folder = predict(CONTIGS, tmp_path / "alone", "--calls", "head")
    scores = {row["record"]: row["virus_score"] for row in rows(folder / "predictions.tsv")}
    in_order = sorted(scores, key=lambda name: float(scores[name]))
    assert len(in_order) == 16
    assert sum("virus" in name for name in in_order[8:]) >= 7


def test_models_info_describes_the_network():
    file = open_model(NETWORK, lambda _: None).path
    said = [invoke("models", "info", one) for one in (NETWORK, file.parent, file)]
    of_network = [output.partition("layers")[2] for _, output in said]
    assert of_network[0] == of_network[1] == of_network[2] and "the max counts" in of_network[0]


def test_certain_records_are_not_read(tmp_path):
    folder = predict(CONTIGS, tmp_path / "certain", "--embed", "uncertain")
    assert {row["note"] for row in rows(folder / "predictions.tsv")} == {"not embedded"}
    assert "WARNING" not in (folder / "virnucpro.log").read_text()


def test_default_reads_what_may_be_viral(contigs, tmp_path):
    records = {record.id: record.sequence for record in read_fasta(contigs)}
    first = next(iter(records.values()))
    pieces = {f"piece{n}": first[:n] for n in (170, 400, 700)}
    more = write_fasta(tmp_path / "more.fa", records | pieces)
    by_name = {
        embed: {row["record"]: row for row in rows(folder / "predictions.tsv")}
        for embed in ("all", "viral")
        for folder in [predict(more, tmp_path / embed, "--embed", embed)]
    }
    usual = predict(more, tmp_path / "usual")
    assert tables(usual) == tables(tmp_path / "viral") != tables(tmp_path / "all")
    read = [row for row in by_name["viral"].values() if row["note"] != "not embedded"]
    assert 0 < len(read) < len(by_name["all"])
    assert all(row == by_name["all"][row["record"]] for row in read)


def test_resume_keeps_the_network(contigs, called):
    before = (called / "predictions.tsv").read_bytes()
    words = ["predict", "-i", str(contigs), "-o", str(called), "--resume"]
    exit_code, shown = invoke(*words)
    assert exit_code == 0 and f"called by the scorer and the head of {NETWORK}" in shown
    assert (called / "predictions.tsv").read_bytes() == before


def test_resume_with_another_model_names_the_differences(contigs, called):
    words = ["predict", "-i", str(contigs), "-o", str(called), "--resume"]
    exit_code, shown = invoke(*words, "--model", "virnucpro-tiny", "--device", "cpu")
    models = f"it has the model {NETWORK}, not the model virnucpro-tiny"
    assert exit_code == 73 and f"{models}; --chunk-size was 1000, now 500" in shown


PROTEIN = ">p\nMSTNPKPQRKTKRNTNRRPQDVKFPGGGQIVGGVYLLPRRGPRLGVRATRKTSERSQPRGRRQPI\n"
MANIFEST = "path,label,group\nin.fa,virus,a\n"


@pytest.mark.parametrize(
    ("content", "words", "exit_code", "said"),
    [
        (PROTEIN, ["extract"], 64, "reads nucleotides; the input holds proteins"),
        (">r\nACGT\n", ["extract", "--pooling", "none"], 64, "makes one vector per chunk"),
        (">r\nACGT\n", ["extract", "--layer", "2"], 64, "no layer 2: the model has 1 layer hint"),
        (MANIFEST, ["train"], 69, "is not an ESM-2, but a model of the family codons"),
        (MANIFEST, ["train", "--check"], 69, "`predict` and `extract` take this model as it is"),
    ],
)
def test_what_it_cannot_do_is_refused_with_a_remedy(tmp_path, content, words, exit_code, said):
    path = tmp_path / "in"
    path.write_text(content)
    source = ["--data" if words[0] == "train" else "--input", str(path)]
    given = [*words, "--quiet", *source, "-o", str(tmp_path / "out"), "--model", NETWORK]
    refused, shown = invoke(*given)
    assert refused == exit_code, shown
    assert said in " ".join(shown.replace(":  ", " ").split())
