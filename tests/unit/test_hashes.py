"""Damage to the results of a finished run is noticed by every reader of the damaged file."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import open_dna, random_dna
from run_helpers import (
    again,
    flip_bit,
    forget_hashes,
    invoke,
    run_inline,
    write_run_json,
)
from scorer_run_helpers import predict, write

from virnucpro.core.atomic_io import hash_file
from virnucpro.core.events import RunEvent
from virnucpro.core.json_checksum import parse_checked
from virnucpro.core.safe_dir import SafeDir
from virnucpro.results.outputs import open_run_dir
from virnucpro.results.report.run_report import report_folder
from virnucpro.store.checksums import Outputs
from virnucpro.store.feature_file import read_embeddings, read_label, write_embeddings
from virnucpro.store.file_checksum import checksum_of
from virnucpro.workflows.find_proviruses import find_regions
from virnucpro.workflows.predict_options import RegionsOptions

REGIONS = {"regions.tsv", "regions.bed", "regions.gff3", "regions.fasta", "tracks.tsv.gz"}
GENES = {"genes.tsv", "genes.gff3", "proteins.faa"}
VIRUS_FILES = {"viruses.tsv", "viruses.fasta", "miuvig.tsv", *GENES}
VERDICT = {*VIRUS_FILES, "samples.tsv", "virnucpro_mqc.tsv"}
RECORDS = {"predictions.tsv", "prediction_results.txt", "viral.fasta"}
SETTINGS = {"per_file": True, "threshold": 0.0}  # so that every record is called viral
SCORES = "scores/000000.scores"
RUN_FILES = {*RECORDS, "prediction_results_highestscore.csv", "report.html", *VERDICT, *REGIONS}

SHARED_FILES = {"report.html", "samples.tsv", "virnucpro_mqc.tsv"}  # not of each file


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two files with tables per file, and with regions."""
    folder = tmp_path_factory.mktemp("finished")
    rng = np.random.default_rng(8)
    sources = [
        write(folder / f"{name}.fa", long=random_dna(12_000, rng), open=open_dna(900, rng))
        for name in ("a", "b")
    ]
    predict(*sources, to=folder / "run", **SETTINGS)
    return folder / "run"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def say(*words: object) -> tuple[int, str]:
    """Run a command. -> its exit code, and its output on one line"""
    code, shown = invoke(*words)
    return code, " ".join(shown.split())


def hashes_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / "run.json").read_text())["outputs"]


def test_flipped_bit_anywhere_in_run_json_is_reported(copied):
    path = copied / "run.json"
    text = path.read_bytes()
    facts = parse_checked(text)
    assert facts == {
        name: value
        for name, value in json.loads(text).items()
        if name not in ("json_format", "sha256")
    }
    changed = bytearray(text)
    for place in range(len(text)):
        bit = 1 << place % 8
        changed[place] ^= bit
        with pytest.raises(ValueError):
            parse_checked(bytes(changed))
        changed[place] ^= bit
    assert parse_checked(bytes(changed)) == facts


def test_flipped_run_json_ends_each_command(copied, finished):
    text = (copied / "run.json").read_bytes()
    rng = np.random.default_rng(1)
    commands = [("status",), ("status", "--verify"), ("report",), ("regions",)]
    for place in rng.integers(0, len(text), 20).tolist():
        (copied / "run.json").write_bytes(text)
        flip_bit(copied / "run.json", place)
        for command, *more in commands:
            code, told = say(command, copied, *more)
            assert code == 73 and "run.json is damaged" in told, (place, command)
        source = finished.parent / "a.fa"
        code, told = say("predict", "-i", source, "-o", copied, "--resume", "-q")
        assert code == 73 and "run.json is damaged" in told
    (copied / "run.json").write_bytes(text)
    assert say("status", copied, "--verify")[0] == 0


def test_run_json_of_older_versions_is_unverified(copied):
    stored = json.loads((copied / "run.json").read_text())
    del stored["sha256"], stored["json_format"]
    (copied / "run.json").write_text(json.dumps(stored, indent=2))
    code, told = say("status", copied, "--verify")
    assert code == 0 and "run.json has no SHA-256 of its own" in told
    assert say("report", copied)[0] == 0  # which writes run.json
    assert "run.json has no SHA-256" not in say("status", copied, "--verify")[1]


