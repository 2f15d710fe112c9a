"""An option is declared once, and has the same effect on the command line and from Python."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args, get_type_hints

import click
import make_man
import numpy as np
import pytest
from click.testing import CliRunner
from source_trees import tree_of

from virnucpro.cli import main
from virnucpro.cli.command import ConsoleOptions, command
from virnucpro.cli.help_page import group_panels, wrap_command
from virnucpro.cli.main import app
from virnucpro.core.errors import UsageError
from virnucpro.core.option_schema import build_options, convert_options, option, option_annotations
from virnucpro.training.options import EvaluateOptions, TrainOptions
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.predict_options import PredictOptions

# where options pass through on their way to where they are used
PASSED = (
    *("cli.command", "cli.predict", "cli.train", "workflows.run_config", "workflows.model_config"),
    *("workflows.extract_config", "workflows.predict_config", "workflows.predict_model_config"),
    *("workflows.collect_inputs", "workflows.run_steps", "training.training_config"),
    "training.train",
)
RUNS = (PredictOptions, ExtractOptions)


def defined(tree: ast.Module) -> Iterator[str]:
    """Return fields and parameters with a default, and names in lists."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(body=body):
                for line in body:
                    if isinstance(line, ast.AnnAssign) and line.value is not None:
                        yield ast.unparse(line.target)
            case ast.arguments(args=args, defaults=defaults, kwonlyargs=named, kw_defaults=given):
                yield from (arg.arg for arg in args[len(args) - len(defaults) :])
                yield from (arg.arg for arg, value in zip(named, given, strict=True) if value)
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Dict(keys=items):
                yield from (item.value for item in items if isinstance(item, ast.Constant))


