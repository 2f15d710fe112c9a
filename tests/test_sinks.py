"""What a new output takes: a class with its file name, and its place in a list."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from runs import run_inline

import virnucpro
from virnucpro.ground.errors import OutputError
from virnucpro.run.folder import RunDir
from virnucpro.tables.sinks import SINKS, TextSink, all_sinks


class LengthTable(TextSink):
    """A toy: the length of every record."""

    file = "lengths.tsv"
    columns = ("record", "length")

    @classmethod
    def rows(cls, result):
        return [f"{result.record.name}\t{len(result.record.sequence)}\n"]


@pytest.fixture
def with_lengths(monkeypatch):
    monkeypatch.setitem(SINKS, "predict", (*SINKS["predict"], LengthTable))


def lengths(folder: Path) -> dict[str, int]:
    header, *lines = (folder / LengthTable.file).read_text().splitlines()
    assert header == "record\tlength"
    return {name: int(length) for name, length in (line.split("\t") for line in lines)}


@pytest.fixture
def two_files(contigs, tmp_path) -> list[Path]:
    other = tmp_path / "other.fa"
    other.write_text(">late\nGCAGCAGCAGCAGCAGCAGCAGCAGCAGCAGCAGCA\n")
    return [contigs, other]


def test_a_new_output_is_written_by_predict_and_for_each_file(
    make_config, tiny, two_files, with_lengths
):
    config = make_config(*two_files, per_file=True)
    run_inline(config, tiny.head)
    found = lengths(config.output)
    assert len(found) == 41
    assert found["late"] == 36
    samples = [config.output / "samples" / name for name in ("contigs", "other")]
    assert lengths(samples[0]) | lengths(samples[1]) == found
    assert lengths(samples[1]) == {"late": 36}


def test_a_new_output_is_the_runs_own(make_config, tiny, two_files, with_lengths, tmp_path):
    """It is cleared by ``--force``, kept out of the inputs, and refused if it is a link."""
    config = make_config(*two_files, per_file=True)
    run_inline(config, tiny.head)
    assert LengthTable.file in RunDir(config.output).own_names
    proteins = tmp_path / "one.faa"
    proteins.write_text(">p\nMKVLEFPQIL\n")
    run_inline(make_config(proteins, command="extract", force=True), None)
    assert not list(config.output.rglob(LengthTable.file))
    (config.output / LengthTable.file).symlink_to(proteins)
    with pytest.raises(OutputError, match=r"lengths\.tsv is a link"):
        run_inline(make_config(proteins, command="extract", force=True), None)
    assert proteins.read_text() == ">p\nMKVLEFPQIL\n"


def test_the_name_of_an_output_is_written_once_in_the_package():
    """Outside of docstrings, which are prose."""
    names = {sink.file for sink in all_sinks()}
    found = []
    for path in Path(virnucpro.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node not in prose:
                found += [name for name in names if name in str(node.value)]
    assert sorted(found) == sorted(names)
