"""The Python API: the same results as on the command line, and nothing left behind."""

from __future__ import annotations

import ast
import inspect
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import h5py
import numpy as np
import psutil
import pytest
import torch
from Bio.Seq import Seq
from Bio.SeqRecord import SeqRecord
from conftest import open_dna, random_dna
from faulty_workers import POISON, RaisingWorker
from forkserver_runner import virnucpro as command
from run_helpers import CONTIGS, ROOT, again, copies_files, run_inline, vectors, write_fasta

import virnucpro
from virnucpro.core.option_schema import option_names
from virnucpro.core.option_text import with_options
from virnucpro.engine.local import InlineExecutor
from virnucpro.engine.work_options import WorkOptions
from virnucpro.training.options import EvaluateOptions, TrainOptions
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.predict_options import PredictOptions

ON_ONE = {"device": "cpu", "workers": 1}
CLUSTER_OPTIONS = {"plan_only", "no_embed", "executor", "executor_config"}
PROTEINS = [("p1", "MKVLEFPQIL"), ("p2", "MSTNPKPQRK"), ("p3", "MKVLEFPQIL"), ("p0", "MA")]


def traces() -> tuple[object, ...]:
    """Return what a call could leave behind in this process."""
    logger = logging.getLogger("virnucpro")
    return (
        torch.get_num_threads(),
        (list(logger.handlers), logger.level, logger.propagate),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        len(psutil.Process().open_files()),
        threading.active_count(),
        dict(os.environ),
    )


def guide_example() -> str:
    text = (ROOT / "docs/PYTHON.md").read_text()
    (example,) = re.findall(r"# From Python\n\n```python\n(.*?)```", text, flags=re.DOTALL)
    return example


def test_guide_example_runs_without_a_guard_for_main(tmp_path):
    (tmp_path / "examples").symlink_to(CONTIGS.parent)
    (tmp_path / "example.py").write_text(guide_example())
    answer = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert "('protein1', 'protein2') (2, 128)" in lines
    assert any(line.startswith("example_virus_") for line in lines)
    assert (tmp_path / "api-results" / "predictions.tsv").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"examples", "example.py", "api-results"}


def test_workers_start_from_code_without_a_file():
    """As in a cell of IPython."""
    cell = (
        "import virnucpro\n"
        "vectors = virnucpro.embed({'p': 'MKTAYIAKQR'}, model='virnucpro-tiny', device='cpu')\n"
        "print(vectors.ids, vectors.vectors.shape)\n"
    )
    program = f"exec(compile({cell!r}, '<cell>', 'exec'), {{}})"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.stdout == "('p',) (1, 128)\n", answer.stderr


def test_import_loads_nothing_large():
    large = {"torch", "numpy", "h5py", "Bio", "click"}
    code = f"import sys, virnucpro; print({large} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout == "set()\n"
    assert {"predict", "embed", "read_features", "read_predictions"} <= set(dir(virnucpro))
    with pytest.raises(AttributeError, match="nothing"):
        _ = virnucpro.nothing


@pytest.mark.usefixtures("quick_starts")
def test_calls_equal_the_command_line_by_id(tiny, tmp_path):
    models = {"model": str(tiny.model), "head": tiny.head_file}
    calls = list(virnucpro.predict(CONTIGS, **models, **ON_ONE))
    arguments = ("--model", tiny.model, "--head", tiny.head_file, "--device", "cpu")
    command("predict", "-i", CONTIGS, "-o", tmp_path / "run", *arguments, "--workers", "1")
    assert calls == list(virnucpro.read_predictions(tmp_path / "run"))
    assert len(calls) == CONTIGS.read_text().count(">")


def test_records_are_called_in_order_and_resumed(tmp_path):
    rng = np.random.default_rng(2)
    pairs = [("z:1", random_dna(400, rng)), ("a|2", random_dna(60, rng)), ("m", "")]
    seq_records = [SeqRecord(Seq(bases), id=name) for name, bases in pairs]
    calls = list(virnucpro.predict(pairs, output_dir=tmp_path / "run"))
    assert [call.record_id for call in calls] == ["z:1", "a|2", "m"]
    assert [call.status for call in calls] == ["scored", "too_short", "invalid"]
    assert list(virnucpro.predict(seq_records)) == calls
    assert list(virnucpro.predict(pairs, output_dir=tmp_path / "run", resume=True)) == calls
    assert not list((tmp_path / "run").glob(".records*"))


