"""A model with numbers that are not finite ends the run, and no sequence is blamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, random_esm2
from fair_esm_reference import make_fair_esm, save_fair_esm
from faulty_workers import AllNanWorker
from labelled_data_helpers import options as training_options
from labelled_data_helpers import write_labelled
from run_helpers import invoke, resolve, run, run_inline, write_fasta

from virnucpro.core.errors import UnavailableError
from virnucpro.core.events import BatchStarted
from virnucpro.engine.local import InlineExecutor, ProcessExecutor
from virnucpro.models import checkpoint_model
from virnucpro.models.esm2.loading import save_esm2
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.training.training_config import resolve_training
from virnucpro.workflows.extract_options import ExtractOptions

pytestmark = pytest.mark.usefixtures("quick_starts_in_module")

TOO_LARGE_FOR_FP16 = 1e5
TOO_LARGE_FOR_BF16 = 3.4e38  # float32 ends at 3.4028e38, bf16 at 3.3895e38
MOST_FIRST_FAILURES = 100


@pytest.fixture
def changed(tmp_path) -> Callable[..., Path]:
    """Write a small ESM-2 to a folder, with another number in one tensor."""

    def make(tensor: str, number: float) -> Path:
        model = random_esm2(TINY, seed=0)
        dict(model.named_parameters())[tensor].view(-1)[3] = number
        save_esm2(tmp_path / "bad_esm2", model)
        return tmp_path / "bad_esm2"

    return make


def overflowing(folder: Path) -> Path:
    """An ESM-2 with finite weights and vectors that are not finite."""
    model = random_esm2(TINY, seed=0)
    for layer in model.layers:
        layer.down.weight.mul_(1e37)
    save_esm2(folder, model)
    return folder


def write_proteins(path: Path, n: int) -> Path:
    rng = np.random.default_rng(3)
    letters = list("ACDEFGHIKLMNPQRSTVWY")
    return write_fasta(path, {f"p{i}": "".join(rng.choice(letters, 40)) for i in range(n)})


# Weights, before the run


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "tensor", ["embedding.weight", "layers.1.up.bias", "layers.0.qkv.weight", "final_norm.weight"]
)
def test_weights_that_are_not_finite_are_refused(changed, tensor, number):
    model = inspect_esm2(changed(tensor, number))
    with pytest.raises(UnavailableError, match=r"the model bad_esm2 is damaged: .* not finite"):
        model.prepare("fp32", lambda _: None)


def test_nan_in_a_pt_file_is_refused(tmp_path):
    model = make_fair_esm(TINY)
    with torch.no_grad():
        model.layers[1].fc2.weight[0, 0] = float("nan")
    path = save_fair_esm(model, tmp_path / "bad_esm2.pt")
    with pytest.raises(UnavailableError, match=r"layers\.1\.fc2\.weight in .*bad_esm2\.pt"):
        inspect_esm2(path).prepare("fp32", lambda _: None)


@pytest.mark.parametrize(
    ("number", "precision", "hint"),
    [
        (TOO_LARGE_FOR_FP16, "fp16", "set --precision to bf16 or fp32"),
        (TOO_LARGE_FOR_BF16, "bf16", "set --precision to fp32"),
        (TOO_LARGE_FOR_BF16, "fp16", "set --precision to fp32"),
        (TOO_LARGE_FOR_BF16, "fp8", "set --precision to fp32"),
        (TOO_LARGE_FOR_BF16, "int8", "set --precision to fp32"),
    ],
)
def test_weights_too_large_for_the_precision(changed, number, precision, hint):
    model = inspect_esm2(changed("layers.1.down.weight", number))
    match = f"the model bad_esm2 cannot run in {precision}: .*layer.1.output.dense.weight"
    with pytest.raises(UnavailableError, match=match) as caught:
        model.prepare(precision, lambda _: None)
    assert caught.value.hint == hint
    model.prepare("fp32", lambda _: None)


def test_norms_may_be_too_large_for_fp16(changed):
    """They are computed in float32."""
    model = inspect_esm2(changed("layers.1.mlp_norm.weight", TOO_LARGE_FOR_FP16))
    model.prepare("fp16", lambda _: None)


def test_large_model_is_refused_and_not_converted(changed, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_model, "WORTH_CONVERTING", 0)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    model = inspect_esm2(changed("layers.1.up.weight", float("nan")))
    with pytest.raises(UnavailableError, match="the model bad_esm2 is damaged"):
        model.prepare("bf16", lambda _: None)
    assert not list((tmp_path / "torch").rglob("*.safetensors"))


@pytest.mark.parametrize("command", ["extract", "predict"])
def test_run_ends_with_69_and_touches_nothing(changed, contigs, tmp_path, command):
    model = changed("layers.1.up.weight", float("nan"))
    given = (command, "-q", "-i", contigs, "-o", tmp_path / "run", "--device", "cpu")
    code, said = invoke(*given, "--model", model)
    assert code == 69 and "the model bad_esm2 is damaged" in said
    assert not (tmp_path / "run").exists()


def test_training_on_damaged_weights_is_refused(changed, tmp_path):
    (tmp_path / "data").mkdir()
    data = write_labelled(tmp_path / "data", n_groups=4, per_group=1)
    model = str(changed("layers.1.up.weight", float("nan")))
    with pytest.raises(UnavailableError, match="the model bad_esm2 is damaged"):
        resolve_training(training_options(data, tmp_path / "out", model=model), lambda _: None)


# Vectors


def test_overflowing_model_ends_the_run(tmp_path):
    model = overflowing(tmp_path / "bad_esm2")
    fasta = write_proteins(tmp_path / "in.faa", 3)
    given = ("extract", "-q", "-i", fasta, "-o", tmp_path / "run", "--model", model)
    code, said = invoke(*given, "--device", "cpu", "--workers", 2, "--precision", "fp32")
    assert code == 69
    assert "error: the model bad_esm2 makes vectors that are not finite, on cpu in fp32" in said
    assert "`virnucpro models verify`" in said and "failed_sequences.fa" not in said
    assert not (tmp_path / "run" / "failed_sequences.fa").exists()


@pytest.mark.parametrize("by", [InlineExecutor, ProcessExecutor])
def test_first_hundred_failures_end_the_run(tiny, tmp_path, by):
    options = ExtractOptions(
        input=(write_proteins(tmp_path / "in.faa", 3 * MOST_FIRST_FAILURES),),
        output_dir=tmp_path / "run",
        model=str(tiny.model),
        device="cpu",
        precision="fp32",
    )
    executor = by("cpu" if by is InlineExecutor else ("cpu",), worker=AllNanWorker)
    alone: list[object] = []

    def count(event: object) -> None:
        if isinstance(event, BatchStarted) and len(event.rows) == 1:
            alone.append(event)

    said = "the first 100 sequences all failed with the model esm2_tiny on cpu in fp32"
    with pytest.raises(UnavailableError, match=said):
        run(resolve(options, lambda _: None), executor, count)
    assert len(alone) == MOST_FIRST_FAILURES
    assert not (tmp_path / "run" / "failed_sequences.fa").exists()


def test_fewer_failures_are_reported_with_a_remedy(make_config, tmp_path):
    fasta = write_proteins(tmp_path / "in.faa", MOST_FIRST_FAILURES - 1)
    changes = {"command": "extract", "input_type": "protein", "chunk_size": 0}
    config = make_config(fasta, **changes)
    summary = run_inline(config, None, executor=InlineExecutor("cpu", worker=AllNanWorker))
    assert summary.exit_code == 1
    said = "\n".join(summary.lines(config.output))
    assert "failed: all 99 proteins" in said and "the vector is not finite" in said
    assert "`virnucpro models check`" in said and "failed_sequences.fa" not in said


def test_vector_of_one_sequence_ends_the_count(make_config, tmp_path):
    """A model that has made a vector is not to blame for later failures."""
    fasta = write_proteins(tmp_path / "in.faa", 2 * MOST_FIRST_FAILURES)
    config = make_config(fasta, command="extract", input_type="protein", chunk_size=0)
    summary = run_inline(config, None, executor=InlineExecutor("cpu", worker=OneGoodWorker))
    assert summary.exit_code == 2
    assert summary.records.n_failed_frames == 2 * MOST_FIRST_FAILURES - 1


class OneGoodWorker(AllNanWorker):
    """Makes a vector for the first sequence that it tries alone."""

    n_good = 0

    def start(self, encoder, sequences):
        if len(sequences) == 1 and not self.n_good:
            self.n_good = 1
            return encoder.start(sequences)
        return super().start(encoder, sequences)
