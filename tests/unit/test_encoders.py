"""Encoder interface: a family is one module and one line, and a run can have several encoders."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_encoder
from conftest import TINY, random_layers
from fair_esm_reference import (
    fair_esm_hidden,
    make_fair_esm,
    random_protein,
    save_fair_esm,
    tolerance,
    worst_row,
)
from run_helpers import (
    again,
    bases_by_frame,
    execute,
    resolve,
    run_inline,
    vectors,
    vectors_of_each,
    write_fasta,
)

from virnucpro.core.atomic_io import hash_file
from virnucpro.core.errors import ResumeError, UnavailableError, UsageError
from virnucpro.core.recipe import EncoderSpec
from virnucpro.engine.local import InlineExecutor
from virnucpro.engine.worker import Worker
from virnucpro.models.base import Encoder, Pending, Rows, load_encoder
from virnucpro.models.esm2.loading import load_esm2, save_esm2
from virnucpro.models.lookup import open_model
from virnucpro.models.manage import describe_model
from virnucpro.models.registry import FAMILIES, Family
from virnucpro.viral.head import EncoderInfo, Head, Network
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.run_config import RunConfig

FAIR_ESM = EncoderSpec(
    family="fair-esm",
    model="m",
    sha256="",
    layer=2,
    pooling="mean",
    precision="fp32",
    dim=TINY.dim,
)
TOY = replace(FAIR_ESM, family="toy", model="counts", sha256="1" * 64, layer=1, dim=4, reads="dna")


@pytest.fixture
def toy_config(make_config, monkeypatch) -> Callable[..., RunConfig]:
    """Configure an extraction with the toy encoder only."""
    line = Family("toy_encoder", extra_tokens=0, has_files=True)
    monkeypatch.setitem(FAMILIES, "toy", line)

    def make(*inputs: Path, **changes: object) -> RunConfig:
        config = make_config(*inputs, command="extract", **changes)
        return replace(config, recipe=replace(config.recipe, encoders=(TOY,)))

    return make


def test_other_family_is_named_by_path(toy_config, contigs, tmp_path):
    """``--model`` names it. It is described, sized, run, and recognised by its content."""
    path = tmp_path / "counts.toy"
    path.write_bytes(toy_encoder.MAGIC)
    options = ExtractOptions(
        input=(contigs,), output_dir=tmp_path / "named", model=str(path), chunk_size=300
    )
    execute(options, lambda _: None, lambda _: InlineExecutor())
    stored = json.loads((options.output_dir / "run.json").read_text())
    assert "model counts: four counts" in stored["announced"]
    (encoder,) = stored["recipe"]["encoders"]
    assert (encoder["family"], encoder["sha256"]) == ("toy", hash_file(path))
    frames = bases_by_frame(contigs)
    counts = {name: [bases.count(base) for base in "ACGT"] for name, bases in frames.items()}
    assert len(counts) > 100
    rows = {name: row.tolist() for name, row in vectors(options.output_dir).items()}
    assert rows == counts
    with pytest.raises(UsageError, match="--pooling bos: counts makes one vector per frame"):
        resolve(replace(options, output_dir=tmp_path / "bos", pooling=("bos",)), lambda _: None)
    assert f"path        {path}" in describe_model(str(path))[0]


def test_same_protein_other_bases_is_no_copy(toy_config, make_config, tmp_path):
    """GCA and GCG both encode alanine."""
    records = {"one": "GCA" * 100, "two": "GCG" * 100, "again": "GCA" * 100}
    fasta = write_fasta(tmp_path / "codons.fa", records)
    by_bases = toy_config(fasta)
    by_protein = make_config(fasta, output=tmp_path / "protein", command="extract")
    n_distinct = len(set(bases_by_frame(fasta).values()))
    assert run_inline(by_bases, None).n_copies == len(vectors(by_bases.output)) - n_distinct
    assert run_inline(by_protein, None).n_copies > len(vectors(by_bases.output)) - n_distinct


@pytest.fixture
def pair(toy_config, make_config, tiny, contigs, tmp_path) -> tuple[RunConfig, Head]:
    """A prediction with ESM-2 and the toy encoder, and a head for both."""
    config = make_config(contigs, output=tmp_path / "pair")
    recipe = replace(config.recipe, encoders=(*config.recipe.encoders, TOY))
    known = tiny.head.facts
    counts = EncoderInfo(
        family="toy", name="counts", encoder_id="1" * 16, layer=1, pooling="mean", dim=4
    )
    facts = replace(known, encoders=(*known.encoders, counts))
    network = Network(random_layers(np.random.default_rng(4), facts.dim, 8, 2), temperature=400.0)
    return replace(config, recipe=recipe, weights=(tiny.model, tiny.model)), Head(facts, network)


def rows_of(config: RunConfig) -> list[dict[str, Rows]]:
    return vectors_of_each(config.output, config.recipe)


def test_vectors_of_encoders_are_joined_by_id(pair):
    config, head = pair
    assert run_inline(config, head).exit_code == 0
    esm2_rows, counts = rows_of(config)
    assert esm2_rows.keys() == counts.keys() and len(counts) > 100
    scores = [
        row.split("\t")[::3]
        for row in (config.output / "prediction_results.txt").read_text().splitlines()[1:]
    ]
    assert {name for name, _ in scores} == set(counts)
    assert len({score for _, score in scores}) > 50
    for name, score in scores:
        vector = np.concatenate([esm2_rows[name], counts[name]])
        assert float(score) == head.classify(vector[None])[0]


def test_frame_failed_by_one_encoder(pair):
    class Picky(Worker):
        def start(self, encoder: Encoder, sequences: Sequence[str]) -> Pending:
            if encoder.spec.family == "toy" and any("GAGAGA" in text for text in sequences):
                raise RuntimeError("no word for GAGAGA")
            return super().start(encoder, sequences)

    config, head = pair
    assert run_inline(config, head, executor=InlineExecutor(worker=Picky)).exit_code == 2
    esm2_rows, counts = rows_of(config)
    failed = esm2_rows.keys() - counts.keys()
    assert failed
    table = (config.output / "prediction_results.txt").read_text()
    assert {line.split("\t")[0] for line in table.splitlines()[1:]} == set(counts)


def test_other_encoder_is_refused_on_resume(pair, make_config, contigs):
    config, head = pair
    run_inline(config, head)
    alone = make_config(contigs, output=config.output, resume=True)
    with pytest.raises(ResumeError, match="it has the model tiny and counts, not the model"):
        run_inline(alone, head)
    finer = replace(TOY, layer=2)
    recipe = replace(config.recipe, encoders=(config.recipe.encoders[0], finer))
    with pytest.raises(ResumeError, match="--layer of counts was 1, now 2"):
        run_inline(replace(again(config, resume=True), recipe=recipe), head)


def test_encoder_of_bases_refuses_proteins(toy_config, tmp_path):
    fasta = write_fasta(tmp_path / "proteins.faa", {"p": "MKVLEFPQIL"})
    with pytest.raises(UsageError, match="counts reads nucleotides; the input contains proteins"):
        run_inline(toy_config(fasta), None)


# fair-esm


@pytest.mark.parametrize("form", ["pt", "folder"])
@pytest.mark.parametrize(("pooling", "layer"), [("mean", 2), ("none", 1)])
def test_fair_esm_encoder_agrees(tmp_path, tiny, form, pooling, layer):
    weights = tiny.model
    if form == "pt":
        weights = save_fair_esm(make_fair_esm(TINY), tmp_path / "model.pt")
    proteins = ["M", "MKVLEFPQIL", "acdXBZUO*-", random_protein(300), random_protein(70)]
    spec = replace(FAIR_ESM, family="esm2", layer=layer, pooling=pooling)
    device = torch.device("cpu")
    ours = load_encoder(spec, weights, device).start(proteins).rows()
    theirs = load_encoder(replace(spec, family="fair-esm"), weights, device).start(proteins).rows()
    assert len(ours) == (sum(map(len, proteins)) if pooling == "none" else len(proteins))
    limit = tolerance(TINY.n_layers, torch.float32)
    assert worst_row(torch.from_numpy(ours), torch.from_numpy(theirs)) < limit


def test_fair_esm_in_bf16_keeps_its_rotary_frequencies(tmp_path):
    weights = save_fair_esm(make_fair_esm(TINY), tmp_path / "model.pt")
    device = torch.device("cpu")
    proteins = [random_protein(n) for n in (40, 900)]
    exact, coarse = (
        load_encoder(replace(FAIR_ESM, precision=precision), weights, device).start(proteins).rows()
        for precision in ("fp32", "bf16")
    )
    # the residual stream of fair-esm is in bf16, too, which ``tolerance`` does not count: twice it
    limit = 2 * tolerance(TINY.n_layers, torch.bfloat16)
    assert worst_row(torch.from_numpy(coarse), torch.from_numpy(exact)) < limit


def test_fair_esm_plans_each_protein_once(tiny):
    encoder = load_encoder(FAIR_ESM, tiny.model, torch.device("cpu"))
    lengths = [5, 700, 1, 90, 90, 12]
    batches = encoder.plan(lengths, 200)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        n_tokens = encoder.count_tokens([lengths[i] for i in batch])
        assert n_tokens <= 200 or len(batch) == 1


# fp16


@pytest.fixture
def overflowing(tmp_path: Path) -> Path:
    """A model whose first MLP gives half of the proteins numbers beyond fp16."""
    model = make_fair_esm(TINY)
    largest = []
    mlp = model.layers[0].fc2
    handle = mlp.register_forward_hook(lambda *call: largest.append(call[-1].abs().max().item()))
    for protein in MIXED:
        fair_esm_hidden(model, [protein], TINY.n_layers)
    handle.remove()
    low, high = sorted(largest)[len(MIXED) // 2 - 1 :][:2]
    assert high > 1.01 * low, "far more than what fp16 rounds off"
    factor = torch.finfo(torch.float16).max / (low * high) ** 0.5
    mlp.weight *= factor
    mlp.bias *= factor
    return save_fair_esm(model, tmp_path / "model.pt")


MIXED = [random_protein(length, seed) for seed, length in enumerate((30, 41, 8, 60, 25, 50))]


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_fp16_overflow_is_embedded_in_float32(overflowing, tmp_path, pooling):
    spec = replace(FAIR_ESM, family="esm2", pooling=pooling, precision="fp16")
    device = torch.device("cpu")
    encoder = load_encoder(spec, overflowing, device)
    model = load_esm2(overflowing, spec.layer, torch.float32, device)
    for layer in model.layers:
        for linear in (layer.qkv, layer.attention_out, layer.up, layer.down):
            linear.half().float()  # the weights that the encoder in fp16 has
    save_esm2(tmp_path / "rounded", model)
    exact = load_encoder(replace(spec, precision="fp32"), tmp_path / "rounded", device)
    n_rows = [len(protein) if pooling == "none" else 1 for protein in MIXED]

    def by_protein(order: list[int]) -> dict[int, np.ndarray]:
        rows = encoder.start([MIXED[i] for i in order]).rows()
        parts = np.split(rows, np.cumsum([n_rows[i] for i in order])[:-1])
        return dict(zip(order, parts, strict=True))

    plain = encoder.embed(MIXED).split(n_rows)
    overflows = [not part.isfinite().all() for part in plain]
    assert sum(overflows) == len(MIXED) // 2
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0], [4, 2]):
        for i, rows in by_protein(order).items():
            assert np.isfinite(rows).all()
            if overflows[i]:
                assert np.array_equal(rows, exact.start([MIXED[i]]).rows())
            else:
                alone = encoder.embed([MIXED[i]])
                assert worst_row(torch.from_numpy(rows), alone) < tolerance(2, torch.float16)


def test_replaced_esm2_is_refused(tiny):
    spec = open_model(str(tiny.model), lambda _: None).spec(sha256="0" * 64, precision="fp32")
    with pytest.raises(UnavailableError, match="was replaced since the run began"):
        load_encoder(spec, tiny.model, torch.device("cpu"))