@pytest.mark.usefixtures("quick_starts")
def test_strings_of_numpy_are_sequences_and_ids(tiny):
    bases = "ATGGCAGCAGCTGCTGGT" * 20
    (call,) = virnucpro.predict([(np.str_("a"), np.str_(bases))])
    assert call == next(virnucpro.predict([("a", bases)]))
    proteins = np.array(["MKVLEFPQIL", "MKVLPPQIL"])
    found = virnucpro.embed(list(zip(["p", "q"], proteins, strict=True)), tiny.model)
    usual = virnucpro.embed([("p", "MKVLEFPQIL"), ("q", "MKVLPPQIL")], tiny.model)
    assert np.array_equal(found.vectors, usual.vectors)


def test_embed_returns_vectors_in_input_order(tiny):
    before = traces()
    ids, rows = virnucpro.embed(PROTEINS, model=tiny.model, **ON_ONE)
    assert traces() == before
    assert ids == ("p1", "p2", "p3", "p0")
    assert rows.shape == (4, 32) and rows.dtype == np.float32
    alone = virnucpro.embed(PROTEINS[3:], model=tiny.model, **ON_ONE)
    assert np.array_equal(rows[3], alone.vectors[0]) and np.array_equal(rows[0], rows[2])
    several = virnucpro.embed(PROTEINS, model=tiny.model, device="cpu", workers=2)
    assert np.array_equal(several.vectors, rows)


@pytest.mark.parametrize(
    "given",
    [
        [letters for _, letters in PROTEINS],
        {f"sequence_{number}": letters for number, (_, letters) in enumerate(PROTEINS, 1)},
    ],
)
def test_embed_takes_strings_and_dicts(tiny, given):
    found = virnucpro.embed(given, model=tiny.model, **ON_ONE)
    expected = virnucpro.embed(PROTEINS, model=tiny.model, **ON_ONE)
    assert found.ids == ("sequence_1", "sequence_2", "sequence_3", "sequence_4")
    assert np.array_equal(found.vectors, expected.vectors)


def test_embed_takes_one_string(tiny):
    ids, vectors = virnucpro.embed("MKVLEFPQIL", model=tiny.model, **ON_ONE)
    assert ids == ("sequence_1",) and vectors.shape == (1, 32)


def test_input_takes_paths_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_fasta(tmp_path / "MKT", {"a": "ACGT" * 50})
    expected = list(virnucpro.predict(tmp_path / "MKT"))
    for paths in ("MKT", Path("MKT"), ["MKT"]):
        assert list(virnucpro.predict(input=paths)) == expected
    with pytest.raises(virnucpro.VirnucproError, match="MSTNP: No such file"):
        virnucpro.predict(input="MSTNP")


BAD_PROTEINS = [("p1", "MKVLEFPQIL"), ("p9", "M1"), ("p2", "MST"), ("p8", "M K"), ("p7", None)]


def test_embed_skips_bad_proteins(tiny):
    found = virnucpro.embed(BAD_PROTEINS, model=tiny.model, on_error="skip", **ON_ONE)
    good = virnucpro.embed([BAD_PROTEINS[0], BAD_PROTEINS[2]], model=tiny.model, **ON_ONE)
    assert found.ids == good.ids == ("p1", "p2")
    assert np.array_equal(found.vectors, good.vectors)
    assert found.statuses == {
        **{"p1": "embedded", "p2": "embedded"},
        **dict.fromkeys(("p7", "p8", "p9"), "invalid"),
    }
    assert set(found.notes) == {"p7", "p8", "p9"}
    assert good.statuses == {"p1": "embedded", "p2": "embedded"} and good.notes == {}


def test_embed_without_a_good_protein_is_empty(tiny):
    for proteins in ([("p9", "M1")], [("p9", "M K")], {}):
        found = virnucpro.embed(proteins, model=tiny.model, on_error="skip", **ON_ONE)
        assert (found.ids, found.vectors.shape) == ((), (0, 32))
        assert found.statuses == dict.fromkeys(dict(proteins), "invalid")


