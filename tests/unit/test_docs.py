"""What the pages name exists: options, links, messages, tests, folders and rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import make_man
import numpy as np
import pytest
from run_helpers import CONTIGS, ROOT, execute, rows

from virnucpro.cli.main import app
from virnucpro.engine.local import InlineExecutor
from virnucpro.models.names import TINY_MODEL
from virnucpro.viral.known import KnownIndex
from virnucpro.viral.lineage import FAMILY, load_builtin_lineages
from virnucpro.workflows.predict_options import PredictOptions

PROMISES = [line.split("::") for line in (ROOT / "tests/guarantees.txt").read_text().splitlines()]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "examples/README.md", ROOT / "scripts/weights/README.md"]
README = ROOT / "README.md"
OUTPUT_PAGE = ROOT / "docs/OUTPUT.md"
GPU_PAGE = ROOT / "docs/GPU_OPTIMIZATION.md"
# options of other programs, and of our scripts and tests
FOREIGN_OPTIONS = """
    --array --bases --chaos-seed --configfile --cores --deepmicroclass --dependency --devices
    --dilation --dry-run --force-reinstall --genomad --gpu-bind --gres --helpers
    --hypothesis-profile --index-url --jaeger --jobs --kraken2 --kraken2-database --logdir --mem
    --nnodes --no-deps --no-python --nproc-per-node --nv --outliers --output --parsable --parts
    --rdzv-backend --rdzv-endpoint --records --repeats --rounds --run --shards --silent
    --slurm-no-account --slurm-status-command --snakefile --speed --tokens --workers --wrap
"""
OTHER_OUTPUTS = {"DIR", "localflock", "manifest"}  # the last two of mount and of manifest
VARIABLE = re.compile(r": |(?:https://)?\.\.\.|\bN\b|\bDIR\b|\bSIGKILL\b")  # in a message


@pytest.mark.parametrize("file", sorted({file for file, _ in PROMISES}))
def test_every_promise_has_a_test(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {test for name, test in PROMISES if name == file} <= there


def all_options() -> Iterator[str]:
    for _, command in make_man.walk("virnucpro", app):
        for parameter in command.params:
            yield from (*parameter.opts, *parameter.secondary_opts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_on_pages_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
    programs = "--install-completion", "--help", "--version"
    assert named <= {*all_options(), *programs, *FOREIGN_OPTIONS.split()}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "Makefile"], ids=lambda page: page.name)
def test_printed_folders_are_ignored(page: Path) -> None:
    """Page commands that run in the source folder leave the repository clean."""
    printed = re.findall(r"(?:--output-dir|-o) ([\w-]+)(?:/|$|\s)", page.read_text(), re.MULTILINE)
    printed += re.findall(r'output_dir="([\w-]+)', page.read_text())
    ignored = re.findall(r"^/([\w*-]+)/$", (ROOT / ".gitignore").read_text(), re.MULTILINE)
    for name in set(printed) - OTHER_OUTPUTS:
        assert any(fnmatch(name, pattern) for pattern in ignored), name


def test_tutorial_has_a_folder_of_its_own() -> None:
    """Its results/ is not that of the README."""
    _, _, steps = (ROOT / "docs/TUTORIAL.md").read_text().partition("```sh\n")
    assert steps.startswith("mkdir -p tutorial/genomes\ncd tutorial\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_on_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
            assert heading in anchors, link


def test_quoted_messages_exist() -> None:
    _, _, tables = GPU_PAGE.read_text().partition("## Troubleshooting by symptom")
    symptoms = re.findall(r"^\| `([^`]+)`", tables.partition("## Getting help")[0], re.MULTILINE)
    texts = [path.read_text() for path in (ROOT / "virnucpro").rglob("*.py")]
    source = re.sub(r'"\s*f?"', "", "".join(texts))  # strings over several lines
    torch_message = "Cannot re-initialize CUDA in forked subprocess"
    assert len(symptoms) >= 8
    for symptom in set(symptoms) - {torch_message}:
        for part in VARIABLE.split(symptom):
            assert part.strip() in source, symptom


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The rows of the example with vectors, by record."""
    options = PredictOptions(
        input=(CONTIGS,),
        output_dir=tmp_path_factory.mktemp("example") / "run",
        model=TINY_MODEL,
        device="cpu",
        precision="fp32",
        report=False,
    )
    execute(options, lambda _: None, lambda _: InlineExecutor())
    return {row["record"]: row for row in rows(options.output_dir / "predictions.tsv")}


@pytest.mark.parametrize("page", [README, OUTPUT_PAGE], ids=lambda page: page.name)
def test_shown_rows_equal_the_example(page: Path, made) -> None:
    (text,) = re.findall(r"^```\n(record +.*?)```", page.read_text(), re.DOTALL | re.MULTILINE)
    names, *shown = (line.split() for line in text.splitlines())
    assert len(shown) == 2
    for row in shown:
        empty = [""] * names.count("note")  # these rows have no note
        values = dict(zip(names, [*row, *empty], strict=True))
        # six decimals are those of one CPU; another sums in another order
        for name in {"virus_score", "base_score"} & values.keys():
            score = float(values.pop(name))
            assert score == pytest.approx(float(made[row[0]][name]), abs=1e-4)
        assert values.items() <= made[row[0]].items()


def test_page_lists_families_with_names() -> None:
    text = (ROOT / "docs/TAXONOMY.md").read_text()
    line = re.search(r"These are the 237:\n\n(.*?)\n\n", text, re.DOTALL)
    lineages = load_builtin_lineages()
    ancestors = lineages.ancestors[KnownIndex.load_builtin().nodes.taxa.astype(np.int64), FAMILY]
    families = {lineages.taxa[taxon].family for taxon in ancestors.tolist()}
    assert line and re.findall(r"\*(\w+)\*", line[1]) == sorted(filter(None, families))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_lines_fit_a_narrow_screen(page: Path) -> None:
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    assert [line for line in lines if len(line) > 76] == []


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_have_at_most_seven_columns(page: Path) -> None:
    rules = re.findall(r"^\|(?:[ :-]+\|)+$", page.read_text(), re.MULTILINE)
    assert max((rule.count("|") - 1 for rule in rules), default=0) <= 7
