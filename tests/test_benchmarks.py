"""What the instruments of developers measure is real; ``benchmarks/`` is not in the wheel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import front_end
import pytest
import variants
from conftest import TINY
from coordinator import time_coordinator
from file_to_file import FileRun, time_extract
from front_end import check_agreement, make_contigs, make_reads
from runs import our_processes
from variants import compare_variants, profile_kernels, try_budgets

from virnucpro.encoders.bench.encoder import Setting
from virnucpro.encoders.bench.synthetic import make_proteins, write_checkpoint

MEASURE = Path(front_end.__file__).with_name("measure.py")


def test_a_run_of_files_is_a_real_one_and_tells_start_up_apart(tmp_path):
    write_checkpoint(tmp_path / "tiny.pt", TINY, seed=3)
    row = time_extract(
        FileRun(
            model="tiny",
            profile="proteins",
            proteins=make_proteins("proteins", 2000, seed=3),
            setting=Setting(tmp_path / "tiny.pt", TINY, "cpu", 2048),
            n_workers=1,
            cuda_visible_devices=None,
        )
    )
    assert not row.reason and row.n_workers == 1
    assert row.starting_seconds < row.seconds[0]
    assert {"reading", "embedding", "writing tables"} <= set(row.stages)
    assert 0 <= row.outside_batches < 1


def test_both_ways_of_the_front_end_give_the_same_ids_and_proteins(tmp_path):
    random = Random(5)
    contigs = make_contigs(random, 60_000)
    records = [*contigs, *make_reads(random, contigs, 6_000), "N" * 700, "ACG", "ACGTNNA" * 90]
    fasta = tmp_path / "input.fa"
    fasta.write_text("".join(f">r{i}\n{bases}\n" for i, bases in enumerate(records)))
    assert check_agreement(front_end.WAYS.values(), fasta) > 100


def test_a_front_end_that_gives_other_proteins_is_not_measured(monkeypatch):
    monkeypatch.setitem(front_end.WAYS, "virnucpro", lambda *_: lambda: [("r_chunk_1F1", "M")])
    rows = list(front_end.measure_front_end(20_000, 1, 1, 0))
    assert len(rows) == 4
    assert all("and 1 ORFs" in row.reason and row.mbp_per_second is None for row in rows)


def test_the_coordinator_is_measured_with_workers_that_do_nothing_and_leaves_none():
    row = time_coordinator(2)
    assert not row.reason and row.shards_per_second > 0
    assert len(row.idle_seconds_of_each) >= 2
    assert 0 < row.idle_seconds < 10
    assert not our_processes()


def test_variants_that_do_not_run_here_say_why_and_the_others_are_measured(tmp_path, monkeypatch):
    for name in list(variants.WAYS):  # compiling takes long
        if "compiled" in name and "FlashAttention-3" not in name:
            monkeypatch.delitem(variants.WAYS, name)
    write_checkpoint(tmp_path / "tiny.pt", TINY, seed=3)
    setting = Setting(tmp_path / "tiny.pt", TINY, "cpu", 600)
    proteins = make_proteins("reads-150", 1000, seed=3)
    rows = {row.how: row for row in compare_variants(setting, "reads-150", proteins, 0.0)}
    assert len(rows) == len(variants.WAYS) == 4
    assert not rows["as in a run"].reason and rows["as in a run"].ratio == 1
    assert rows["CUDA graphs"].reason and rows["compiled, FlashAttention-3"].reason
    assert not profile_kernels(setting, "tiny", "reads-150", proteins).reason
    small, large = try_budgets(setting, "tiny", [200, 1000])
    assert small.n_other_bits == large.n_other_bits == 0, "on a CPU bits do not depend on the batch"


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["front-end", "--bases", "20000", "--repeats", "1"], [("way", "virnucpro")]),
        (
            ["poison", "--proteins", "9", "--poisoned", "1", "--length", "10", "--workers", "1"],
            [("n_failed", 0), ("n_failed", 1)],
        ),
    ],
)
def test_the_script_runs_from_any_folder_and_prints_json(tmp_path, arguments, facts):
    """Its workers are found by the processes that run them."""
    answer = subprocess.run(
        [sys.executable, str(MEASURE), *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stderr
    report, *rows = map(json.loads, answer.stdout.splitlines())
    assert report["machine"]["cores"] >= 1 and arguments[0] in report["command"]
    for name, value in facts:
        assert value in [row[name] for row in rows]


GPU_SCRIPT = Path(__file__).parents[1] / "benchmarks/gpu.sh"


def run_gpu_script(call: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a call of the script gives, with its results in ``folder``."""
    python = str(Path(sys.executable).parent)
    usual = {"PATH": f"{python}:{os.environ['PATH']}", "RESULTS": str(folder / "results")}
    return subprocess.run(
        [GPU_SCRIPT, call],
        env={**os.environ, **usual, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_for_a_gpu_says_what_is_missing_before_it_measures(tmp_path):
    (tmp_path / "tensorboard.py").write_text("raise ModuleNotFoundError('no tensorboard here')")
    answer = run_gpu_script("files", tmp_path, PYTHONPATH=str(tmp_path))
    assert answer.returncode == 69
    assert "no tensorboard here" in answer.stderr and "WHEELS" in answer.stderr
    assert not list((tmp_path / "results").iterdir())


def test_lines_of_json_stay_free_of_warnings_and_say_beside_them_how_they_ended(tmp_path):
    python = tmp_path / "python3"  # instead of a measurement on a GPU
    python.write_text("#!/bin/sh\necho '{\"row\": 1}'\necho 'a warning' >&2\nexit 3\n")
    python.chmod(0o755)
    answer = run_gpu_script("time", tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", MODELS="8M")
    assert answer.returncode == 1
    results = tmp_path / "results"
    assert (results / "gpu_time_8M.jsonl").read_text() == '{"row": 1}\n'
    said = (results / "gpu_time_8M.txt").read_text()
    assert said.startswith("a warning\nended with 3: python3 benchmarks/measure.py variants")


def test_the_tests_that_the_script_for_a_gpu_names_are_there():
    root = Path(__file__).parents[1]
    named = re.findall(r"(tests/\w+\.py)(?:::(\w+))?", (root / "benchmarks/gpu.sh").read_text())
    assert named
    for file, name in named:
        assert f"def {name}" in (root / file).read_text(), name
