"""Labelled data are read once. Their frames are in one file that every process maps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from labelled_data_helpers import options, pairs_of, train_here, write_labelled

from virnucpro.core.types import FastaRecord
from virnucpro.sequences.kmers import N_FEATURES, frame_composition
from virnucpro.sequences.translate import Chunk, translate_six_frames
from virnucpro.training.frame_dataset import FrameStore, LabelledFrames, read_ids, write_frames
from virnucpro.training.labelled_data import LabelledRecord
from virnucpro.training.networks import mean_and_deviation

SIZES = (300, 210)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return write_labelled(tmp_path / "data", n_groups=4, per_group=2)


@pytest.fixture
def folder(data: Path, tmp_path: Path) -> Path:
    write_frames(tmp_path / "frames", pairs_of(data), SIZES)
    return tmp_path / "frames"


_HEARERS: list[Callable[[str], None]] = []


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        for hearer in _HEARERS:
            hearer(str(arguments[0]))


sys.addaudithook(_hear)  # it cannot be taken away again


@contextmanager
def hearing() -> Iterator[list[str]]:
    """Collect the paths of the files that are opened in the block."""
    opened: list[str] = []
    _HEARERS.append(opened.append)
    try:
        yield opened
    finally:
        _HEARERS.clear()


def test_training_reads_its_fasta_once(data, tmp_path):
    with hearing() as opened_by_one_pass:
        pairs_of(data)
    with hearing() as opened:
        train_here(options(data, tmp_path / "out", finetune=True, layers=1, dim=8, heads=2))
    fasta = str(data.with_name("data.fa"))
    assert opened.count(fasta) == opened_by_one_pass.count(fasta) > 0


def test_frames_equal_those_of_predict(data, folder):
    frames = FrameStore.open(folder)
    found = {}
    sizes = frames.chunks[frames.all.chunk, 2].tolist()
    rows = np.arange(len(frames.all))
    proteins = frames.all.proteins(rows)
    compositions = frames.all.composition(rows).tolist()
    for i, (frame_id, size) in enumerate(zip(read_ids(folder), sizes, strict=True)):
        labels = frames.records[frames.all.record[i]]
        found[frame_id, size] = (labels, proteins[i], compositions[i])
    expected = {}
    for labelled, record in pairs_of(data):
        for size in SIZES:
            for orf in translate_six_frames(list(Chunk.from_record(record, size))):
                bases = orf.coding_sequence(record.sequence)
                composition = frame_composition([bases])[0].tolist()
                expected[orf.id, size] = (labelled, orf.protein, composition)
    assert found == expected
    assert len(expected) > 50


def test_ids_of_any_script_come_back(tmp_path):
    name = "\u00e9t\u00e9_\u6f22"
    record = LabelledRecord(name, is_virus=True, group="a"), FastaRecord(name, "", "ACG" * 100)
    write_frames(tmp_path / "frames", [record], [300])
    ids = read_ids(tmp_path / "frames")
    assert len(ids) == 6 and all(one.startswith(name) for one in ids)


@pytest.mark.parametrize("n_rows", [1, 8191, 20_000])
def test_streamed_mean_and_deviation_are_exact(n_rows):
    values = np.random.default_rng(n_rows).random((n_rows, N_FEATURES), dtype=np.float32)
    mean, deviation = mean_and_deviation(LabelledFrames.from_store(["M"] * n_rows, values))
    assert np.array_equal(mean, values.mean(axis=0))
    assert np.array_equal(deviation, values.std(axis=0))


def test_frames_without_a_row_can_be_read(tmp_path):
    write_frames(tmp_path / "frames", [], SIZES)
    assert len(FrameStore.open(tmp_path / "frames").all) == 0


def test_resume_remakes_the_frames(data, tmp_path):
    asked = {"encoding": "composition", "epochs": 1}
    out = train_here(options(data, tmp_path / "out", **asked)).output
    column = out / "frames" / "composition.npy"
    content = column.read_bytes()
    figures = (out / "held_out.tsv").read_bytes()
    column.write_bytes(content[:-1] + b"?")
    train_here(options(data, out, resume=True, **asked))
    assert column.read_bytes() == content
    assert (out / "held_out.tsv").read_bytes() == figures
