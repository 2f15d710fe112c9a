"""The command line at a terminal and in scripts."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from forkserver_runner import start, virnucpro
from run_helpers import CONTIGS, invoke, rows, statuses, write_fasta

from virnucpro._version import __version__
from virnucpro.cli.console import next_step, number_gpus_by_bus
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.models.names import TINY_MODEL, TINY_NOTICE
from virnucpro.models.registry import NAMES

ESCAPE = "\x1b"
SMALL = "esm2_t6_8M_UR50D"


@pytest.fixture
def model(tiny):
    return ("--model", tiny.model, "--head", tiny.head_file, "--device", "cpu", "--workers", "1")


def in_terminal(arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run on a pseudo-terminal. -> the exit code, and what a person would see"""
    parent, child = pty.openpty()
    process = start(*arguments, streams=[child] * 3, env={**os.environ, **environment})
    os.close(child)
    shown = b""
    while True:
        if select.select([parent], [], [], 0.1)[0]:
            try:
                block = os.read(parent, 65536)
            except OSError:
                break
            if not block:
                break
            shown += block
        elif process.exitcode is not None:
            break
    os.close(parent)
    process.join()
    return process.exitcode, shown.decode(errors="replace")


HELP = ["--help", "-h", "predict --help", "extract -h", "train --help", "evaluate --help"]
HELP += ["models -h", "models list -h", "models check -h", "status -h", "manifest -h"]
HELP += ["cite -h", "bench -h", "compare -h", "export -h", "work -h", "regions -h", "report -h"]
HELP += ["summary -h", "devices -h", "models import -h", "models info -h", "models verify -h"]
HELP += ["models download -h"]


@pytest.mark.parametrize(
    ("words", "columns"), [("train --help", "80"), *((words, "60") for words in HELP)]
)
def test_help_is_complete_and_in_field_terms(words, columns):
    answer = virnucpro(*words.split(), env={**os.environ, "COLUMNS": columns})
    assert answer.returncode == 0 and "Usage" in answer.stdout and "--help" in answer.stdout
    lines = answer.stdout.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert "…" not in answer.stdout and not re.search(r"\w-$", answer.stdout, re.MULTILINE)
    lines = [line for line in answer.stdout.splitlines() if "--help" not in line]
    types = ("bool", "list[", "<str>", "<int", "<float>", "<float r", "<list", "<path>", "{")
    assert not [line for line in lines for word in types if word in line]
    assert ("<cls>" in answer.stdout) == (words == "extract -h")
    if (command := words.split()[0]) in ("predict", "extract", "evaluate"):
        assert f"Example: virnucpro {command}" in " ".join(answer.stdout.split())
        assert "--keep-intermediate" in answer.stdout
    names = [line[:30].strip() for line in lines]
    assert command != "train" or "--gradient-checkpointing" in names


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--input-type", "give auto or nucleotide or protein"),
        ("--device", "give auto or cuda or cpu or mps"),
        ("--threshold", "give a number\n"),
        ("--workers", "give a whole number\n"),
    ],
)
def test_wrong_value_is_reported_plainly(option, words):
    answer = virnucpro("predict", "-i", "x", "-o", "y", option, "foo")
    assert answer.returncode == 64
    assert f"error: {option} is 'foo'\nhint:  {words}" in answer.stderr