def test_inputs_are_compared_with_run_json(tmp_path):
    rng = np.random.default_rng(8)
    one, two = (write(tmp_path / f"{name}.fa", **{name: open_dna(900, rng)}) for name in "ab")
    predict(one, two, to=tmp_path / "run")
    assert say("status", tmp_path / "run", "--verify")[1].endswith("2 inputs")
    two.unlink()
    code, told = say("status", tmp_path / "run", "--verify")
    assert code == 0 and "1 input; 1 input gone, and not compared" in told
    flip_bit(one, 100)
    code, told = say("status", tmp_path / "run", "--verify")
    assert code == 1 and f"changed {one}: this input has another SHA-256 than in run.json" in told


def test_every_output_has_its_sha256(finished):
    sample_files = {f"samples/{one}/{name}" for one in "ab" for name in RUN_FILES - SHARED_FILES}
    expected = RUN_FILES | sample_files | {SCORES}
    assert set(hashes_of(finished)) == expected
    code, told = say("status", finished, "--verify")
    assert code == 0 and f"verified intact: {len(expected)} outputs" in told


def test_verify_names_one_flipped_bit(copied):
    names = RUN_FILES | {"samples/b/predictions.tsv", SCORES}
    for name in names:
        flip_bit(copied / name)
    code, told = say("status", copied, "--verify")
    assert code == 1 and told.count("damaged ") == len(names)
    for name in names:
        assert f"damaged {copied / name} was changed" in told
    code, told = invoke("status", copied, "--verify", "--json")
    assert code == 1 and len(json.loads(told)["damaged"]) == len(names)
    assert say("status", copied)[0] == 0  # which reads no table


@pytest.mark.parametrize("name", sorted(RECORDS))
@pytest.mark.parametrize("command", ["report", "regions", "compare"])
def test_readers_refuse_damaged_results(copied, finished, name, command):
    before = {path: path.read_bytes() for path in Outputs(open_run_dir(copied)).paths()}
    flip_bit(copied / name)
    code, told = say(command, copied, *([finished] if command == "compare" else []))
    if command == "compare" and name == "viral.fasta":  # which it does not read
        assert code == 0
        return
    assert code == 65
    assert f"{copied / name} was changed" in told and "--resume" in told
    for path, content in before.items():
        assert path.name == name or path.read_bytes() == content


def test_resume_rewrites_damaged_tables(copied, finished):
    sources = [finished.parent / f"{name}.fa" for name in ("a", "b")]
    for name in ("predictions.tsv", "samples/a/viral.fasta", "regions.bed"):
        flip_bit(copied / name)
    predict(*sources, to=copied, resume=True, **SETTINGS)
    for path in Outputs(open_run_dir(finished)).paths():
        name = path.relative_to(finished)
        assert name.name == "report.html" or (copied / name).read_bytes() == path.read_bytes()
    assert say("status", copied, "--verify")[0] == 0


@pytest.mark.parametrize(
    ("command", "name"), [("report", "report.html"), ("regions", "tracks.tsv.gz")]
)
def test_damaged_report_is_rewritten(copied, command, name):
    flip_bit(copied / name)
    code, told = say("status", copied, "--verify")
    assert code == 1 and "--resume" in told
    assert say(command, copied)[0] == 0
    assert say("status", copied, "--verify")[0] == 0


def test_hashes_follow_regions_and_report(tmp_path, finished):
    sources = [finished.parent / f"{name}.fa" for name in ("a", "b")]
    predict(*sources, to=tmp_path / "run", regions=False, report=False, **SETTINGS)
    assert not {"report.html", *REGIONS} & set(hashes_of(tmp_path / "run"))
    assert say("regions", tmp_path / "run")[0] == 0
    assert say("report", tmp_path / "run")[0] == 0
    expected = hashes_of(finished)
    found = hashes_of(tmp_path / "run")
    for name in ("report.html", SCORES):  # the page has times, and the scores have no regions
        del expected[name], found[name]
    assert found == expected
    assert say("status", tmp_path / "run", "--verify")[0] == 0


def test_missing_output_is_named(copied):
    (copied / "prediction_results.txt").unlink()
    code, told = say("status", copied, "--verify")
    assert code == 1 and f"{copied}/prediction_results.txt is missing" in told
    assert "missing prediction_results.txt: --resume writes them if the input is there" in told
    assert say("report", copied)[0] == 0


def test_old_run_without_hashes_is_read(copied, finished):
    forget_hashes(copied)
    flip_bit(copied / "viral.fasta")
    code, told = say("status", copied, "--verify")
    assert code == 0 and "outputs were not verified: run.json has no SHA-256 of them" in told
    assert say("compare", copied, finished)[0] == 0
    assert say("report", copied)[0] == 0
    assert say("regions", copied)[0] == 0
    assert "outputs" not in json.loads((copied / "run.json").read_text())


