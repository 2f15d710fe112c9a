"""``virnucpro train``: its options, its option file, and data that it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import click
import numpy as np
import psutil
import pytest
from conftest import Tiny
from forkserver_runner import virnucpro
from labelled_data_helpers import options, pairs_of, records_of, train_here, write_labelled
from run_helpers import CONTIGS, run_inline, vectors, within
from train_walk import steps_after, steps_before

from virnucpro.cli.command import read_options
from virnucpro.cli.main import app
from virnucpro.core.errors import (
    FeatureFileError,
    InputError,
    InputMissingError,
    OutputError,
    ResumeError,
    UnavailableError,
    UsageError,
    VirnucproError,
)
from virnucpro.core.types import FastaRecord
from virnucpro.core.yaml_config import read_config
from virnucpro.models.device_choice import DeviceChoice
from virnucpro.models.names import TINY_MODEL
from virnucpro.sequences.kmers import N_FEATURES
from virnucpro.training.frame_dataset import (
    FrameStore,
    LabelledFrames,
    _FeatureRows,
    link_vectors,
    read_ids,
    write_frames,
)
from virnucpro.training.labelled_data import SPLITS, LabelledRecord, read_split
from virnucpro.training.networks import build_module, empty_module
from virnucpro.training.options import TrainOptions
from virnucpro.training.train import check_training
from virnucpro.training.training_config import (
    TrainingRun,
    describe_training,
    open_training,
    resolve_training,
)

pytestmark = pytest.mark.usefixtures("quick_starts_in_module")

TRAIN = app.get_command(click.Context(app), "train")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return write_labelled(tmp_path / "data", n_groups=4, per_group=1)


def out_of(data: Path) -> Path:
    return data.parents[1] / "out"


def resolved(data: Path, **changes: object) -> TrainingRun:
    return resolve_training(options(data, out_of(data), **changes), lambda _: None)[0]


def opened(data: Path, **changes: object) -> TrainingRun:
    """Open a training that is about to make its first step."""
    asked = options(data, out_of(data), **{"encoding": "composition", **changes})
    training, _ = resolve_training(asked, lambda _: None)
    training.output.mkdir(exist_ok=True)
    open_training(training, lambda _: None)
    return training


# Option files


def parsed(*arguments: object, given: tuple[str, ...] = ("--data", "m.tsv", "-o", "out")):
    """Return the options that the command gets, without running it."""
    context = TRAIN.make_context("train", [*given, *map(str, arguments)])
    return read_options(context, TrainOptions)


def test_shown_commands_are_valid():
    for name, *words in (*steps_before(40), *steps_after(40)):
        command = app.get_command(click.Context(app), name)
        assert command is not None and command.make_context(name, words)


def test_command_line_overrides_the_file(tmp_path):
    config = tmp_path / "train.yaml"
    config.write_text(
        "epochs: 7\nbatch-size: 9\nlr: 1e-3\nfinetune: true\nchunk_size: [500, 300]\n"
        "best_by: f1\nmodel: esm2_t6_8M_UR50D\n"
    )
    found = parsed("--config", config, "--epochs", 3, "--best-by", "loss")
    assert (found.epochs, found.batch_size, found.lr) == (3, 9, 1e-3)
    assert (found.finetune, found.chunk_size) == (True, (500, 300))
    assert (found.best_by, found.model) == ("loss", "esm2_t6_8M_UR50D")
    assert found.hidden == TrainOptions.hidden
    config.write_text("data: mine.tsv\noutput_dir: there\nchunk_size: 300\n")
    found = parsed("--config", config, given=())
    assert (found.data, found.output_dir) == (Path("mine.tsv"), Path("there"))
    assert found.chunk_size == (300,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("epoch: 3", "yaml:1: there is no option epoch"),
        ("- epochs\n- 3", "is not a table of options"),
        ("epochs: [3", "is not YAML"),
        ("config: other.yaml", "there is no option config"),
        (
            "epochs: 3\nbatch-size: 1\nbatch_size: 2",
            r"yaml:3: batch_size is given twice \(first in line 2",
        ),
        ("# a\nepochs: 3\n\nepochs: 4", r"yaml:4: epochs is given twice \(first in line 2"),
        ("epochs: 3\ntraining:\n  epochs: 4", r"yaml:3: epochs is given twice \(first in line 1"),
        ("training:\n  epoch: 4", "yaml:2: there is no option epoch"),
        ("model: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_file_without_an_option_table_is_refused(tmp_path, content, message):
    config = tmp_path / "train.yaml"
    config.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_config(config, {"epochs", "batch_size", "model"})
    assert caught.value.hint
    with pytest.raises(UsageError):
        parsed("--config", config)


def test_file_may_have_sections_and_foreign_terms(tmp_path):
    config = tmp_path / "train.yaml"
    config.write_text(
        "training:\n  epochs: 7\n  batch-size: 9\n"
        "hardware: {use_multi_gpu: true, gpu_ids: [0, 1]}\n"
    )
    found = parsed("--config", config)
    assert (found.epochs, found.batch_size, found.gpus) == (7, 9, "0,1")
    assert found.multi_gpu is True and parsed("--no-multi-gpu").multi_gpu is False
    config.write_text("hardware:\n  use_multi_gpu: false\n  gpu_ids: 2\n")
    values = read_config(config, {"gpus", "multi_gpu"})
    assert values == {"gpus": 2, "multi_gpu": False}


@pytest.mark.parametrize(
    ("words", "answer"),
    [(("--gpu-ids", "0"), r"No such option.*--gpus"), (("--encoding", "blosum"), "or blosum62")],
)
def test_foreign_terms_are_answered(words, answer):
    with pytest.raises(Exception, match=r"No such option|--encoding is 'blosum'") as caught:
        parsed(*words)
    error = caught.value
    said = error.hint if isinstance(error, UsageError) else error.format_message()
    assert re.search(answer, said)


def test_empty_and_missing_option_files(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert read_config(tmp_path / "empty.yaml", {"epochs"}) == {}
    with pytest.raises(InputMissingError, match=r"nowhere\.yaml"):
        read_config(tmp_path / "nowhere.yaml", {"epochs"})


# Options that contradict each other, or make no sense


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finetune": True, "pretrain": True}, "--pretrain: no effect with --finetune"),
        (
            {"finetune": True, "fsdp": True, "model": TINY_MODEL},
            "--fsdp shards weights over devices, and there is only one",
        ),
        ({"chunk_size": (300, 300)}, "--chunk-size is (300, 300)"),
        ({"chunk_size": (3,)}, "--chunk-size is (3,)"),
        ({"chunk_size": (500, 300)}, "has one --chunk-size"),
        ({"multi_gpu": False, "gpus": "0"}, "--gpus: no effect with --no-multi-gpu"),
        ({"encoding": "onehot", "gpus": "0"}, "--gpus does not go with --device cpu"),
        ({"encoding": "onehot", "pretrain": True}, "with --encoding onehot, which uses no ESM-2"),
        ({"encoding": "onehot", "finetune": True}, "with --encoding onehot, which uses no ESM-2"),
        ({"encoding": "blosum62", "model": "x"}, "--model: no effect with --encoding blosum62"),
        ({"encoding": "onehot", "dim": 8}, "with --encoding onehot, which uses no ESM-2"),
        (
            {"encoding": "composition", "architecture": "cnn"},
            "--architecture: no effect with --encoding composition",
        ),
        ({"pretrain": True, "architecture": "lstm"}, "--architecture: no effect with --pretrain"),
        ({"layers": 3}, "--layers: no effect without --finetune or --pretrain"),
        (
            {"finetune": True, "lora": 4, "layers": 3},
            "--lora: no effect for a new encoder, which has random weights",
        ),
        (
            {"finetune": True, "model": TINY_MODEL, "train_layers": 9},
            "--train-layers is 9; the encoder has 6",
        ),
        ({"finetune": True, "encoder_lr": 2.0}, "--encoder-lr is 2"),
        ({"encoding": "onehot", "lora": 4}, "--lora: no effect without --finetune"),
        ({"finetune": True, "lora_alpha": 4.0}, "--lora-alpha: no effect without --lora"),
        ({"finetune": True, "features": Path("x")}, "--features: no effect with --finetune"),
        ({"pretrain": True, "features": Path("x")}, "--features: no effect with --pretrain"),
        ({"encoding": "onehot", "features": Path("x")}, "--features: no effect without the mean"),
        ({"pretrain": True, "best_by": "f1"}, "--best-by: no effect with --pretrain"),
        ({"gradient_checkpointing": True}, "--gradient-checkpointing: no effect without"),
        ({"finetune": True, "model": "x", "heads": 3}, "--heads: no effect with --model"),
        ({"pretrain": True, "dim": 30, "heads": 4}, "30 dimensions in 4 heads"),
        ({"pretrain": True, "layers": 0}, "--layers is 0"),
        ({"encoding": "onehot", "architecture": "lstm", "precision": "fp16"}, "no LSTM in fp16"),
        ({"encoding": "onehot", "dropout": 1.0}, "--dropout is 1"),
        ({"encoding": "onehot", "lr": 2.0}, "--lr is 2"),
        ({"encoding": "onehot", "lr": 0}, "--lr is 0"),
        ({"encoding": "onehot", "batch_size": -1}, "--batch-size is -1"),
        ({"encoding": "onehot", "grad_accum_steps": 0}, "--grad-accum-steps is 0"),
        ({"encoding": "onehot", "warmup_epochs": 2}, "--warmup-epochs is 2"),
        ({"encoding": "onehot", "weight_decay": -0.1}, "--weight-decay is -0.1"),
        ({"encoding": "onehot", "epochs": 0}, "--epochs is 0"),
        ({"encoding": "onehot", "num_workers": -1}, "--num-workers is -1"),
        ({"encoding": "onehot", "early_stopping": -1}, "--early-stopping is -1"),
        ({"encoding": "onehot", "keep_checkpoints": 0}, "--keep-checkpoints is 0"),
        ({"encoding": "onehot", "workers": 0}, "--workers is 0"),
    ],
)
def test_impossible_options_are_refused_first(data, changes, words):
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        resolved(data, **changes)
    assert caught.value.hint
    assert not out_of(data).exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere.tsv", "No such file"), ("contigs.fa", "no column 'path'"), ("", "is a folder")],
)
def test_manifest_is_checked_before_the_model(tmp_path, name, words):
    shutil.copy(CONTIGS, tmp_path)
    with pytest.raises((InputError, InputMissingError), match=words) as caught:
        resolved(tmp_path / name, model="nonsense")
    assert caught.value.hint


# Resolved options


def test_encoder_is_given_or_new(data, tiny: Tiny):
    found = resolved(data, model=str(tiny.model))
    assert found.encoder.path == tiny.model and found.shape.dim == 32 and found.has_stored_vectors
    new = resolved(data, finetune=True, layers=2, dim=24, heads=3)
    assert new.encoder is None
    assert (new.shape.n_layers, new.shape.dim, new.shape.n_heads) == (2, 24, 3)
    new = resolved(data, pretrain=True)
    assert (new.shape.n_layers, new.shape.dim, new.shape.n_heads) == (6, 128, 4)
    assert resolved(data, encoding="blosum62").shape is None


@pytest.mark.parametrize("mode", ["finetune", "pretrain"])
def test_module_for_remote_weights_is_empty(data, mode):
    training = resolved(data, **{mode: True}, layers=1, dim=8, heads=2)
    frames = LabelledFrames.from_store(["MKV"], np.zeros((1, N_FEATURES), dtype=np.float32))
    whole = dict(build_module(training, frames).named_parameters())
    empty = dict(empty_module(training, frames.dim).named_parameters())
    assert {name: one.shape for name, one in empty.items()} == {
        name: one.shape for name, one in whole.items()
    }
    assert {one.device.type for one in empty.values()} == {"meta"}


def test_cpu_is_one_process_by_default(data):
    def devices(**changes: object) -> DeviceChoice:
        return resolve_training(options(data, data, encoding="onehot", **changes), lambda _: None)[
            1
        ]

    assert devices().devices == ("cpu",)
    assert devices(workers=2).devices == ("cpu", "cpu")
    assert devices(workers=2, multi_gpu=False).devices == ("cpu",)


def test_damaged_head_is_reported_first(data, tiny: Tiny, tmp_path):
    model = str(shutil.copytree(tiny.model, tmp_path / "brought" / "esm2"))
    (Path(model) / "head.safetensors").write_bytes(b"no head")
    with pytest.raises(UnavailableError, match=r"esm2/head\.safetensors is not a VirNucPro head"):
        resolved(data, model=model)
    assert resolved(data, model=model, pretrain=True).encoder.path == Path(model)


def test_training_logs_mode_model_and_devices(data, tiny: Tiny):
    gpus = DeviceChoice(("cuda:0", "cuda:1"), ("cuda:0 A, 79 GiB", "cuda:1 B, 80 GiB"), True, 1)
    lines = describe_training(resolved(data, model=str(tiny.model)), gpus)
    assert lines[0].startswith("head: ESM-2 of 2 layers, 32 dimensions") and "fp32" in lines[0]
    assert lines[1:] == ["cuda:0 A, 79 GiB", "cuda:1 B, 80 GiB"]
    assert describe_training(resolved(data, encoding="onehot"), gpus.first_device)[1:] == [
        "cuda:0 A, 79 GiB"
    ]


def test_another_seed_is_another_split(data):
    before = read_split(opened(data).split)
    shutil.rmtree(out_of(data))
    assert read_split(opened(data, seed=1).split) != before


# Unusable data


@pytest.mark.parametrize(
    ("label", "part"), [("other", "validation"), ("virus", "train"), ("virus", "test")]
)
def test_split_with_one_label_is_refused(data, tmp_path, label, part):
    rows = [f"{name} {i}\t{SPLITS[i % 3]}\n" for name in ("virus", "other") for i in range(4)]
    instead = next(split for split in SPLITS if split != part)
    moved = [row.replace(part, instead) if row.startswith(label) else row for row in rows]
    split = tmp_path / "split.tsv"
    split.write_text("group\tsplit\n" + "".join(moved))
    with pytest.raises(InputError, match=f"label {label} is in the part {part}") as caught:
        opened(data, split=split)
    assert "--split" in caught.value.hint
    assert not list((tmp_path / "out").iterdir()), "what is refused leaves nothing"


def test_pretraining_needs_no_labels_and_no_test(data, tmp_path):
    split = tmp_path / "split.tsv"
    groups = sorted({record.group for record in records_of(data)})
    rows = [f"{g}\t{'validation' if g == 'other 0' else 'train'}\n" for g in groups]
    split.write_text("group\tsplit\n" + "".join(rows))
    opened(data, split=split, encoding="esm2", pretrain=True)
    assert read_split(tmp_path / "out" / "split.tsv") == read_split(split)


def test_group_missing_from_the_split_is_named(data, tmp_path):
    split = tmp_path / "split.tsv"
    split.write_text("group\tsplit\nvirus 0\ttrain\n")
    with pytest.raises(InputError, match="the split lacks 7 groups"):
        opened(data, split=split)
    assert not list((tmp_path / "out").iterdir()), "what is refused leaves nothing"


def closed(n_bases: int) -> str:
    """Return bases with stops in all six frames."""
    return ("TAAATAAATAACTTAATTAGTTAGCTAGCTAACTAGTCATCACTATTA" * n_bases)[:n_bases]


def test_records_without_a_frame_are_reported(data, tmp_path):
    fasta = data.with_name("data.fa")
    records = records_of(data)
    fasta.write_text("".join(f">{record.id}\n{closed(400)}\n" for record in records))
    with pytest.raises(InputError, match="train groups have 0 viral frames, 0 others") as caught:
        train_here(options(data, tmp_path / "one", encoding="composition"))
    assert caught.value.hint
    checked = options(data, tmp_path / "one", encoding="composition", check=True)
    with pytest.raises(InputError, match="train groups have 0 viral frames, 0 others"):
        list(check_training(checked, lambda _: None))
    with pytest.raises(InputError, match="have no frame without a stop") as caught:
        train_here(options(data, tmp_path / "two", pretrain=True, layers=1, dim=8, heads=2))
    assert "--chunk-size" in caught.value.hint


def test_wrong_manifest_leaves_no_training(data, tmp_path):
    data.write_text(data.read_text().replace("\tvirus\t", "\tviral\t", 1))
    with pytest.raises(InputError, match="the label is 'viral'"):
        opened(data)
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(InputMissingError, match=r"nowhere\.tsv"):
        opened(tmp_path / "data" / "nowhere.tsv")


# The folder


def test_kill_before_claiming_can_be_resumed(data):
    training = opened(data)
    split = training.split.read_bytes()
    (training.output / "training.json").unlink()
    with pytest.raises(OutputError, match=r"has no training: frames"):
        opened(data)
    opened(data, resume=True)
    assert training.split.read_bytes() == split
    assert json.loads((training.output / "training.json").read_text())["data_sha256"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": 3}', "{"])
def test_damaged_training_json_is_reported(data, content):
    training = opened(data)
    (training.output / "training.json").write_text(content)
    with pytest.raises(ResumeError, match=r"training\.json cannot be read"):
        opened(data, resume=True)


def test_resume_refuses_an_edited_split(data):
    training = opened(data, resume=True)
    text = training.split.read_text()
    training.split.write_text(text.replace("virus kingdom", "another kingdom", 1))
    with pytest.raises(ResumeError, match="split_sha256"):
        opened(data, resume=True)


@pytest.mark.parametrize(
    "name",
    [
        *("split.tsv", "checkpoints", "tensorboard", "features", "model"),
        *("checkpoints/best.pt", "seeds/2/checkpoints/epoch_0001.pt"),
    ],
)
def test_training_writes_through_no_link(data, tmp_path, name):
    training = opened(data)
    inside = training.output / name
    outside = tmp_path / "elsewhere"
    inside.parent.mkdir(parents=True, exist_ok=True)
    if inside.exists():
        inside.rename(outside)
    inside.symlink_to(outside)
    with pytest.raises(OutputError, match=f"{name} is a link to {outside}"):
        opened(data, resume=True)


def test_training_reads_no_pipe(data):
    training = opened(data)
    for name in ("training.json", "split.tsv"):
        content = (training.output / name).read_bytes()
        (training.output / name).unlink()
        os.mkfifo(training.output / name)
        with within(20), pytest.raises(VirnucproError, match=f"{name}.* not a plain file"):
            opened(data, resume=True)
        (training.output / name).unlink()
        (training.output / name).write_bytes(content)
    opened(data, resume=True)


def test_harmless_options_may_change_on_resume(data):
    changes = {"num_workers": 2, "early_stopping": 3, "keep_checkpoints": 2}
    facts = opened(data).output / "training.json"
    before = json.loads(facts.read_text())
    resumed = opened(data, resume=True, profile=True, **changes)
    assert json.loads(facts.read_text()) == before | {"settings": before["settings"] | changes}
    assert {name: getattr(resumed.options, name) for name in changes} == changes


# Vectors


@pytest.fixture
def with_vectors(data: Path, tiny: Tiny) -> TrainingRun:
    """Open a training of a head before the engine makes its vectors."""
    return opened(data, encoding="esm2", model=str(tiny.model))


def test_records_are_written_with_their_ids(data, with_vectors):
    text = with_vectors.fasta.read_text()
    for _, record in pairs_of(data):
        assert f">{record.id}\n{record.sequence}\n" in re.sub(r"(?<=[ACGT])\n(?=[ACGT])", "", text)


def test_frame_vectors_are_found_by_id(make_config, with_vectors, tmp_path):
    config = make_config(with_vectors.fasta, command="extract", store="bfloat16")
    run_inline(config, None)
    ids = read_ids(with_vectors.frames)
    before = sum(path.stat().st_size for path in with_vectors.frames.iterdir())
    link_vectors(with_vectors.frames, config.output)
    after = sum(path.stat().st_size for path in with_vectors.frames.iterdir())
    assert after - before < 4 * len(ids) * 32, "no vector of 32 dimensions fits into that"
    rows = np.random.default_rng(4).permutation(len(ids))[::2]
    stored = FrameStore.open(with_vectors.frames).all.select(rows)
    by_id = vectors(config.output)
    found = stored.vectors(np.arange(len(rows))).tolist()
    assert found == [by_id[ids[row]].tolist() for row in rows]
    nobody = (
        LabelledRecord("nobody", is_virus=True, group="a"),
        FastaRecord("nobody", "", "ACG" * 99),
    )
    write_frames(tmp_path / "frames", [nobody], [300])
    with pytest.raises(FeatureFileError, match="has no vector for nobody"):
        link_vectors(tmp_path / "frames", config.output)


def test_many_vector_files_need_few_open_ones(tmp_path):
    """Each file has a few rows or none, after a header."""
    rng = np.random.default_rng(0)
    files = []
    expected = []
    for i in range(600):
        path = tmp_path / str(i)
        values = rng.random((i % 3, 4), dtype=np.float32)
        path.write_bytes(bytes(i % 7) + values.tobytes())
        files.append((str(path), i % 7, len(values)))
        expected.append(values)
    before = psutil.Process().num_fds()
    rows = rng.permutation(sum(map(len, expected)))
    column = _FeatureRows(files, rows, 4, "float32")
    found = column[np.arange(len(rows))]
    assert np.array_equal(found, np.concatenate(expected)[rows])
    assert psutil.Process().num_fds() - before <= 256


def test_remade_vectors_are_read_again(tmp_path):
    for value in (1, 2):
        path = tmp_path / "made"
        path.write_bytes(np.full(4, value, dtype=np.float32).tobytes())
        vectors = _FeatureRows([(str(tmp_path / "features"), 0, 1)], np.zeros(1, int), 4, "float32")
        path.replace(tmp_path / "features")
        assert vectors[np.zeros(1, int)].tolist() == [[value] * 4]


@pytest.fixture
def extracted(data: Path, tiny: Tiny, tmp_path: Path) -> Path:
    """Extract vectors of the labelled FASTA into their own folder."""
    out = tmp_path / "vectors"
    given = ("-i", data.with_name("data.fa"), "-o", out, "--model", tiny.model)
    more = ("--chunk-size", 300, "--device", "cpu", "--workers", 1, "--precision", "fp32")
    answer = virnucpro("extract", *given, *more)
    assert answer.returncode == 0, answer.stderr
    return out


def test_given_vectors_serve_several_trainings(data, tiny: Tiny, extracted, tmp_path):
    asked = {"model": str(tiny.model), "epochs": 1}
    own = train_here(options(data, tmp_path / "own", **asked))
    for name in ("one", "two"):
        given = train_here(options(data, tmp_path / name, features=extracted, **asked))
        assert not (given.output / "features").exists()
        assert given.head.read_bytes() == own.head.read_bytes()
    (file, *_) = sorted((extracted / "features").glob("*.h5"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(InputError, match=f"--features: .*{file.name}") as caught:
        train_here(options(data, tmp_path / "three", features=extracted, **asked))
    assert "run that command again with --resume" in caught.value.hint


def test_vectors_of_another_recipe_are_refused(data, tiny: Tiny, extracted, tmp_path):
    asked = {"encoding": "esm2", "model": str(tiny.model), "features": extracted}
    with pytest.raises(InputError, match=r"not those of .*: --chunk-size was 300, now 210"):
        opened(data, chunk_size=(210,), **asked)
    with pytest.raises(InputError, match="the SHA-256 of the model was"):
        opened(data, **{**asked, "model": TINY_MODEL})
    with pytest.raises(InputMissingError, match="contains no run"):
        opened(data, **{**asked, "features": data.parent})
    fasta = data.with_name("data.fa")
    fasta.write_text(fasta.read_text().replace("A", "C", 1))
    with pytest.raises(InputError, match="no vectors for 1 of the labelled FASTA files"):
        opened(data, **asked)
    with pytest.raises(InputError, match="no vectors for 1 of the labelled FASTA files"):
        list(check_training(options(data, tmp_path, **asked), lambda _: None))


def test_check_counts_by_the_stored_split(data):
    split = opened(data).split
    text = split.read_text()
    row = next(row for row in text.splitlines() if "\tvirus\t" in row and "\ttrain\t" in row)
    split.write_text(text.replace(row, row.replace("\ttrain\t", "\tvalidation\t")))
    asked = options(data, out_of(data), encoding="composition")
    lines = [line.split() for line in check_training(asked, lambda _: None)]
    groups = {tuple(line[:2]): line[2] for line in lines if line[1:2] == ["virus"]}
    assert groups == {(part, "virus"): n for part, n in zip(SPLITS, "121", strict=True)}


# Progress