def test_gpus_are_numbered_by_bus(monkeypatch, capsys):
    """NVML lists them in this order. Otherwise --gpus 0 would be another card."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    number_gpus_by_bus()
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER='FASTEST_FIRST' is ignored" in capsys.readouterr().err
    number_gpus_by_bus()
    assert capsys.readouterr().err == ""


# libraries that are slow to import and that this run does not need
UNUSED = {"torch", "h5py", "Bio", "pydantic", "rich", "filelock", "http.client", "ssl", "asyncio"}
UNUSED |= {"importlib.metadata", "numpy.ma", "virnucpro.training.options"}


@pytest.mark.parametrize(
    ("command", "unused"),
    [
        (f"predict -i {CONTIGS} --workers 1 --threshold 0.5 -o other", UNUSED),
        ("status run", UNUSED),
        ("--help", {"torch", "h5py", "numpy", "Bio", "rich"}),
    ],
)
def test_scorer_run_imports_only_what_it_needs(command, unused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if command == "status run":
        assert virnucpro("predict", "-i", CONTIGS, "-o", "run").returncode == 0
    code = (
        "import sys, virnucpro.cli.main as c\n"
        f"sys.argv = {['virnucpro', *command.split()]}\n"
        "try: c.main()\n"
        "except SystemExit as end: print(end.code or 0)\n"
        f"print({unused} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.splitlines()[-2:] == ["0", "set()"], answer


def test_extract_options_in_help(tiny, tmp_path):
    answer = virnucpro(
        *("extract", "-i", CONTIGS, "-o", tmp_path / "run", "--model", tiny.model, "--device"),
        *("cpu", "--workers", "1", "--pooling", "bos", "--layer", "1", "--format", "npz"),
    )
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "run" / "features" / "000000.npz").exists()


def test_input_may_come_from_a_pipe(model, tmp_path):
    piped = virnucpro(
        *("predict", "-i", "-", "-o", tmp_path / "piped", *model), input=CONTIGS.read_text()
    )
    assert piped.returncode == 0, piped.stderr
    virnucpro("predict", "-i", CONTIGS, "-o", tmp_path / "file", *model)
    table = (tmp_path / "file" / "predictions.tsv").read_text()
    assert (tmp_path / "piped" / "predictions.tsv").read_text() == table.replace(
        "\tcontigs\t", "\tstandard_input\t"
    )


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["-o", "x"], 64, "--input is missing"),
        (["-i", "{example}", "-o", "x", "--precision", "fp99"], 64, "fp99"),
        (["-i", "{example}", "-o", "x", "--chunk-size", "77"], 64, "made for chunks of 500"),
        (["-i", "{example}", "-o", "x", "--esm-batch-size", "0"], 64, "1 token or more"),
        (["-i", "{example}", "-o", "x", "--esm-batch-size", "big"], 64, "auto, or 1 token"),
        (["-i", "{example}", "-o", "x", "--workers", "0"], 64, "--workers is 0"),
        (["-i", "{example}", "-o", "x", "--gpus", "0"], 64, "does not go with"),
        (["-i", "{example}", "-o", "x", "--resume", "--force"], 64, "contradict"),
        (["-i", "{example}", "-o", "x", "--min-length", "-1"], 64, "--min-length"),
        (["-i", "{example}", "-o", "{file}/x"], 73, "Not a directory"),
        (["-i", "{example}", "-o", "/proc/x"], 73, "this folder cannot be made"),
        (["-i", "{example}", "-o", "x", "--model", "esm3"], 69, "there is no model named esm3"),
        (["-i", "{example}", "-o", "x", "--model", "{example}"], 69, "is not an ESM-2 checkpoint"),
        (["-i", "{example}", "-o", "x", "--head", "{example}"], 69, "is not a VirNucPro head"),
        (["-i", "{example}", "-o", "x", "--head", "nowhere"], 66, "no such head"),
        # reported before the download
        (["-i", "{example}", "-o", "x", "--model", SMALL, "--head", "nowhere"], 66, "no such head"),
    ],
)
def test_mistake_has_an_exit_code_and_no_files(model, tmp_path, arguments, exit_code, words):
    (tmp_path / "file").write_text("")
    given = [arg.format(example=CONTIGS, file=tmp_path / "file") for arg in arguments]
    answer = virnucpro("predict", *model, *given, cwd=tmp_path)
    assert answer.returncode == exit_code, answer.stderr
    assert words in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (tmp_path / "x" / "predictions.tsv").exists()


EMPTY = [
    *((f"predict -i {CONTIGS} -o x {name}", name) for name in ("--model", "--head", "--gpus")),
    *((f"predict -i {CONTIGS} -o x {name}", name) for name in ("--input", "--log-file")),
    (f"predict -i {CONTIGS} --output-dir", "--output-dir"),
    ("models import virnucpro-500 --from", "--from"),
    *(("status", "DIR"), ("report", "DIR"), (f"compare {CONTIGS}", "RESULT")),
    *((f"models {command}", "NAME|PATH") for command in ("verify", "check")),
]


@pytest.mark.parametrize(("words", "name"), EMPTY)
def test_empty_value_hints_at_an_unset_variable(tmp_path, words, name):
    """An empty folder name is not the current folder."""
    answer = virnucpro(*words.split(), "", cwd=tmp_path)
    assert answer.returncode == 64
    hint = "hint:  check that the shell variable in it is set"
    assert f"error: {name} is empty\n{hint}" in answer.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["extract", "contigs.fa", "-o", "x"], "did you mean --input contigs.fa?"),
        (["extract", "-o", "x", "contigs.fa"], "did you mean --input contigs.fa?"),
        (["predict", "contigs.fa"], "did you mean --input contigs.fa?"),
        (["predict", "contigs.fa", "results"], "did you mean --input contigs.fa? Each file needs"),
        (["predict", "-i", "a.fa", "b.fa", "c.fa", "-o", "x"], "did you mean --input b.fa? Each"),
        (["predict", "-i", "a.fa", "-o", "x", "-t4"], "did you mean --workers?"),
        (["predict", "-input", "a.fa", "-o", "x"], "did you mean --input?"),
        (["train", "--data", "a.tsv", "--out=x"], "did you mean --output-dir?"),
        (["predict", "-i", "a.fa", "-o", "x", "--cpu"], "did you mean --device cpu?"),
        (["predict", "-i", "a.fa", "-o", "x", "--cpus", "4"], "did you mean --workers?"),
        (["predict", "-i", "a.fa", "-threshold", "0.5"], "did you mean --threshold?"),
        (["predict", "-", "-o", "x"], "did you mean --input -?"),
    ],
)
def test_refused_word_suggests_the_meant_option(tmp_path, arguments, hint):
    answer = virnucpro(*arguments, cwd=tmp_path)
    assert answer.returncode == 64
    assert f"hint:  {hint}" in answer.stderr


@pytest.mark.parametrize("letter", ["o", "q", "v", "i", "h", "t"])
def test_value_of_one_letter_is_a_name(tmp_path, letter):
    for words in (f"predict -q -i {CONTIGS} -o {letter}", f"status {letter}", f"regions {letter}"):
        answer = virnucpro(*words.split(), cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
    assert (tmp_path / letter / "predictions.tsv").exists()


def test_input_of_one_letter_is_a_name(tmp_path):
    (tmp_path / "i").write_text(CONTIGS.read_text())
    answer = virnucpro("predict", "-i", "i", "-o", "x", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert {row["file"] for row in rows(tmp_path / "x" / "predictions.tsv")} == {"i"}


@pytest.mark.parametrize("word", ["--force", "-q", "-qv", "--no-report", "-i", "--output-dir"])
def test_option_as_value_is_refused(tmp_path, word):
    answer = virnucpro("predict", "-i", CONTIGS, "-o", word, cwd=tmp_path)
    assert answer.returncode == 64
    assert f"error: --output-dir has no value: the next word is the option {word}" in answer.stderr
    assert f"a file of this name is ./{word}" in answer.stderr
    assert not list(tmp_path.iterdir())


def test_value_may_begin_with_a_hyphen(tmp_path):
    """If this command has no such option, or if the folder is named."""
    command = ("predict", "-i", CONTIGS, "-o", "-results", "--log-file", "./--force", "-q")
    answer = virnucpro(*command, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"-results", "--force"}


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_is_printed(option):
    assert virnucpro(option).stdout == f"virnucpro {__version__}\n"


def asked_by_bash(words: str) -> dict[str, str]:
    """Return the environment in which bash asks what may follow these words."""
    return {
        **os.environ,
        "_VIRNUCPRO_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }


def offers(printed: str) -> list[str]:
    """Return the values that a shell is offered. Each line begins with the kind of a value."""
    return [line.partition(",")[2] for line in printed.splitlines()]


@pytest.mark.parametrize(
    "words",
    [
        *(f"{command} --model " for command in ("predict", "extract", "evaluate", "train")),
        *(f"models {command} " for command in ("info", "verify", "download")),
    ],
)
def test_shell_completes_model_names(words):
    offered = offers(virnucpro(env=asked_by_bash(f"virnucpro {words}esm2_t3")).stdout)
    assert offered == ["esm2_t30_150M_UR50D", "esm2_t33_650M_UR50D", "esm2_t36_3B_UR50D"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("virnucpro pre", "plain,predict"),
        ("virnucpro models ver", "plain,verify"),
        ("virnucpro predict --out", "plain,--output-dir"),
        ("virnucpro predict --device c", "plain,cuda\nplain,cpu"),
        ("virnucpro predict --input con", "file,con"),
        ("virnucpro predict --output-dir res", "dir,res"),
        ("virnucpro predict --model ./mod", "file,./mod"),
        ("virnucpro status res", "dir,res"),
    ],
)
def test_shell_completes_words(words, expected):
    assert virnucpro(env=asked_by_bash(words)).stdout.strip() == expected


@pytest.mark.parametrize(
    ("shell", "script", "start"),
    [
        ("bash", ".bash_completions/virnucpro.sh", ".bashrc"),
        ("zsh", ".zfunc/_virnucpro", ".zshrc"),
        ("fish", ".config/fish/completions/virnucpro.fish", None),
    ],
)
def test_completion_is_installed_once(tmp_path, shell, script, start):
    environment = {**os.environ, "HOME": str(tmp_path), "SHELL": f"/bin/{shell}"}
    if start:
        (tmp_path / start).write_text("alias x=y")
    for _ in range(2):
        answer = virnucpro("--install-completion", env=environment)
        assert answer.returncode == 0, answer.stderr
        assert str(tmp_path / script) in answer.stdout
    shown = virnucpro("--show-completion", env=environment).stdout
    assert (tmp_path / script).read_text().strip() == shown.strip()
    assert "_VIRNUCPRO_COMPLETE" in shown
    if start:
        first, *lines = (tmp_path / start).read_text().splitlines()
        assert first == "alias x=y" and len(lines) == 1


def test_bash_completes_with_the_installed_script(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path), "SHELL": "/bin/bash"}
    assert virnucpro("--install-completion", env=environment).returncode == 0
    question = (
        "source .bash_completions/virnucpro.sh; COMP_WORDS=(virnucpro models ver); COMP_CWORD=2; "
        "_virnucpro_completion virnucpro; echo ${COMPREPLY[@]}"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    answer = subprocess.run(
        ["bash", "-c", question],
        cwd=tmp_path,
        env={**environment, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert answer.stdout == "verify\n", answer.stderr


def test_completion_for_another_shell_is_refused(tmp_path):
    answer = virnucpro("--install-completion", env={**os.environ, "SHELL": "/bin/tcsh"})
    assert answer.returncode == 64
    assert "no completion for the shell tcsh" in answer.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("foo", "there is no command foo\nhint:  give one of predict, extract,"),
        ("predct", "there is no command predct\nhint:  did you mean predict?"),
        ("models vrify", "there is no command vrify\nhint:  did you mean verify?"),
        (
            "predict --rename-duplicate",
            "there is no option --rename-duplicate\nhint:  did you mean --rename-duplicates?",
        ),
        ("status", "DIR is missing\nhint:  see `virnucpro status --help`"),
        ("status a b", "unexpected: b\nhint:  see `virnucpro status --help`"),
        (
            "predict -i",
            "option '-i' requires an argument\nhint:  see `virnucpro predict --help`",
        ),
        (
            "predict --quiet=yes",
            "option '--quiet' does not take a value\nhint:  see `virnucpro predict --help`",
        ),
        ("train -o x", "--data is missing\nhint:  see `virnucpro train --help`"),
    ],
)
def test_usage_errors_have_our_form(words, error):
    answer = virnucpro(*words.split())
    assert (answer.returncode, answer.stdout) == (64, "")
    assert answer.stderr.startswith(f"error: {error}")


def test_completion_offers_models_without_torch():
    code = "from virnucpro.cli.main import main; main()"
    answer = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        capture_output=True,
        text=True,
        env=asked_by_bash("virnucpro predict --model "),
    )
    assert offers(answer.stdout) == list(NAMES)
    loaded = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "click" in loaded and not loaded & {"torch", "numpy", "h5py"}


def test_only_the_worker_imports_torch(tmp_path):
    """The import takes seconds.

    Without a model no process waits for it, with one the workers do.
    """
    folders = [str(tmp_path / name) for name in ("scored", "embedded")]
    scored = ["predict", "-i", str(CONTIGS), "-o", folders[0], "--no-regions"]
    embedded = ["predict", "-i", str(CONTIGS), "-o", folders[1], "--model", TINY_MODEL]
    commands = [scored, embedded, *([name, folders[0]] for name in ("regions", "report", "status"))]
    code = (
        "import sys, virnucpro.cli.main as c\n"
        f"for arguments in {[*commands, ['compare', *folders]]}:\n"
        "    sys.argv = ['virnucpro', *arguments]\n"
        "    try: c.main()\n"
        "    except SystemExit as end: print(arguments[0], end.code or 0, 'torch' in sys.modules)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    ends = [line for line in answer.stdout.splitlines() if line.endswith(("True", "False"))]
    expected = [*(f"{command[0]} 0 False" for command in commands), "compare 0 False"]
    assert ends == expected, answer


def test_models_state_size_before_download(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    answer = virnucpro("models", "info", "esm2_t36_3B_UR50D")
    assert answer.returncode == 0, answer.stderr
    # 2 bytes for each of 2,832 M parameters; two batches of 16,384 tokens of 2,560 dimensions,
    # 64 bytes for each number; the checkpoint has 5.7 GB
    assert "GPU memory  11.0 GB for the default batches, 6.3 GB at least" in answer.stdout
    assert "disk        11.3 GB, including 5.7 GB for the converted model" in answer.stdout
    listed = virnucpro("models", "list").stdout
    assert re.search(r" 6\.3 GB to 11\.0 GB +no +5\.7 GB to download", listed)
    assert not (tmp_path / "torch").exists()


def test_bundle_info_lists_encoders_and_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    code, shown = invoke("models", "info", "virnucpro-500")
    assert code == 0, shown
    lines = shown.splitlines()
    assert lines[0].split(maxsplit=1) == ["encoders", "dnabert-s and esm2_t36_3B_UR50D"]
    assert lines[1].endswith("/virnucpro-500/500_model.pth, for chunks of 500 bases")
    assert lines[2].split() == ["to", "fetch", "6.2", "GB"]
    files = [line.rpartition("/")[2] for line in lines if line.startswith("file ")]
    assert {"pytorch_model.bin", "esm2_t36_3B_UR50D.pt", "500_model.pth"} < set(files)
    # both encoders are loaded at once
    assert "GPU memory  11.7 GB for the default batches, 7.0 GB at least" in lines


def test_resume_keeps_auto_precision(model, tmp_path):
    command = ("predict", "-i", CONTIGS, "-o", tmp_path / "run", *model)
    assert virnucpro(*command, "--precision", "fp32").returncode == 0
    assert virnucpro(*command, "--resume").returncode == 0
    assert virnucpro(*command, "--resume", "--precision", "bf16").returncode == 73


@pytest.mark.parametrize(("term", "more"), [("xterm", ["-q"]), ("dumb", []), ("xterm", [])])
def test_log_lines_on_a_terminal_wrap_between_words(tmp_path, term, more):
    for name in ("first.fa", "second.fa"):
        (tmp_path / name).write_text(CONTIGS.read_text())
    inputs = ("-i", tmp_path / "first.fa", "-i", tmp_path / "second.fa")
    command = ["predict", *inputs, "-o", tmp_path / "run", *more]
    exit_code, shown = in_terminal(list(map(str, command)), {"TERM": term, "COLUMNS": "60"})
    assert exit_code == 0, shown
    warning = re.search(r"WARNING\s.*?twice", re.sub(r"\x1b\[[0-9;]*m", "", shown), re.DOTALL)
    _, *others = warning[0].splitlines()
    assert others and all(line.startswith("    ") for line in others)
    words = " ".join(warning[0].split())
    paths = f"{tmp_path / 'first.fa'} and {tmp_path / 'second.fa'}"
    assert words == f"WARNING {paths} have the same content: each record counts twice"


def test_closed_standard_input_is_refused(tmp_path):
    command = [sys.executable, "-m", "virnucpro", "predict", "-i", "-", "-o", str(tmp_path / "y")]
    without_stdin = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    closed = subprocess.run(without_stdin, capture_output=True, text=True)
    assert closed.returncode == 66, closed.stderr
    assert "standard input is closed" in closed.stderr


@pytest.mark.parametrize(
    ("more", "environment", "has_dashboard", "has_colours"),
    [
        ([], {"TERM": "xterm-256color"}, True, True),
        ([], {"TERM": "xterm-256color", "NO_COLOR": "1"}, True, False),
        ([], {"TERM": "dumb"}, False, False),
        (["--quiet"], {"TERM": "xterm"}, False, False),
    ],
)
def test_terminal_gets_dashboard_and_colours(
    model, tmp_path, more, environment, has_dashboard, has_colours
):
    arguments = ["predict", "-i", CONTIGS, "-o", tmp_path / "run", *model, *more]
    exit_code, shown = in_terminal(list(map(str, arguments)), environment)
    assert exit_code == 0, shown
    assert " records in " in shown
    assert (ESCAPE in shown) == has_dashboard
    assert not has_dashboard or ("elapsed" in shown and "remaining" in shown)
    (line,) = [line for line in shown.splitlines() if " viruses: " in line]
    assert (ESCAPE in line.partition(" viruses: ")[2]) == has_colours
    codes = [code.split("m")[0] for code in shown.split(ESCAPE + "[")[1:]]
    colours = [code for code in codes if code.isdigit() and code[0] in "34"]
    assert bool(colours) == has_colours


def test_terminal_shows_early_that_it_works(tmp_path):
    """Before imports and before a model is loaded. This command ends at its first mistake."""
    arguments = ["predict", "-i", "nowhere.fa", "-o", str(tmp_path / "run")]
    exit_code, shown = in_terminal(arguments, {"TERM": "xterm"})
    assert exit_code == 66
    assert shown.startswith("loading ...\r")
    assert in_terminal(arguments, {"TERM": "dumb"})[1].startswith("loading ...\r\n")
    assert "loading" not in in_terminal([*arguments, "--quiet"], {"TERM": "xterm"})[1]
    assert "loading" not in virnucpro(*arguments).stderr


def test_quiet_prints_warnings_and_the_summary_only(model, tmp_path):
    short = write_fasta(tmp_path / "short.fa", {"a": "ACGT" * 5})
    answer = virnucpro("predict", "-i", CONTIGS, "-o", tmp_path / "run", *model, "--quiet")
    assert answer.stderr == ""
    first, second, *_ = answer.stdout.splitlines()
    assert re.fullmatch(r"(\d+) viruses: \1 contigs", first), first
    assert second.startswith("16 records in ")
    warned = virnucpro("predict", "-i", short, "-o", tmp_path / "short", *model, "--quiet")
    lines = warned.stderr.splitlines()
    assert lines and all(" WARNING " in line for line in lines)
    assert " INFO " in (tmp_path / "run" / "virnucpro.log").read_text()


def test_predict_ends_with_a_useful_command(model, tmp_path):
    folder = tmp_path / "it's [bold]mine"
    answer = virnucpro("predict", "-i", CONTIGS, "-o", folder, *model)
    assert answer.returncode == 0, answer.stderr
    n_records = CONTIGS.read_text().count(">")
    assert f"{n_records} records in " in answer.stdout
    assert f"results: {folder}" in answer.stdout
    assert ESCAPE not in answer.stdout + answer.stderr
    assert len((folder / "predictions.tsv").read_text().splitlines()) == n_records + 1
    last = answer.stdout.splitlines()[-1]
    assert last.startswith("next: head ")
    look = subprocess.run(
        ["bash", "-c", last.removeprefix("next: ").partition(" | ")[0]],
        capture_output=True,
        text=True,
    )
    assert look.stdout.splitlines() == (folder / "viruses.tsv").read_text().splitlines()[:10]


def test_failure_offers_resume():
    argv = ["predict", "-i", "a b.fa", "-o", "x", "--force"]
    offered = next_step(Path("x/predictions.tsv"), argv, failed=True)
    assert offered == ["next: virnucpro predict -i 'a b.fa' -o x --resume"]
    for pipe in (["-i", "-"], ["-i-"], ["--input=-"]):
        piped = next_step(Path("-x/predictions.tsv"), ["predict", *pipe, "-o", "-x"], failed=True)
        assert piped == ["next: head ./-x/predictions.tsv | column -t -s $'\\t' | less -S"]
    assert next_step(Path("x\x1b[2J/predictions.tsv"), argv, failed=False) == []


def test_closed_reader_does_not_break_the_run(model, tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = ("predict", "-i", CONTIGS, "-o", tmp_path / "run", *model)
    process = start(*command, streams=[0, write, 2])
    os.close(write)
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "run" / "predictions.tsv").exists()


@pytest.mark.parametrize("words", ["models list", "predict -h"])
def test_closed_pipe_ends_table_quietly(words):
    """As in ``virnucpro models list | head -1``, in a shell that checks all exit codes."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "virnucpro", *words.split()]
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (process.returncode, process.stderr) == (0, "")