def test_path_outside_the_run_is_not_read(copied, tmp_path):
    (tmp_path / "outside.tsv").write_text("of somebody else\n")
    stored = json.loads((copied / "run.json").read_text())
    stored["outputs"] |= dict.fromkeys((f"{tmp_path}/outside.tsv", "../outside.tsv"), "0" * 64)
    del stored["outputs"]["viral.fasta"]
    write_run_json(copied, stored)
    code, told = say("status", copied, "--verify")
    assert code == 0 and "outside" not in told
    assert "; 1 output without a SHA-256 in run.json" in told


def test_failed_write_keeps_earlier_hashes(copied):
    before = hashes_of(copied)
    (copied / "regions.gff3").unlink()
    (copied / "regions.gff3").mkdir()
    code, told = say("regions", copied)
    assert code == 73 and str(copied / "regions.gff3") in told
    del before["regions.gff3"]
    assert hashes_of(copied) == before


def test_output_is_hashed_while_written(tmp_path):
    (tmp_path / "run").mkdir()
    outputs = Outputs(open_run_dir(tmp_path / "run"))
    path = outputs.rundir.report
    lines = [f"line {i}\n".encode() for i in range(100)]
    with outputs.writing() as tree, tree.atomic_write(path) as out:
        out.writelines(lines)
    assert outputs.hash() == {"report.html": hash_file(path)}
    path.write_text("what somebody else wrote since")
    assert outputs.hash() == {"report.html": hashlib.sha256(b"".join(lines)).hexdigest()}


class Killed(BaseException):
    """Stands for a kill of the process. No code in the package catches it."""


def at_call(number: int, name: str) -> Callable[..., None]:
    """Stands for the system call at which a process is killed."""
    left = [number]
    real = getattr(os, name)

    def call(*arguments: object, **named: object) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise Killed
        real(*arguments, **named)

    return call


def make_other(folder: Path, names: Collection[str]) -> None:
    """Change the content of outputs, as if an earlier command had written them."""
    stored = json.loads((folder / "run.json").read_text())
    for place in stored["outputs"]:
        if Path(place).name in names:
            (folder / place).write_text("other\n")
            stored["outputs"][place] = hash_file(folder / place)
    write_run_json(folder, stored)


@pytest.mark.parametrize(
    ("command", "names", "n_renames", "apart"),
    [("predict", RECORDS, 20, 4), ("regions", REGIONS, 15, 2), ("report", {"report.html"}, 2, 1)],
)
def test_kill_before_run_json_is_no_damage(
    copied, finished, monkeypatch, chaos_seed, command, names, n_renames, apart
):
    """Files appear one by one, each by a rename. More rounds stop at other ones."""
    sources = [finished.parent / f"{name}.fa" for name in ("a", "b")]
    number = chaos_seed % apart + 1 - apart
    is_over = False
    while not is_over:
        number += apart
        shutil.rmtree(copied)
        shutil.copytree(finished, copied)
        make_other(copied, names)
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr("os.replace", at_call(number, "replace"))
            match command:
                case "predict":
                    predict(*sources, to=copied, resume=True)
                case "regions":
                    find_regions(RegionsOptions(folder=copied), lambda _: None)
                case "report":
                    report_folder(copied)
            is_over = True
        code, told = say("status", copied, "--verify")
        assert code == 0, (number, told)
    assert number > n_renames


@pytest.mark.parametrize("command", ["predict", "extract"])
@pytest.mark.parametrize("name", ["features.h5", "features/parts.json", "features/000000.h5"])
def test_flipped_bit_in_vectors_is_noticed(tmp_path, tiny, make_config, command, name):
    fasta = write(tmp_path / "in.fa", a=open_dna(300, np.random.default_rng(3)))
    config = make_config(fasta, command=command)
    head = tiny.head if command == "predict" else None
    run_inline(config, head)
    assert say("status", config.output, "--verify")[0] == 0
    path = config.output / name
    stored = hashes_of(config.output)[name]
    assert stored == checksum_of([path.read_bytes()], like=stored)
    before = path.read_bytes()
    flip_bit(path)
    code, told = say("status", config.output, "--verify")
    assert code == 1 and told.count("damaged /") == 1 and name in told
    assert say("report", config.output)[0] == 0  # which reads no vectors
    run_inline(again(config, resume=True), head)
    assert path.read_bytes() == before
    assert say("status", config.output, "--verify")[0] == 0


