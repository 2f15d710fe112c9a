"""Developer benchmarks measure real work. ``benchmarks/`` is not in the wheel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import front_end
import measure
import pytest
import store
import variants
from card import fill_card
from conftest import TINY
from eight_bits import compare_smoothing
from file_to_file import FileRun, time_extract
from forkserver_runner import virnucpro
from poison import measure_poison
from tiles import count_tiles
from timing import Setting, proteins_of
from variants import compare_variants, profile_kernels, try_budgets

from virnucpro.models.validation.random_weights import write_checkpoint

MEASURE = Path(front_end.__file__).with_name("measure.py")


def test_file_benchmark_separates_start_up(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.hub._hub_dir", None)  # the measurement sets it; other tests do not
    write_checkpoint(tmp_path / "tiny.pt", TINY, seed=3)
    row = time_extract(
        FileRun(
            model="tiny",
            profile="proteins",
            proteins=proteins_of("proteins", 2000, seed=3),
            setting=Setting(tmp_path / "tiny.pt", TINY, "cpu", 2048),
            n_workers=1,
            cuda_visible_devices=None,
        )
    )
    assert not row.reason and row.n_workers == 1
    assert row.starting_seconds < row.seconds[0]
    assert {"reading", "embedding", "writing tables"} <= set(row.stages)
    assert 0 <= row.outside_batches < 1


def test_wrong_front_end_is_not_measured(monkeypatch):
    monkeypatch.setitem(front_end.WAYS, "virnucpro", lambda *_: lambda: [("r_chunk_1F1", "M")])
    rows = list(front_end.measure_front_end(20_000, 1, 1, 0))
    assert len(rows) == 4
    assert all("and 1 ORFs" in row.reason and row.mbp_per_second is None for row in rows)


@pytest.mark.usefixtures("quick_starts")
def test_poison_is_compared_with_a_clean_run():
    rows = list(measure_poison(n_proteins=9, n_poisoned=1, length=10, n_workers=1))
    assert [(row.run, row.n_failed) for row in rows] == [("undisturbed", 0), ("poisoned", 1)]
    assert rows[0].ratio == 1 and min(row.cpu_seconds for row in rows) > 0


@pytest.mark.parametrize("options", [(), ("--keep-vectors",)])
def test_cluster_is_computed_from_measured_tasks(options):
    sizes = ("--workers", "1,4", "--bases", "60000", "--reads", "100000000")
    answer = subprocess.run(
        [sys.executable, MEASURE, "cluster", *sizes, *options],
        capture_output=True,
        text=True,
        check=True,
    )
    one, four = map(json.loads, answer.stdout.splitlines()[1:])
    assert (one["workers_worth"], one["n_reads"]) == (1.0, 100_000_000)
    assert one["n_slices"] == four["n_slices"] > 1_000
    assert one["work_seconds"] == pytest.approx(4 * four["work_seconds"], rel=0.1)


def test_smoothing_helps_int8_with_outliers():
    """e4m3 rounds a number by its own size, so a channel's scale hardly matters."""
    *emulated, int8 = compare_smoothing("tiny", TINY, 200, outlier=32.0)
    errors = {(row.number, row.strength): row.largest_error for row in emulated}
    assert errors["int8", 0.5] < 0.5 * errors["int8", None]
    assert 0.7 < errors["e4m3", 0.5] / errors["e4m3", None] < 1.3
    assert errors["int8", 0.5] < 0.5 * errors["e4m3", 0.5]
    assert int8.largest_error < 0.5 * errors["int8", None]


def test_tiles_of_real_input_are_counted(tmp_path):
    fasta = tmp_path / "reads.fa"
    fasta.write_text("".join(f">{i}\n{'ACG' * 50}\n" for i in range(3)))
    (row,) = count_tiles([fasta])
    assert row.n_proteins == 18 and row.median_tokens == 51
    assert row.flash_attention < 0.2 < 0.6 < row.shared_tiles_of_64