def test_standard_streams_may_be_closed(model, tmp_path):
    arguments = ["predict", "-i", CONTIGS, "-o", tmp_path / "out", *model, "--device", "cpu"]
    command = [sys.executable, "-m", "virnucpro", *map(str, arguments)]
    closed = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command])
    assert closed.returncode == 0
    assert set(statuses(tmp_path / "out").values()) == {"scored"}


def test_log_has_settings_times_and_end(model, tmp_path):
    second = tmp_path / "second.log"
    answer = virnucpro(
        "predict", "-i", CONTIGS, "-o", tmp_path / "run", *model, "--log-file", second
    )
    assert answer.returncode == 0, answer.stderr
    for log in (tmp_path / "run" / "virnucpro.log", second):
        text = log.read_text()
        assert "shard 000000 given to cpu" in text
        assert "shard 000000 done by cpu in " in text
        assert "is ready: cpu, " in text
    virnucpro(
        "predict", "-i", CONTIGS, "-o", tmp_path / "run", *model, "--resume", "--min-length", 9
    )
    assert "the run ended: this folder contains" in (tmp_path / "run" / "virnucpro.log").read_text()


def test_devices_models_and_status_have_output(model, tiny, tmp_path):
    assert "cpu" in virnucpro("devices").stdout
    assert "layers      2" in virnucpro("models", "info", tiny.model).stdout
    assert "is complete" in virnucpro("models", "verify", tiny.model).stdout
    assert virnucpro("status", tmp_path).returncode == 66
    virnucpro("predict", "-i", CONTIGS, "-o", tmp_path / "run", *model)
    answer = virnucpro("status", tmp_path / "run", "--verify")
    assert answer.returncode == 0
    assert "complete" in answer.stdout and "intact: " in answer.stdout