@pytest.mark.parametrize("bad", [("p9", "M1"), ("p9", "M K"), ("p9", None)])
def test_embed_raises_for_a_bad_protein(tiny, bad):
    with pytest.raises(virnucpro.VirnucproError, match="p9"):
        virnucpro.embed([("p1", "MKV"), bad], model=tiny.model, **ON_ONE)


def test_embed_refuses_an_id_given_twice(tiny):
    for first, second in [("MKV", "M K"), ("M K", "MKV"), ("M K", "M L"), ("MKV", "MST")]:
        with pytest.raises(virnucpro.VirnucproError, match="p1"):
            virnucpro.embed(
                [("p1", first), ("p1", second)], model=tiny.model, on_error="skip", **ON_ONE
            )


def test_on_error_has_two_values():
    with pytest.raises(virnucpro.VirnucproError, match="on_error is 'ignore'") as caught:
        virnucpro.embed("MKV", on_error="ignore")
    assert caught.value.hint == "give 'raise' or 'skip'"


# extract


def test_extract_gives_what_the_command_gives(tiny, tmp_path):
    options = {"model": str(tiny.model), "chunk_size": 300}
    result = virnucpro.extract(CONTIGS, output_dir=tmp_path / "api", **options, **ON_ONE)
    words = ("--model", tiny.model, "--chunk-size", "300", "--device", "cpu", "--workers", "1")
    assert command("extract", "-i", CONTIGS, "-o", tmp_path / "run", *words).returncode == 0
    expected = vectors(tmp_path / "run")
    assert result.folder == tmp_path / "api"
    assert dict(zip(result.ids, result.vectors, strict=True)).keys() == expected.keys()
    for name, vector in result:
        assert np.array_equal(vector, expected[name])
    records = (tmp_path / "run" / "records.tsv").read_text()
    assert (tmp_path / "api" / "records.tsv").read_text() == records
    statuses = [list(map(str, record)) for record in result.records()]
    assert statuses == [line.split("\t") for line in records.splitlines()[1:]]
    result.close()
    assert (tmp_path / "api").is_dir(), "a folder with a name stays"


def test_extract_without_a_folder_leaves_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = {"model": str(tiny.model), **ON_ONE}
    ids = [name for name, _ in virnucpro.extract(PROTEINS, **options)]
    assert sorted(ids) == ["p0", "p1", "p2", "p3"]
    with virnucpro.extract(PROTEINS, **options) as result:
        assert result.vectors.shape == (4, 32)
        assert [len(batch.ids) for batch in result.batches(3)] == [3, 1]
    result = virnucpro.extract(PROTEINS, **options)
    assert len(list(tmp_path.iterdir())) == 1
    del result
    assert not list(tmp_path.iterdir())


def test_extract_that_fails_leaves_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(virnucpro.VirnucproError, match="no layer 99"):
        virnucpro.extract(PROTEINS, model=str(tiny.model), layer=99, **ON_ONE)
    assert not list(tmp_path.iterdir())


def test_extract_gives_residues_one_by_one(tiny):
    with virnucpro.extract(PROTEINS, model=str(tiny.model), pooling="none", **ON_ONE) as result:
        shapes = {name: vector.shape for name, vector in result}
        assert shapes == {name: (len(letters), 32) for name, letters in PROTEINS}
        with pytest.raises(virnucpro.VirnucproError, match="a row for each residue"):
            _ = result.vectors


def test_extract_of_nothing_has_no_rows(tiny):
    options = {"model": str(tiny.model), "input_type": "protein", **ON_ONE}
    with virnucpro.extract([("p9", "M1")], **options) as result:
        assert (result.ids, result.vectors.shape) == ((), (0, 32))
        assert [record.status for record in result.records()] == ["invalid"]


def test_failed_call_leaves_no_trace(tiny):
    before = traces()
    with pytest.raises(virnucpro.VirnucproError, match=r"1 of 2 .* p9 is invalid") as caught:
        virnucpro.embed([("p1", "MKV"), ("p9", "M1")], model=tiny.model, **ON_ONE)
    assert caught.value.hint
    assert traces() == before