def test_store_benchmark_writes_and_reads_each_type(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(store, "N_ROWS", 600)
    monkeypatch.setattr(store, "REPEATS", 2)
    store.main(str(tmp_path))
    header, *rows, last = capsys.readouterr().out.splitlines()
    assert header.startswith("rows\tstore\tGB per 10^6 proteins")
    assert [row.split("\t")[:2] for row in rows] == [
        [kind, store_type]
        for kind in ("per protein", "per residue")
        for store_type in ("float32", "bfloat16")
    ]
    assert all(float(row.split("\t")[2]) > 0 for row in rows)
    assert last.startswith("numpy's tofile writes ")
    assert not list(tmp_path.iterdir())


def test_unavailable_variants_say_why(tmp_path):
    setting = Setting(tmp_path / "not there.pt", TINY, "cpu", 600)  # weights are made on the device
    proteins = proteins_of("reads-150", 1000, seed=3)
    rows = {row.how: row for row in compare_variants(setting, "reads-150", proteins, 0.0)}
    assert len(rows) == len(variants.WAYS) == 8
    errors = {name: row.largest_error for name, row in rows.items() if not row.reason}
    assert list(errors) == ["eager", "as in a run", "GELU by tanh", "fp8", "int8"]
    # from vectors in float32, of the same weights in every way
    assert errors["eager"] == 0 < errors["as in a run"] < 1e-2 < errors["fp8"] < 0.4
    assert errors["as in a run"] < errors["int8"] < errors["fp8"]
    assert rows["rotation and LayerNorm by PyTorch"].reason, "a CPU has no FlashAttention"
    assert not profile_kernels(setting, "tiny", "reads-150", proteins, "bf16").reason
    small, large = try_budgets(setting, "tiny", [200, 1000])
    assert small.n_other_bits == large.n_other_bits == 0, "on a CPU bits do not depend on the batch"


def test_variants_are_chosen_by_name():
    assert variants.choose_ways([]) == list(variants.WAYS)
    assert variants.choose_ways(["fp8"]) == ["eager", "as in a run", "fp8"]


def test_measure_runs_from_any_folder(tmp_path):
    """It prints JSON. Spawned processes find its workers, which do nothing here."""
    words = ["coordinator", "--workers", "2"]
    answer = subprocess.run(
        [sys.executable, str(MEASURE), *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stderr
    report, row = map(json.loads, answer.stdout.splitlines())
    assert report["machine"]["cores"] >= 1 and "coordinator" in report["command"]
    assert not row["reason"] and row["n_workers"] == 2 and row["shards_per_second"] > 0
    assert len(row["idle_seconds_of_each"]) >= 2 and 0 < row["idle_seconds"] < 10


GPU_SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu.sh"


def run_gpu_script(
    *arguments: str, folder: Path, python: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with results in ``folder``. Its Python may be a shell script."""
    stand_in = folder / "python3"
    if python:
        stand_in.write_text(f"#!/bin/sh\n{python}")
        stand_in.chmod(0o755)
    program = stand_in if python else Path(sys.executable)
    usual = {"PATH": f"{program.parent}:{os.environ['PATH']}", "RESULTS": str(folder / "results")}
    return subprocess.run(
        [GPU_SCRIPT, *arguments],
        env={**os.environ, **usual, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_gpu_script_says_what_is_missing(tmp_path):
    (tmp_path / "tensorboard.py").write_text("raise ModuleNotFoundError('no tensorboard here')")
    answer = run_gpu_script("files", folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert answer.returncode == 69
    assert "no tensorboard here" in answer.stderr and "WHEELS" in answer.stderr
    assert not list((tmp_path / "results").iterdir())


FAILING = """[ "$1" = -c ] && exit 0
printf '%s\\n' "$*" >> "$COMMANDS"
echo '{"row": 1}'
echo 'a warning' >&2
exit 3
"""
CALLS = {
    "right": [
        *("devices", "predict", "predict_cpu", "predict_compared"),
        *("tests", "full_650M"),
        *("check", "check_fp32", "check_fp8", "check_int8", "right"),
    ],
    "time": ["time_650M", "time_3B"],
    "short": ["short_8M", "short_35M", "short_150M", "short_650M"],
    "files": [
        *("files_650M", "files_3B", "peers_650M", "peers_3B"),
        *("train", "tests_of_training"),
    ],
}


def test_dry_run_prints_and_runs_nothing(tmp_path):
    answer = run_gpu_script("--dry-run", "time", folder=tmp_path, PATH="/usr/bin:/bin")
    assert answer.returncode == 0 and not (tmp_path / "results").exists()
    lines = answer.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["280", "s"], ["310", "s"]]
    assert all("python3 benchmarks/measure.py variants --device cuda --models" in x for x in lines)
    for call in CALLS:
        printed = run_gpu_script("--dry-run", call, folder=tmp_path).stdout
        assert sum(int(line.split()[0]) for line in printed.splitlines()) < 600, "ten minutes"


def test_rehearsal_runs_on_the_cpu(tmp_path):
    answer = run_gpu_script("--rehearse", "files", folder=tmp_path, python='echo "$*"\n')
    assert answer.returncode == 0, answer.stderr
    measured = [line for line in answer.stdout.splitlines() if "measure.py" in line]
    assert len(measured) == 2
    assert all("--device cpu --models tiny" in line for line in measured)
    assert "--collect-only" in answer.stdout


@pytest.mark.parametrize("call", CALLS)
def test_gpu_steps_run_though_others_fail(tmp_path, call):
    """Lines of JSON have no warnings. A text file next to them says how each step ended."""
    recorded = tmp_path / "commands"
    results = tmp_path / "results"
    answer = run_gpu_script(call, folder=tmp_path, python=FAILING, COMMANDS=str(recorded))
    assert answer.returncode == 1, answer.stderr
    commands = [line.split() for line in recorded.read_text().splitlines()]
    for name, command in zip(CALLS[call], commands, strict=True):
        rows, said = (results / f"gpu_{name}.{suffix}" for suffix in ("jsonl", "txt"))
        if rows.exists():
            assert rows.read_text() == '{"row": 1}\n'
            assert said.read_text().startswith("a warning\nended with 3: python3 benchmarks/")
        else:
            assert '{"row": 1}' in said.read_text(), name
        match command:
            case ["benchmarks/measure.py", *arguments]:
                assert rows.exists() and measure.parse(arguments).measure
            case ["-m", "virnucpro", *arguments]:
                words = list(takewhile(lambda word: not word.startswith("-"), arguments))
                words = words[:2] if words[0] == "models" else words[:1]
                if words[0] in ("predict", "train"):  # so that nothing is downloaded
                    assert "--model virnucpro-tiny" in " ".join(arguments)
                answer = virnucpro(*words, "--help")
                for option in (word for word in arguments if word.startswith("--")):
                    assert option in answer.stdout, option
            case _:
                assert command[:2] == ["-m", "pytest"]


def test_full_card_gives_vectors_of_an_empty_one(tmp_path, monkeypatch):
    """Without a GPU, both runs are the same."""
    monkeypatch.setattr("card.subprocess.run", lambda words, **_: virnucpro(*words[3:]))
    write_checkpoint(tmp_path / "tiny.pt", TINY, seed=3)
    row = fill_card(Setting(tmp_path / "tiny.pt", TINY, "cpu", 600), "tiny", 1000, 1 << 30)
    assert not row.reason and row.free_bytes is None
    assert row.n_smaller == row.n_other_bits == row.largest_distance == 0


def test_gpu_script_names_existing_tests():
    root = Path(__file__).parents[2]
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (root / "benchmarks/gpu.sh").read_text())
    assert named
    for file, name in named:
        assert f"def {name}" in (root / file).read_text(), name