def test_resume_without_a_run_starts_one(tmp_path):
    command = ("predict", "-i", CONTIGS, "-o", tmp_path / "run", "--resume")
    line = f"no run yet in {tmp_path / 'run'}: starting a new one"
    assert line in virnucpro(*command).stderr
    assert line not in virnucpro(*command).stderr


def test_bad_file_is_reported_once(tmp_path):
    (tmp_path / "bad.fa").write_text("junk\n")
    bad = virnucpro("predict", "-i", tmp_path / "bad.fa", "-o", tmp_path / "x")
    assert bad.returncode == 65 and bad.stderr.count("expected '>'") == 1
    write_fasta(tmp_path / "short.fa", {"a": "ACGT"})
    short = virnucpro("predict", "-i", tmp_path / "short.fa", "-o", tmp_path / "y")
    assert "1 too_short\nno record was scored: see the columns status and note" in short.stdout


def test_predict_needs_only_input_and_output(tmp_path):
    answer = virnucpro("predict", "-i", CONTIGS, "-o", tmp_path / "run", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    calls = {row["record"]: row["call"] for row in rows(tmp_path / "run" / "predictions.tsv")}
    wrong = [name for name, call in calls.items() if call == "virus" and "_host_" in name]
    missed = [name for name, call in calls.items() if call == "other" and "_virus_" in name]
    assert (wrong, missed) == ([], [])


def test_models_list_marks_the_built_in_model():
    header, *lines = virnucpro("models", "list").stdout.splitlines()
    assert header.split()[:3] == ["name", "parameters", "dimensions"]
    assert [line.split()[0] for line in lines[: len(NAMES)]] == list(NAMES)
    (tiny,) = (line for line in lines if line.startswith(TINY_MODEL))
    assert tiny.split()[1:4] == ["1.2", "M", "128"] and " built-in " in tiny
    assert tiny.endswith(f"/embedded/{TINY_MODEL} ({TINY_NOTICE})")
    assert "encoder id" in virnucpro("models", "info", "virnucpro-tiny").stdout
    assert "is complete" in virnucpro("models", "verify", "virnucpro-tiny").stdout


def test_imported_model_is_listed_and_used(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    answer = virnucpro("models", "import", tiny.model, "--name", "mine")
    assert answer.returncode == 0, answer.stderr
    (place,) = (tmp_path / "torch").rglob("mine")
    assert f"mine is at {place}, sha256 {inspect_esm2(place).sha256()}" in answer.stdout
    assert virnucpro("models", "list").stdout.splitlines()[-1].startswith("mine ")
    found = virnucpro(
        *("predict", "-i", CONTIGS, "-o", tmp_path / "run", "--model", "mine"),
        *("--head", tiny.head_file, "--device", "cpu", "--workers", "1"),
    )
    assert found.returncode == 0, found.stderr
    assert virnucpro("models", "import", tiny.head_file, "--name", "mine").returncode == 69


@pytest.mark.parametrize(
    "arguments",
    [
        ("predict", "-i", "~nosuchuser/in.fa", "-o", "run"),
        ("predict", "-i", CONTIGS, "-o", "~nosuchuser/run"),
        ("predict", "-i", CONTIGS, "-o", "run", "--model", "~nosuchuser/esm2"),
        ("predict", "-i", CONTIGS, "-o", "run", "--head", "~nosuchuser/head"),
        ("models", "import", "~nosuchuser/esm2"),
    ],
)
def test_unknown_home_folder_is_reported(arguments, tmp_path):
    answer = virnucpro(*arguments, cwd=tmp_path)
    assert answer.returncode == 64
    assert "no home folder is known for ~nosuchuser" in answer.stderr
    assert "hint:  write the path in full" in answer.stderr
    assert not list(tmp_path.iterdir())


needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


@needs_dev_full
def test_unwritable_log_is_reported_once(model, tmp_path):
    command = ("predict", "-i", CONTIGS, "-o", tmp_path / "run", *model)
    answer = virnucpro(*command, "--log-file", "/dev/full")
    assert answer.returncode == 0
    assert answer.stderr.count("/dev/full cannot be written: [Errno 28] No space left") == 1
    assert "/dev/full cannot be written" in (tmp_path / "run" / "virnucpro.log").read_text()


@needs_dev_full
def test_answer_lost_to_a_full_disk_is_reported(tmp_path):
    command = ["predict", "-i", CONTIGS, "-o", tmp_path / "run"]
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            [sys.executable, "-m", "virnucpro", *map(str, command)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert answer.returncode == 74
    assert "error: standard output: No space left on device" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert (tmp_path / "run" / "predictions.tsv").exists()


def test_error_names_the_path_of_the_user(tmp_path):
    answer = virnucpro("bench", "--quiet", "--device", "cpu", "--json", tmp_path)
    assert answer.returncode == 73
    assert f"error: {tmp_path}: Is a directory" in answer.stderr


def test_help_says_when_a_gpu_is_used():
    for command, default in (("predict", "none; all if a model embeds"), ("extract", "all")):
        said = " ".join(virnucpro(command, "--help").stdout.split())
        gpus = said.partition("--gpus all|LIST ")[2].partition("--device ")[0]
        assert f"[default: {default}]" in gpus
        assert ("Only a model uses a GPU" in gpus) == (command == "predict")


def test_default_run_says_that_no_gpu_is_used(tmp_path):
    answer = virnucpro("predict", "-i", CONTIGS, "-o", tmp_path / "run")
    line = "devices: CPU cores; no GPU is used, because no model embeds"
    assert line in answer.stderr and line in (tmp_path / "run" / "virnucpro.log").read_text()