def test_warning_names_the_argument(tiny, capsys):
    bases = [("p1", "ACGT" * 20)]
    virnucpro.embed(bases, tiny.model, **ON_ONE)
    warning = "records: read as proteins, but the letters do not look like proteins"
    assert capsys.readouterr().err.strip().endswith(f" {warning}")
    list(virnucpro.predict(bases, input_type="protein"))
    assert f"{warning} (hint: leave input_type out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sequences", "options", "words"),
    [
        ("nowhere.fa", {}, "nowhere.fa"),
        (CONTIGS, {"device": "gpu"}, "device is 'gpu'"),
        (CONTIGS, {"devise": "cpu"}, "there is no option devise"),
        (CONTIGS, {"input": "x"}, "both sequences and input"),
        (CONTIGS, {"executor": "parsl"}, "there is no option executor"),
        (CONTIGS, {"argv": 3}, "there is no option argv"),
        (CONTIGS, {"model": ""}, "model is empty"),
        (CONTIGS, {"workers": 1.5}, "workers is 1.5"),
        (CONTIGS, {"worker_timeout": 0}, "worker_timeout is 0"),
        ([("a b", "ACGT")], {}, "the id 'a b' is empty or has blanks"),
        ([("a", "ACGT\n>b\nACGT")], {}, "^a: its sequence has blanks or >"),
        ([("a", ">evil")], {}, "^a: its sequence has blanks or >"),
        ([("a", None)], {}, "^a: its sequence is not text: None"),
        ([str(CONTIGS), ("a", "ACGT")], {}, "is not a path, unlike the first"),
        ([str(CONTIGS), None], {}, "is not a path, unlike the first"),
        (None, {}, "no sequences"),
        (SeqRecord(Seq("ACGT"), id="a"), {}, "neither a path, a sequence, a list nor"),
        ([("a", "ACGT")], {"output_dir": ""}, "output_dir is empty"),
        ([("a", "ACGT")], {"output_dir": "a\0b"}, r"the path a\\x00b has a NUL byte"),
        ("a\0b.fa", {}, r"the path a\\x00b\.fa has a NUL byte"),
        ([("a", "ACGT")], {"threshold": True}, "threshold is True"),
        ([3], {}, "3 is not a record"),
        ([CONTIGS, CONTIGS], {}, "is named twice"),
        ([("a", "ACGT"), ("a", "ACGT")], {}, r"^records:3: the id a occurs twice"),
        (["ACG1"], {}, "^'ACG1' is neither a file nor a sequence$"),
    ],
)
def test_mistake_is_an_error_with_a_hint(sequences, options, words):
    with pytest.raises(virnucpro.VirnucproError, match=words) as caught:
        virnucpro.predict(sequences, **options)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("function", "option", "hint"),
    [
        (virnucpro.predict, "thresholds", "did you mean threshold? options are add, "),
        (virnucpro.predict, "layers", "it is an option of extract; options are add, "),
        (virnucpro.embed, "output_dir", "it is an option of predict and extract; options are "),
        (virnucpro.embed, "qqq", "options are "),
    ],
)
def test_unknown_option_has_its_own_advice(function, option, hint):
    with pytest.raises(virnucpro.VirnucproError) as caught:
        function({"a": "ACGT"}, **{option: 1})
    assert str(caught.value.hint).startswith(hint)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"output_dir": "here"}, "no option output_dir"),
        ({"input": "a.fa"}, "both sequences and input"),
        ({"input_type": "nucleotide"}, "no option input_type"),
        ({"report": True}, "no option report"),
        ({"pooling": "none"}, "not one per residue"),
    ],
)
def test_embed_refuses_bad_input(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(virnucpro.VirnucproError, match=words):
        virnucpro.embed([("a", "MKVLEFPQIL")], **options)
    assert not list(tmp_path.iterdir())


def test_unreadable_file_is_an_error(tmp_path):
    (tmp_path / "bad.fa").write_text("no FASTA")
    with pytest.raises(virnucpro.VirnucproError, match=r"bad\.fa"):
        virnucpro.predict([CONTIGS, tmp_path / "bad.fa"])
    calls = virnucpro.predict([CONTIGS, tmp_path / "bad.fa"], strict=False)
    assert {call.sample for call in calls} == {"contigs"}


# Features


@pytest.fixture
def repeated(tmp_path) -> Path:
    rng = np.random.default_rng(4)
    proteins = ["M" + "".join(rng.choice(list("DEFGHIKL"), 90)) for _ in range(60)]
    records = {f"p{i}": proteins[i % 60] for i in range(90)}
    return write_fasta(tmp_path / "proteins.faa", records)


def test_features_by_id_include_copies(make_config, repeated):
    config = make_config(repeated, command="extract")
    run_inline(config, None)
    assert copies_files(config.output)
    pairs = list(virnucpro.read_features(config.output))
    expected = vectors(config.output)
    assert len(pairs) == len(dict(pairs)) == len(expected) == 90
    assert all(np.array_equal(vector, expected[name]) for name, vector in pairs)


def test_vectors_read_while_the_file_is_open(make_config, tiny, contigs):
    config = make_config(contigs)
    run_inline(config, tiny.head)
    with h5py.File(config.output / "features.h5") as h5:
        assert len(dict(virnucpro.read_features(config.output))) == len(h5["ids"])


def test_vector_batches_cross_files(make_config, repeated):
    config = make_config(repeated, command="extract", store="bfloat16")
    run_inline(config, None)
    batches = list(virnucpro.iter_features(config.output, batch=40))
    assert [batch.vectors.shape for batch in batches] == [(40, 32), (40, 32), (10, 32)]
    pairs = [pair for ids, vectors in batches for pair in zip(ids, vectors, strict=True)]
    expected = list(virnucpro.read_features(config.output))
    assert {name for name, _ in expected} == {f"p{i}" for i in range(90)}
    for (name, vector), (other, row) in zip(pairs, expected, strict=True):
        assert name == other and np.array_equal(vector, row)


def test_replaced_vectors_are_left_out(make_config, tiny, tmp_path):
    rng = np.random.default_rng(6)
    poison = "".join({"W": "TGG", "C": "TGC"}[residue] for residue in POISON)
    start = open_dna(900, rng)
    others = open_dna(600, rng)
    fasta = write_fasta(tmp_path / "in.fa", {"bad": start + poison, "good": others})
    mended = write_fasta(tmp_path / "mended.fa", {"bad": start[300:]})
    config = make_config(fasta)
    run_inline(config, tiny.head, executor=InlineExecutor(worker=RaisingWorker))
    before = dict(virnucpro.read_features(config.output))
    run_inline(again(config, input=(mended,), resume=True, add=True), tiny.head)
    pairs = list(virnucpro.read_features(config.output))
    expected = vectors(config.output)
    assert len(pairs) == len(expected) and dict(pairs).keys() == expected.keys() != before.keys()
    assert all(np.array_equal(vector, expected[name]) for name, vector in pairs)
    (config.output / "features/parts.json").unlink()
    with pytest.raises(virnucpro.VirnucproError, match=r"parts\.json is missing") as caught:
        next(virnucpro.read_features(config.output))
    assert "resume=True" in caught.value.hint


def test_residues_come_as_rows(make_config, repeated):
    config = make_config(repeated, command="extract", pooling="none")
    run_inline(config, None)
    assert {vector.shape for _, vector in virnucpro.read_features(config.output)} == {(91, 32)}
    with pytest.raises(virnucpro.VirnucproError, match="a row for each residue"):
        virnucpro.iter_features(config.output)


def test_folder_without_vectors_is_refused(tmp_path):
    with pytest.raises(virnucpro.VirnucproError, match="contains no run"):
        virnucpro.read_features(tmp_path)
    with pytest.raises(virnucpro.VirnucproError, match="does not exist"):
        virnucpro.read_predictions(tmp_path)
    virnucpro.predict(CONTIGS, output_dir=tmp_path / "run")
    with pytest.raises(virnucpro.VirnucproError, match="the scorer called it") as caught:
        virnucpro.read_features(tmp_path / "run")
    assert "predict with a model" in caught.value.hint


# packages that a call from Python reaches
REACHED = ("core", "sequences", "models", "store", "engine", "viral", "results", "workflows")
# of commands that Python does not have
OTHERS = {"manage.py", "bench.py", "compare_reference.py", "work_share.py", "yaml_config.py"}


def plain_texts_of_errors() -> Iterator[tuple[str, str]]:
    """Return the texts of errors, except those that ``with_options`` makes."""
    package = Path(virnucpro.__file__).parent
    for path in (path for name in REACHED for path in (package / name).rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if type(node) is ast.Call]
        for call in calls if path.name not in OTHERS else ():
            texts = [keyword.value for keyword in call.keywords if keyword.arg == "hint"]
            texts += call.args[:2] if ast.unparse(call.func).endswith("Error") else []
            for text in texts:
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                words = [one.value for one in parts if isinstance(one, ast.Constant)]
                yield f"{path.name}:{text.lineno}", "".join(map(str, words))


def test_errors_mention_options_by_field() -> None:
    """So Python can write them as arguments. Commands in backquotes stay commands."""
    names = option_names(PredictOptions, ExtractOptions) - CLUSTER_OPTIONS
    texts = list(plain_texts_of_errors())
    assert len(texts) > 100
    for where, text in texts:
        said = " ".join(text.split("`")[::2])
        mentioned = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]+)", said)}
        assert not mentioned & names, (where, text)