def test_another_whole_feature_file_is_noticed(tmp_path, make_config):
    """Its label is correct. Only ``run.json`` shows that it is not from this run."""
    fasta = write(tmp_path / "in.fa", a=open_dna(300, np.random.default_rng(3)))
    config = make_config(fasta, command="extract")
    run_inline(config, None)
    path = config.output / "features/000000.h5"
    label = read_label(path, {})
    before = path.read_bytes()
    found = read_embeddings(path, label.attributes)
    other = replace(found, vectors=found.vectors + np.float32(1))
    write_embeddings(path, other, label.attributes, SafeDir(config.output))
    code, told = say("status", config.output, "--verify")
    assert code == 1 and "features/000000.h5 is a complete feature file, but run.json has" in told
    assert "delete it, then repeat the command" in told
    path.unlink()
    code, told = say("status", config.output, "--verify")
    assert code == 1 and "features/000000.h5 is missing" in told
    run_inline(again(config, resume=True), None)
    assert path.read_bytes() == before
    assert say("status", config.output, "--verify")[0] == 0


def make_xxh128sum(folder: Path) -> Path:
    """Make a program that checks as ``xxh128sum`` does, for machines without it."""
    folder.mkdir()
    program = folder / "xxh128sum"
    program.write_text(
        f"""#!{sys.executable}
import sys, xxhash
assert sys.argv[1:] == ["--check", "--quiet"]
for line in sys.stdin:
    digest, _, name = line.rstrip().partition("  ")
    with open(name, "rb") as file:
        if xxhash.xxh3_128_hexdigest(file.read()) != digest:
            sys.exit(f"{{name}}: FAILED")
"""
    )
    program.chmod(0o755)
    return folder


def test_system_tools_verify_every_output(tmp_path, make_config):
    """With the commands in docs/OUTPUT.md."""
    fasta = write(tmp_path / "in.fa", a=open_dna(900, np.random.default_rng(3)))
    config = make_config(fasta, command="extract")
    run_inline(config, None)
    hashes = hashes_of(config.output)
    assert {"features/000000.h5", "features.h5", "records.tsv"} <= set(hashes)
    named = {name for name, digest in hashes.items() if digest.startswith("xxh3-128:")}
    assert named == {"features/000000.h5"}
    page = (Path(__file__).parents[2] / "docs/OUTPUT.md").read_text()
    _, _, section = page.partition("## Checksums")
    block = section.split("```sh\ncd results/\n")[1].split("```")[0]
    python = f"{shlex.quote(sys.executable)} -c"
    command = block.replace("python -c", python)

    tools = make_xxh128sum(tmp_path / "bin")

    def verify() -> int:
        environment = {**os.environ, "PATH": f"{os.environ['PATH']}:{tools}"}
        script = ["bash", "-e", "-o", "pipefail", "-c", command]
        return subprocess.run(script, cwd=config.output, env=environment).returncode

    assert verify() == 0
    for name in ("features/000000.h5", "features.h5"):
        flip_bit(config.output / name, 100)
        assert verify() != 0
        flip_bit(config.output / name, 100)
        assert verify() == 0
    stored = json.loads((config.output / "run.json").read_text())["sha256"]
    assert "`head -c -83 run.json | sha256sum`" in section
    text = (config.output / "run.json").read_bytes()
    assert hashlib.sha256(text[:-83]).hexdigest() == stored


@pytest.mark.parametrize("layout", ["parquet", "pt"])
def test_damage_in_other_formats_is_repaired(tmp_path, make_config, layout):
    fasta = write(tmp_path / "in.fa", a=open_dna(300, np.random.default_rng(3)))
    config = make_config(fasta, command="extract", format=layout)
    run_inline(config, None)
    path = config.output / f"features/000000.{layout}"
    before = path.read_bytes()
    flip_bit(path)
    code, told = say("status", config.output, "--verify")
    assert code == 1 and f"{path.name} was changed" in told
    run_inline(again(config, resume=True), None)
    assert path.read_bytes() == before
    assert say("status", config.output, "--verify")[0] == 0
    open_run_dir(config.output).delete_results()  # as --force does
    assert not path.parent.exists()


def test_unfinished_outputs_are_not_damaged(copied, finished):
    sources = [finished.parent / f"{name}.fa" for name in ("a", "b")]
    codes = set()

    def look(_: RunEvent) -> None:
        codes.add(say("status", copied, "--verify")[0])

    predict(*sources, to=copied, resume=True, on_event=look)
    assert codes == {0}