@pytest.mark.parametrize("name", PASSED)
@pytest.mark.parametrize(
    "options",
    [PredictOptions, ExtractOptions, EvaluateOptions, TrainOptions],
    ids=lambda o: o.__name__,
)
def test_options_are_defined_in_one_module(name, options):
    names = set(option_annotations(get_type_hints(options, include_extras=True)))
    assert not names & set(defined(tree_of(name)))


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Options that no command has."""

    place: Annotated[Path, option("A place.", None, "--place", "-p")]
    places: Annotated[tuple[Path, ...], option("Some places.")] = ()
    kind: Annotated[Literal["a", "b"], option("A kind.", "Kinds")] = "a"
    number: Annotated[int | None, option("A number.", min=2)] = None
    flagged: Annotated[bool, option("A flag.")] = False
    wanted: Annotated[bool, option("On by default.")] = True
    argv: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()


class Misspelt(Toy):
    """A class whose main option is misspelt."""

    main_options: ClassVar = ("plaec",)


def run_toy(*arguments: str) -> tuple[int, Toy | None]:
    seen: list[Toy] = []
    toy = command(Toy)(seen.append).build("toy")
    result = CliRunner().invoke(toy, list(arguments))
    if isinstance(result.exception, UsageError):
        raise result.exception
    return result.exit_code, seen[0] if seen else None


def test_summary_of_each_command_begins_its_help():
    """The command list repeats it, so that --help need not import all options."""
    listed = dict(make_man.inner_commands(app))
    for name, (_, summary) in main.COMMANDS.items():
        assert " ".join((listed[name].help or "").split()).startswith(summary), name
        first = (listed[name].help or "").partition("\n\n")[0]
        assert " ".join(first.split()) == summary


def test_help_page_has_panels_defaults_and_ranges():
    page = CliRunner().invoke(command(Toy)(lambda _: None).build("toy"), ["--help"]).output
    lines = [" ".join(line.split()) for line in page.splitlines()]
    assert "-p, --place TEXT A place. [required]" in lines
    assert "--number TEXT A number. [2 or more]" in lines
    assert "--wanted / --no-wanted On by default. [on by default]" in lines
    assert "--flagged A flag." in lines
    assert lines[lines.index("Kinds:") + 1] == "--kind <a|b> A kind. [default: a]"


@pytest.mark.parametrize("name", ["predict", "extract", "train", "evaluate"])
def test_help_lists_twelve_options_first(name):
    one = dict(make_man.inner_commands(app))[name]
    panels = group_panels(one, click.Context(one))
    names = list(panels)
    assert names[0] == "Files" and names[-2:] == ["Options", "Advanced"]
    assert name != "predict" or names[1] == "Calls"
    assert sum(len(panels[panel]) for panel in names[:-2]) == 12
    shown = [row[0] for rows in panels.values() for row in rows]
    assert len(shown) == len(set(shown)) == len(one.get_params(click.Context(one)))


def test_unknown_main_option_is_refused():
    with pytest.raises(ValueError, match="no option plaec"):
        command(Misspelt)(lambda _: None).build("toy")


@pytest.mark.parametrize("width", [40, 60, 80])
def test_wrapped_command_can_be_copied(width):
    words = "virnucpro predict -i contigs.fa -o results/ --model esm2_t33_650M_UR50D --cache x/"
    lines = wrap_command(words, width).splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join("".join(line.removesuffix("\\") for line in lines).split()) == words


def test_help_of_every_command_has_an_example():
    each = list(make_man.walk("virnucpro", app))
    commands = [(name, one) for name, one in each if not isinstance(one, click.Group)]
    assert len(commands) > 15
    assert not [name for name, one in commands if name not in " ".join(one.help.split())]


def test_class_field_is_a_command_option():
    _, toy = run_toy("--place", "x", "--places", "y", "--places", "z", "--flagged")
    assert toy is not None and toy.argv
    assert toy == Toy(
        place=Path("x"),
        places=(Path("y"), Path("z")),
        flagged=True,
        argv=toy.argv,
        typed=("place", "places", "flagged"),
    )
    assert run_toy()[0] == 2, "the place is required"
    assert run_toy("--place", "x", "--argv", "y")[0] == 2, "argv is no option"
    assert run_toy("--place", "x", "--no-flagged")[0] == 2
    assert run_toy("--place", "x", "--no-wanted")[1].wanted is False
    for empty in ("--place", "--places"):
        with pytest.raises(UsageError, match=f"{empty} is empty"):
            run_toy("--place", "x", empty, "")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"place": ""}, "--place is empty"),
        ({"place": 3}, "--place is 3"),
        ({"place": "s3://bucket/a.fa"}, "s3://bucket/a.fa is a URL"),
        ({"kind": "c"}, "--kind is 'c'"),
        ({"number": 1}, "--number is 1"),
        ({"number": "three"}, "--number is 'three'"),
    ],
)
def test_python_refuses_invalid_values(values, words):
    with pytest.raises(UsageError, match=words) as caught:
        build_options(Toy, {"place": "x", **values})
    assert caught.value.hint
    assert build_options(Toy, {"place": "name:/x"}).place == Path(
        "name:/x"
    )  # a folder may have that name


def test_numpy_and_text_numbers_are_numbers():
    assert build_options(Toy, {"place": "x", "number": "3"}).number == 3
    toy = build_options(Toy, {"place": "x", "number": np.int64(3)})
    assert toy.number == 3 and type(toy.number) is int
    options = build_options(
        PredictOptions, {"input": "i", "output_dir": "o", "threshold": np.float32(0.5)}
    )
    assert options.threshold == 0.5 and type(options.threshold) is float


def test_shared_options_carry_over():
    train = TrainOptions(
        data=Path("m.tsv"), output_dir=Path("out"), gpus="0,1", precision="fp32", workers=3
    )
    extract = convert_options(
        train, ExtractOptions, input=(), output_dir=Path("in"), chunk_size=300
    )
    assert (extract.gpus, extract.precision, extract.workers) == ("0,1", "fp32", 3)
    assert (extract.output_dir, extract.chunk_size) == (Path("in"), 300)


@pytest.mark.parametrize(
    ("options", "values", "words"),
    [
        (ConsoleOptions, {"quiet": True, "verbose": True}, "--verbose: no effect with --quiet"),
        (PredictOptions, {"regions": False, "region_model": "m"}, "no effect with --no-regions"),
        (PredictOptions, {"input_type": "protein", "region_model": "m"}, "--region-model: .*prot"),
        (PredictOptions, {"input_type": "protein", "chunk_size": 300}, "--chunk-size: .*proteins"),
        (
            ExtractOptions,
            {"input_type": "protein", "genetic_code": 4},
            "--genetic-code: .*proteins",
        ),
        (EvaluateOptions, {"genes": "g"}, "--genes: no effect without --regions"),
        (EvaluateOptions, {"region_model": "m"}, "--region-model: no effect without --regions"),
        (EvaluateOptions, {"regions": "t", "head": "h"}, "--head: no effect with --regions"),
        (EvaluateOptions, {"regions": "t", "lengths": "9", "split": "s"}, "--lengths and --split:"),
        (EvaluateOptions, {"regions": "t", "device": "cpu"}, "--device: no effect with --regions"),
        (TrainOptions, {"regions": "t", "finetune": True}, "--finetune: no effect with --regions"),
        (TrainOptions, {"regions": "t", "resume": True}, "--resume: no effect with --regions"),
        (TrainOptions, {"fsdp": True}, "--fsdp: no effect without --finetune or --pretrain"),
        (TrainOptions, {"pretrain": True, "hidden": 9}, "--hidden: no effect with --pretrain"),
    ],
)
def test_option_without_effect_is_refused(options, values, words):
    needed = {"output_dir": "o", **({"input": "i"} if options in RUNS else {"data": "d"})}
    with pytest.raises(UsageError, match=words) as refused:
        build_options(options, values if options is ConsoleOptions else needed | values)
    assert "leave out --" in refused.value.hint


def test_network_too_large_for_memory_is_refused():
    with pytest.raises(UsageError, match="--hidden is 1000000000000"):
        build_options(TrainOptions, {"data": "d", "output_dir": "o", "hidden": 10**12})


def test_region_options_are_used():
    common = {"data": "d", "output_dir": "o", "regions": "t", "seed": 1}
    more = {"genes": "g", "region_model": "m", "genetic_code": 4}
    asked = build_options(EvaluateOptions, {**common, **more})
    assert (str(asked.genes), str(asked.region_model), asked.genetic_code) == ("g", "m", 4)
    assert (
        str(build_options(TrainOptions, common).regions),
        build_options(TrainOptions, common).seed,
    ) == ("t", 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused(value: float) -> None:
    for group in (PredictOptions, TrainOptions):
        hints = get_type_hints(group, include_extras=True)
        numbers = [
            name for name in option_annotations(hints) if "float" in str(get_args(hints[name])[0])
        ]
        assert numbers
        for name in numbers:
            with pytest.raises(UsageError, match=name.replace("_", "-")):
                build_options(group, {name: value})