def test_texts_mention_options_that_exist() -> None:
    known = option_names(PredictOptions, ExtractOptions, EvaluateOptions, TrainOptions, WorkOptions)
    known |= {"output", "vectors"}  # of the command export
    package = Path(virnucpro.__file__).parent
    n_mentions = 0
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "with_options":
                template = node.args[0]
                if isinstance(template, ast.Constant):
                    values = dict.fromkeys((one.arg for one in node.keywords), "x")
                    mentioned = with_options(template.value, **values).names
                    assert mentioned <= known, (path.name, template.value)
                    n_mentions += len(mentioned)
    assert n_mentions > 80


def test_call_error_names_the_argument(tmp_path: Path) -> None:
    fasta = write_fasta(tmp_path / "in.fa", {"a": "ACGTRYSWKMBDHV" * 20})
    with pytest.raises(virnucpro.VirnucproError) as caught:
        virnucpro.predict(fasta)
    assert "input_type='nucleotide'" in caught.value.hint and "--" not in caught.value.hint


def as_given(name: str, kind: object) -> object:
    """Return the type of an option, for which a path may be text, and a list one value."""
    if name == "layers":
        return int | str | Sequence[int | str]
    if get_origin(kind) is tuple:
        value = get_args(kind)[0]
        return value | Sequence[value]
    text = str | Path
    return {Path: text, Path | None: text | None}.get(kind, kind)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("function", "options", "own", "without"),
    [
        ("predict", PredictOptions, {"output_dir", "on_progress"}, {"input", "output_dir"}),
        (
            "extract",
            ExtractOptions,
            {"output_dir", "on_progress", "layer"},
            {"input", "output_dir"},
        ),
        (
            "embed",
            ExtractOptions,
            {"model", "on_progress", "on_error", "layer", "pooling"},
            {"input", "input_type", "model", "genetic_code", "chunk_size", "format", "store"}
            | {"output_dir", "per_file", "resume", "add", "force", "keep_intermediate", "report"}
            | {"include", "layers", "pooling"},
        ),
    ],
)
def test_signature_shows_types_and_defaults(
    function: str, options: type, own: set[str], without: set[str]
) -> None:
    called = getattr(virnucpro, function)
    shown = dict(inspect.signature(called).parameters)
    assert get_type_hints(called).keys() == {*shown, "return"}
    for name in {"sequences", "input", *own}:
        del shown[name]
    assert shown.keys() == option_names(options) - CLUSTER_OPTIONS - without
    types = get_type_hints(options)
    declared = {field.name: field.default for field in fields(options)} | {"strict": True}
    for name, parameter in shown.items():
        assert (name, parameter.annotation) == (name, as_given(name, types[name]))
        assert (name, parameter.default) == (name, declared[name])
        assert f"    {name}: " in called.__doc__
    assert "--" not in called.__doc__.replace("train --regions", "")


