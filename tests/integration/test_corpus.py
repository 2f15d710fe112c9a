"""Malformed files end as ``malformed/outcomes.tsv`` lists, and nothing escapes the run folder."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import malformed_inputs
import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser
from Bio.SeqIO.QualityIO import FastqGeneralIterator
from forkserver_runner import virnucpro as command
from run_helpers import again, run_inline
from run_helpers import rows as read_rows

import virnucpro.sequences.record_text
from virnucpro.cli.console import is_for_console
from virnucpro.cli.exit_codes import CommandExit, exit_on_error
from virnucpro.core.atomic_io import open_binary
from virnucpro.core.events import EmbeddingStarted, EventHandler, RunEvent
from virnucpro.core.logging import log_to_handler

CORPUS = Path(__file__).parents[1] / "malformed"
FILES = CORPUS / "files"
BOUND = 50_000_000  # letters of a record, in these tests
# what a run may leave in its folder
OURS = re.compile(
    r"run\.json|virnucpro\.log|\.lock|predictions\.tsv|prediction_results\.txt"
    r"|prediction_results_highestscore\.csv|viral\.fasta|viruses\.(tsv|fasta)|samples\.tsv|virnucpro_(families_)?mqc\.tsv|chunks\.fa|report\.html|machine\.json"
    r"|regions\.(tsv|bed|gff3|fasta)|tracks\.tsv\.gz"
    r"|genes\.(tsv|gff3)|proteins\.faa|miuvig\.tsv"
    r"|features|features\.h5|features/(\d{6}(_copies)?\.h5|parts\.json|index\.parquet|lookup\.npy)"
    r"|scores|scores/\d{6}\.(scores|frames)"
    r"|shards|shards/(\d{6}\.(f[an]a|plan|ids|chunks)|plan\.json)|inputs|inputs/[0-9a-f]{16}\.fa"
)


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    input: str
    options: str
    run: str  # inline, or as a process of its own
    exit: str
    message: str
    rows: str  # "a=scored b=invalid", or "20000*invalid"; ids with the escapes of Python

    @property
    def maker(self) -> str:
        return self.input.removeprefix("made:") if self.input.startswith("made:") else ""

    @property
    def expected(self) -> list[tuple[str, str]]:
        """Return the ids and statuses in the table of records. A count leaves the ids open."""
        n, star, status = self.rows.partition("*")
        if star and n.isdigit():
            return int(n) * [("", status)]
        pairs = [row.rpartition("=") for row in self.rows.split()]
        return [(name.encode().decode("unicode_escape"), status) for name, _, status in pairs]


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    shown: str  # on the terminal


def read_cases() -> list[Case]:
    with (CORPUS / "outcomes.tsv").open(encoding="ascii", newline="") as lines:
        table = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [Case(**row) for row in table]


CASES = read_cases()
INLINE = [case for case in CASES if case.run == "inline"]
AS_PROCESS = [case for case in CASES if case.run == "process"]


def names(cases: list[Case]) -> list[str]:
    return [case.input for case in cases]


@dataclass(frozen=True)
class Place:
    """The folders of a case: for input, as the current folder, and the nested run folder."""

    root: Path

    @property
    def given(self) -> Path:
        return self.root / "given"

    @property
    def here(self) -> Path:
        return self.root / "here"

    @property
    def run(self) -> Path:
        return self.root / "deep" / "er" / "run"

    def inputs_of(self, case: Case) -> list[Path]:
        return (
            malformed_inputs.MAKERS[case.maker](self.given) if case.maker else [FILES / case.input]
        )

    def entries(self) -> set[str]:
        found = {path.relative_to(self.root).as_posix() for path in self.root.rglob("*")}
        return {name for name in found if not name.startswith("given/")}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path)
    for folder in (place.given, place.here, place.run.parent):
        folder.mkdir(parents=True)
    monkeypatch.chdir(place.here)
    return place


def skip_if_impossible(case: Case, place: Place) -> None:
    closed = place.given / "closed"
    closed.touch(mode=0)
    if "permission" in case.maker and os.access(closed, os.R_OK):
        pytest.skip("this user may read everything")
    closed.unlink()


def check(case: Case, outcome: Outcome, place: Place, inputs: list[Path]) -> None:
    assert outcome.exit_code == int(case.exit), outcome.shown
    assert case.message in outcome.shown
    assert "Traceback" not in outcome.shown
    assert all(line.isprintable() for line in outcome.shown.split("\n")), ascii(outcome.shown)
    made = place.entries() - {"given", "here", "deep", "deep/er", "deep/er/run"}
    inside = {name.removeprefix("deep/er/run/") for name in made}
    assert not {name for name in inside if not OURS.fullmatch(name)}
    table = place.run / "predictions.tsv"
    assert table.exists() == (case.exit == "0")
    if table.exists():
        rows = [tuple(row.values()) for row in read_rows(table)]
        found = [(row[0], row[3]) for row in rows]
        blank = not any(name for name, _ in case.expected)
        assert case.expected == ([("", status) for _, status in found] if blank else found)
        assert len({row[:2] for row in rows}) == len(found)
        assert [name for name, _ in found] == ids_by_biopython(inputs, place)


def ids_by_biopython(inputs: list[Path], place: Place) -> list[str]:
    """Return the ids that another reader finds, in order."""
    files = [
        file
        for path in inputs
        for file in (sorted(path.glob("[!.]*")) if path.is_dir() else [path])
    ]
    if not all(path.is_file() for path in files):  # a pipe: what was read from it was copied
        files = list((place.run / "inputs").iterdir())
    found = []
    for path in files:
        with open_binary(path) as packed:
            wrapper = io.TextIOWrapper(packed, encoding="utf-8-sig", errors="surrogateescape")
            text = wrapper.read()
        parse = FastqGeneralIterator if text.startswith("@") else SimpleFastaParser
        found += [title.split(None, 1)[0] for title, *_ in parse(io.StringIO(text))]
    return found


def run_as_a_command_would(config, head, on_event: EventHandler) -> Outcome:
    """Run in this process. -> the output for the user, and the exit code"""
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    handler.addFilter(partial(is_for_console, with_figures=True))
    try:
        with redirect_stderr(shown), log_to_handler(handler), exit_on_error():
            summary = run_inline(config, head, on_event)
            for line in summary.lines(config.output):
                click.echo(line, err=True)
    except CommandExit as finished:
        return Outcome(finished.exit_code, shown.getvalue())
    return Outcome(summary.exit_code, shown.getvalue())


def interference(case: Case, inputs: list[Path]) -> EventHandler:
    """Change the input when embedding begins."""

    def interfere(event: RunEvent) -> None:
        if isinstance(event, EmbeddingStarted):
            match case.maker:
                case "a_file_to_be_rewritten":
                    inputs[0].write_text(malformed_inputs.TWO.replace("ATG", "CTG"))
                case "a_file_to_be_added_to":
                    inputs[0].write_text(malformed_inputs.TWO + f">c\n{malformed_inputs.DNA}\n")

    return interfere


@pytest.mark.parametrize("case", INLINE, ids=names(INLINE))
def test_malformed_file_ends_as_the_table_says(case, place, tiny, make_config, monkeypatch) -> None:
    skip_if_impossible(case, place)
    monkeypatch.setattr(virnucpro.sequences.record_text, "MAX_LETTERS", BOUND)
    inputs = place.inputs_of(case)
    option, _, value = case.options.partition(" ")
    changes = {"min_length": int(value)} if option == "--min-length" else {}
    config = make_config(*inputs, output=place.run, keep_intermediate=True, **changes)
    if option == "--input-type":
        config = again(config, input_type=value)
    outcome = run_as_a_command_would(config, tiny.head, interference(case, inputs))
    check(case, outcome, place, inputs)


@pytest.mark.parametrize("case", AS_PROCESS, ids=names(AS_PROCESS))
def test_malformed_file_on_the_command_line(case, place, tiny) -> None:
    skip_if_impossible(case, place)
    inputs = place.inputs_of(case)
    piped = FILES / "ids_with_control_characters.fa"
    words = ["--keep-intermediate", *(f"--input={path}" for path in inputs), "-o", place.run]
    words += ["--model", tiny.model, "--head", tiny.head_file]
    words += ["--device", "cpu", "--workers", 1, "--precision", "fp32", "--quiet"]
    with ExitStack() as stack:
        if case.maker == "a_fifo":
            stack.enter_context(malformed_inputs.written_to(inputs[0]))
        answer = command("predict", *words, input=piped.read_bytes().decode())
    check(case, Outcome(answer.returncode, answer.stdout + answer.stderr), place, inputs)


def test_corpus_files_match_the_table() -> None:
    kept = {case.input for case in CASES if not case.maker}
    assert kept == {path.name for path in FILES.iterdir()}
    assert {case.maker for case in CASES if case.maker} == set(malformed_inputs.MAKERS)
    assert len(CASES) >= 60
    assert sum(path.stat().st_size for path in FILES.iterdir()) < 300_000
