"""Every command of every page is parsed, and run where that is possible."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import make_man
import numpy as np
import pytest
from conftest import random_dna
from forkserver_runner import virnucpro
from run_helpers import CONTIGS, ROOT, write_fasta

from virnucpro.cli.command import Command, read_options
from virnucpro.cli.main import app
from virnucpro.sequences.fasta import read_fasta

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "examples/README.md"]
# Commands that this test does not run: a pattern, and the reason. Their options are parsed.
NOT_RUN = {
    r"^docs/TUTORIAL\.md ": "test_tutorial.py runs it",
    r"^docs/EMBEDDINGS\.md ": "test_embeddings_page.py runs it",
    r"^CONTRIBUTING\.md ": "a part of the tests",
    r"^docs/BENCHMARKS\.md ": "other programs, or minutes; test_benchmarks.py runs store.py",
    r" (make example|pip install|\. \.venv/bin/activate)": "installs",
    r" virnucpro models download ": "downloads",
    r"xxh128sum ": "needs xxhash; test_hashes.py runs it",
    r"sbatch ": "SLURM; test_slurm.py runs the scripts",
    r" snakemake ": "Snakemake; test_snakemake.py runs it",
    r" torchrun ": "several machines",
    r"--executor parsl ": "Parsl; test_cluster.py runs it",
    r" virnucpro models check ": "minutes on a CPU; test_check.py runs it",
    r" virnucpro bench ": "minutes on a CPU; test_bench.py runs it",
    r" benchmarks/gpu\.sh (right|time|short|files)$": "needs a GPU; test_benchmarks.py has it",
    r"--gpus (0,2$|GPU-)|CUDA_VISIBLE_DEVICES=": "these GPUs are not here",
    r"virnucpro-500| dnabert-s ": "published weights; test_published.py has random ones",
    r" virnucpro compare contigs_merged": "results of the original program",
    r"--regions prophages\.tsv": "minutes; test_regions.py runs it",
    r"--model esm2_t36_3B_UR50D": "the command before it, with a larger model",
    r"--pretrain |--finetune ": "minutes; test_train.py runs it",
    r" extract --input manifest\.tsv .*| train .*--features ": "minutes; test_train.py runs it",
    r" training/(model)?( --card)?$| training/model ": "needs a training; test_learned.py has one",
    r" train .*--check$": "minutes of imports; test_training_request.py runs it",
    r" train -o training/ --data manifest\.tsv$": "downloads; test_train.py has a small model",
}
# what the pages have, and this machine has not
REPLACEMENTS = {
    r"--model (M --head H|esm2_\w+)": "--model virnucpro-tiny",
    r"--gpus \S+": "--device cpu --workers 1",
    r"--workers 8": "--workers 1",
    r"--part 3/16": "--part 1/1",
    r" \.\.\.": " --input contigs.fa --output-dir more/",
}
ENDS_WITH = {"results/failed_sequences.fa": 66}  # nothing failed, so the file is not there


class Step(NamedTuple):
    """A command of a page."""

    page: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page} {self.text}"

    @property
    def reason(self) -> str:
        """Return why it is not run, or an empty string."""
        return next((why for key, why in NOT_RUN.items() if re.search(key, self.name)), "")


@cache
def steps() -> list[Step]:
    """Return all commands in shell blocks, in order."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            commands = (re.sub(r"(^|\s+)#( .*|$)", "", line).strip() for line in lines)
            found += [Step(str(page.relative_to(ROOT)), text) for text in commands if text]
    return found


def help_examples() -> Iterator[Step]:
    for name, one in make_man.walk("virnucpro", app):
        text = " ".join((one.help or "").replace("\n\n", " ;").split())
        for command in re.findall(r"(?:: |- )(virnucpro (?:[^;`]+))", text):
            yield Step(f"{name} --help", command.strip())