def test_embed_shows_one_pooling() -> None:
    parameter = inspect.signature(virnucpro.embed).parameters["pooling"]
    assert parameter.default == "mean"
    assert parameter.default in get_args(parameter.annotation)


# Regions and progress


@pytest.fixture(scope="module")
def with_prophage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    viral = "".join(CONTIGS.read_text().split(">example_virus_01")[1].split("\n")[1:]).split(">")[0]
    rng = np.random.default_rng(9)
    records = {"host": random_dna(12_000, rng), "virus": viral * 4, "short": "ACGT"}
    return write_fasta(tmp_path_factory.mktemp("regions") / "in.fa", records)


def test_call_has_the_regions_of_the_files(with_prophage: Path, tmp_path: Path) -> None:
    calls = list(virnucpro.predict(with_prophage, output_dir=tmp_path / "run"))
    found = [
        [call.record_id, region.extent, str(region.start + 1), str(region.end), region.is_virus]
        for call in calls
        for region in call.regions
    ]
    rows = [line.split("\t") for line in (tmp_path / "run/regions.tsv").read_text().splitlines()]
    assert found == [[row[1], *row[3:6], row[10] != ""] for row in rows[1:]] != []
    assert list(virnucpro.predict(with_prophage)) == calls
    assert list(virnucpro.read_predictions(tmp_path / "run")) == calls
    without = list(virnucpro.predict(with_prophage, regions=False))
    assert [call.record_id for call in without] == ["host", "virus", "short"]
    assert not any(call.regions for call in without)
    for call in calls:
        assert len(call.identities) == sum(region.is_virus for region in call.regions)
    assert [len(call.identities) for call in without] == [call.is_virus for call in without]