def calls_in(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of virnucpro in a command."""
    for arguments in re.findall(r"(?:^|[\s\"'])virnucpro ([^|;&>)\"']*)", text):
        yield shlex.split(arguments)


def parse(words: list[str]) -> None:
    """Parse arguments as the program does, and build the option objects."""
    context = click.Context(app, info_name="virnucpro")
    command: click.Command = app
    while isinstance(command, click.Group):
        name, inner, words = command.resolve_command(context, words)
        assert inner is not None, name
        command = inner
    assert isinstance(command, Command)
    with command.make_context(name, words, parent=context) as parsed:
        for group in command.option_groups:
            read_options(parsed, group)


@pytest.mark.parametrize("step", [*steps(), *help_examples()], ids=lambda step: step.name[-50:])
def test_page_command_parses(step: Step) -> None:
    for words in calls_in(re.sub(r" \.\.\.", " --input x --output-dir y", step.text)):
        parse(words)


def test_parser_finds_faults() -> None:
    """A page with such a command fails."""
    for fault in ("predict -i x -o y --nope", "predict -i x", "model list", "work r --workers x"):
        with pytest.raises(Exception, match=r"(?i)no such option|missing|no command|workers is"):
            parse(fault.split())


def test_exceptions_are_needed() -> None:
    for pattern in NOT_RUN:
        assert any(re.search(pattern, step.name) for step in steps()), pattern


def run_pages() -> list[str]:
    return sorted({step.page for step in steps() if not step.reason})


def write_inputs(folder: Path) -> None:
    """Write the files that the pages name, with a few records."""
    records = list(read_fasta(CONTIGS))[:6]
    texts = [f">{record.id}\n{record.sequence}\n" for record in records]
    for name in ("contigs.fa", "reads.fa", "human.fa", "viruses/a.fa", "viruses/b.fa"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[0])
    for name in ("bacteria/a.fa", "bacteria/b.fa", "assemblies/a.fa", "assemblies/b.fa"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[2])
    proteins = (ROOT / "examples/proteins.faa").read_text(encoding="utf-8").split(">")[1:3]
    (folder / "proteins.faa").write_text("".join(f">{protein}" for protein in proteins))
    (folder / "samples.tsv").write_text("sample\tpath\na\tassemblies/a.fa\nb\tassemblies/b.fa\n")
    for name in ("reads_R1.fastq", "reads_R2.fastq"):
        base = records[0].sequence[:300]
        (folder / name).write_text(f"@{name}\n{base}\n+\n{'I' * len(base)}\n")
        subprocess.run(["gzip", folder / name], check=True)
    draw = np.random.default_rng(1)
    write_fasta(folder / "data.fa", {name: random_dna(900, draw) for name in "abcd"})
    rows = [f"data.fa\t{name}\t{'virus' if name < 'c' else 'other'}\t{name}\n" for name in "abcd"]
    (folder / "manifest.tsv").write_text("path\tid\tlabel\tgroup\n" + "".join(rows))
    for name in ("benchmarks", "examples"):
        (folder / name).symlink_to(ROOT / name)


def for_this_machine(text: str) -> str:
    for old, new in REPLACEMENTS.items():
        text = re.sub(old, new, text)
    if text.startswith("virnucpro extract") and "--device cpu" not in text:
        text += " --device cpu --workers 1"
    if "--device cpu" in text and "--model" not in text:
        text += " --model virnucpro-tiny"
    return text.replace("/shared/vectors", "vectors")


def end_of(text: str, folder: Path) -> tuple[int, str]:
    """Run a command. -> its exit code, and its errors"""
    words = shlex.split(text)
    if words[0] == "virnucpro":
        for option in ("-o", "--output-dir"):
            if option in words and "--resume" not in words:
                output = folder / words[words.index(option) + 1]
                output.unlink() if output.is_file() else shutil.rmtree(output, ignore_errors=True)
        done = virnucpro(*words[1:], cwd=folder)
    else:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        shell = ["bash", "-euo", "pipefail", "-c", text]
        environment = {**os.environ, "PATH": path}
        done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("page", run_pages())
def test_page_commands_run(page: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    folder = tmp_path
    for step in steps():
        if step.page != page or step.reason:
            continue
        text = for_this_machine(step.text)
        if text.startswith("cd "):
            folder = tmp_path / text.removeprefix("cd ")
            end_of("virnucpro predict --input contigs.fa --output-dir results/", tmp_path)
            continue
        expected = next((code for key, code in ENDS_WITH.items() if key in text), 0)
        exit_code, errors = end_of(text, folder)
        assert exit_code == expected, (text, errors)