@pytest.mark.parametrize(
    ("table", "pattern", "text", "words"),
    [
        ("predictions", "^", "<html>\n", "its columns"),
        ("predictions", "fdr\t", "", "its columns"),
        ("predictions", "\tscored\t", "\tlost\t", "the status lost and the call"),
        ("predictions", "\t0\\.9", "\tnan", "nan"),
        ("predictions", "\tvirus\t", "\tVIRUS\t", "the call VIRUS"),
        ("predictions", "....\t[^\t]*$", "", "its end is missing"),
        ("predictions", "\n\\Z", "", "its end is missing"),
        ("regions", "\n\\Z", "", "its end is missing"),
        ("regions", "\tvirus\tin\t", "\tnobody\tin\t", "but not in the table of records"),
        ("regions", "\twhole\t", "\thalf\t", "is a half"),
    ],
)
def test_changed_table_is_an_error_with_a_hint(
    with_prophage: Path, tmp_path: Path, table: str, pattern: str, text: str, words: str
) -> None:
    virnucpro.predict(with_prophage, output_dir=tmp_path / "run")
    path = tmp_path / f"run/{table}.tsv"
    damaged, n = re.subn(pattern, text, path.read_text(), count=1)
    assert n == 1
    path.write_text(damaged)
    with pytest.raises(virnucpro.VirnucproError, match=words) as error:
        list(virnucpro.read_predictions(tmp_path / "run"))
    assert "resume=True" in error.value.hint and "--" not in error.value.hint


@pytest.mark.usefixtures("quick_starts")
def test_progress_is_reported_by_stage(tiny) -> None:
    told: list[virnucpro.Progress] = []
    virnucpro.predict(
        CONTIGS, model=str(tiny.model), device="cpu", workers=2, on_progress=told.append
    )
    assert all(0 <= one.done <= one.total or not one.total for one in told)
    embedding = [one for one in told if one.stage == "embedding"]
    assert [one.done for one in embedding] == [*range(embedding[0].total + 1)]
    stages = [name for name, _ in groupby(one.stage for one in told)]
    assert len(stages) == len(set(stages)), "no stage comes twice"
    assert stages[-1] == "writing tables" and told[-1].done == told[-1].total


def test_error_in_on_progress_ends_the_run(tmp_path: Path) -> None:
    def stop(progress: virnucpro.Progress) -> None:
        if progress.stage == "scoring":
            raise LookupError(progress.stage)

    expected = list(virnucpro.predict(CONTIGS))
    before = traces()  # with the scorer, which a process keeps
    with pytest.raises(LookupError, match="scoring"):
        virnucpro.predict(CONTIGS, output_dir=tmp_path / "run", on_progress=stop)
    assert traces() == before
    calls = virnucpro.predict(CONTIGS, output_dir=tmp_path / "run", resume=True)
    assert list(calls) == expected
