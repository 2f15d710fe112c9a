"""What ``virnucpro bench`` promises: figures of all ways, from a seed, that survive a cut-off."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TINY
from oracle import LONGEST, tolerance
from peers import peer_ways
from runs import our_processes

from virnucpro.encoders.bench.comparison import Comparison, compare_ways
from virnucpro.encoders.bench.encoder import Setting, TimedEncoder, Way, load_ours, our_ways
from virnucpro.encoders.bench.layouts import layouts
from virnucpro.encoders.bench.programme import Programme, resolve_bench, run_bench
from virnucpro.encoders.bench.report import Report, make_console
from virnucpro.encoders.bench.synthetic import PROFILES, make_proteins, write_checkpoint
from virnucpro.encoders.esm2.attention import attend_runs
from virnucpro.encoders.esm2.model import DTYPES
from virnucpro.encoders.options import BenchOptions
from virnucpro.ground.devices import Choice, Gpu
from virnucpro.ground.errors import UnavailableError, UsageError

ESCAPE = "\x1b"
SECTIONS = ("limits", "encoder")
QUICK = BenchOptions(device="cpu", threads=2, tokens=400, repeats=2, seed=3, quick=True)


@pytest.fixture(scope="module")
def programme() -> Programme:
    """All parts, on a model of two layers."""
    programme = resolve_bench(QUICK)
    assert set(programme.models) == {"8M"}
    return replace(programme, models={"tiny": TINY})


@pytest.fixture(scope="module")
def report(programme, tmp_path_factory) -> Report:
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    report = Report(["virnucpro", "bench"], programme.seed, path)
    run_bench(programme, report.add, lambda _: None)
    return report


@pytest.fixture
def figures(report):
    return json.loads(report.path.read_text())


@pytest.fixture
def setting(tmp_path) -> Setting:
    write_checkpoint(tmp_path / "tiny.pt", TINY, seed=3)
    return Setting(tmp_path / "tiny.pt", TINY, "cpu", 2048)


def comparison(**changes) -> Comparison:
    proteins = make_proteins("proteins", 2000, seed=3)
    given = {"model": "tiny", "shape": TINY, "profile": "proteins", "limits": {}}
    return Comparison(**(given | {"proteins": proteins, "repeats": 2} | changes))


def load_nothing(_: Setting) -> TimedEncoder:
    raise RuntimeError("no kernel image is available [red](a test)[/red]")


def fail_when_run(setting: Setting) -> TimedEncoder:
    def embed(_: list[str]) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory (a test)")

    return replace(load_ours(setting, "fp32", attend_runs), embed=embed)


FAILING = Way("broken", "fp32", "never loads", load_nothing)
FULL = Way("broken", "fp32", "never fits", fail_when_run)


# The JSON


def test_the_json_tells_the_machine_the_versions_the_seed_and_the_command(figures):
    assert figures["command"] == "virnucpro bench" and figures["seed"] == 3
    assert figures["machine"]["cores"] >= 1 and figures["machine"]["cpu"]
    assert figures["versions"]["torch"].startswith("2.") and figures["versions"]["fair-esm"]
    assert figures["date"].startswith("20")


def test_the_json_has_every_section_and_every_repeat(figures):
    assert all(figures[section] for section in SECTIONS)
    assert not [row for section in SECTIONS for row in figures[section] if row["reason"]]
    assert all(len(row["seconds"]) == 2 for row in figures["limits"])
    for row in figures["encoder"]:
        assert len(row["seconds"]) == len(row["cpu_seconds"]) == 2
        assert min(row["seconds"]) > 0


def test_fair_esm_as_published_is_the_first_row_and_its_ratio_is_one(figures):
    first, *others = figures["encoder"]
    assert (first["program"], first["precision"]) == ("fair-esm", "fp32")
    assert first["ratio"] == 1 and first["largest_error"] == 0
    rate = first["tokens_per_second"]
    for row in others:
        assert row["ratio"] == pytest.approx(row["tokens_per_second"] / rate)


def test_every_program_is_measured_in_both_layouts_on_the_same_proteins(figures):
    rows = figures["encoder"]
    assert {row["layout"] for row in rows} == {"1 x 2 threads", "2 x 1 thread"}
    programs = {(row["program"], row["layout"]) for row in rows}
    assert {program for program, _ in programs} == {"fair-esm", "virnucpro"}
    assert len(programs) == 4
    assert len({(row["n_proteins"], row["n_tokens"]) for row in rows}) == 1
    assert all(0 <= row["host_share"] < 1 for row in rows)


def test_errors_of_all_ways_are_what_their_roundings_explain(figures):
    """The weights are made as those of the oracle, for which the tolerance is derived."""
    for row in figures["encoder"]:
        assert row["largest_error"] <= tolerance(TINY.n_layers, DTYPES[row["precision"]]), row


def test_all_ways_are_right_beyond_the_positions_that_bf16_can_count(setting):
    """The tables of the rotary embedding are float32 in the other programs too."""
    proteins = [protein[:LONGEST] for protein in make_proteins("proteins", 9000, seed=4)]
    assert max(map(len, proteins)) > 900
    ways = [*peer_ways(setting, has_bf16=True), *our_ways(("fp32", "bf16"), setting)]
    with layouts(setting, 1, len(ways)) as places:
        rows = list(compare_ways(comparison(proteins=proteins, repeats=1), ways, places))
    for row in rows:
        assert row.largest_error <= tolerance(TINY.n_layers, DTYPES[row.precision]), row


def test_openvino_gives_the_vectors_that_its_roundings_explain(setting):
    pytest.importorskip("openvino")
    assert [way.program for way in peer_ways(setting, has_bf16=False)][1:] == ["openvino"]
    ways = peer_ways(setting, has_bf16=False)
    with layouts(setting, 1, len(ways)) as places:
        _, row = compare_ways(comparison(repeats=1), ways, places)
    assert not row.reason
    assert row.largest_error <= tolerance(TINY.n_layers, torch.float32)


def test_results_are_there_after_a_cut_off(programme, tmp_path):
    path = tmp_path / "bench.json"
    report = Report([], programme.seed, path)

    n_limits = len(programme.precisions) + 1  # products in each, and a copy

    def record(row):
        report.add(row)
        if len(report.rows) == n_limits:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(programme, record, lambda _: None)
    assert len(json.loads(path.read_text())["limits"]) == n_limits
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


def test_tables_are_plain_text_in_a_pipe_whatever_a_reason_holds(report, setting):
    with layouts(setting, 1, 1) as places:
        (row,) = compare_ways(comparison(), [FAILING], places)
    report = replace_rows(report, [*report.rows, row])
    console = make_console(is_terminal=False)
    console.file = out = io.StringIO()
    report.print_tables(console)
    text = out.getvalue()
    assert ESCAPE not in text
    assert "[red](a test)[/red]" in " ".join(text.split())
    assert "fair-esm" in text and "matrix product" in text


def replace_rows(report: Report, rows: list) -> Report:
    other = Report([], 0, None)
    for row in rows:
        other.add(row)
    return other


# What goes in


@pytest.mark.parametrize("profile", PROFILES)
def test_the_same_seed_gives_the_same_proteins(profile):
    proteins = make_proteins(profile, 5000, seed=1)
    assert proteins == make_proteins(profile, 5000, seed=1)
    assert proteins != make_proteins(profile, 5000, seed=2)
    n_tokens = sum(len(protein) + 2 for protein in proteins)
    assert 0 <= 5000 - n_tokens <= 2002


def test_profiles_have_the_lengths_that_they_are_named_after():
    lengths = {
        profile: np.array([len(p) for p in make_proteins(profile, 300_000, seed=1)])
        for profile in PROFILES
    }
    assert set(lengths["reads-150"]) == {49, 50}
    assert lengths["six-frame-500"].max() == 166
    assert (lengths["six-frame-500"] == 166).mean() > 0.85
    assert 240 < np.median(lengths["proteins"]) < 300
    assert 1000 < lengths["proteins"].max() <= 2000


def test_the_same_seed_gives_the_same_weights(tmp_path):
    states = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tmp_path / name, TINY, seed)
        model = load_ours(Setting(tmp_path / name, TINY, "cpu", 2048), "fp32", attend_runs).model
        states.append(model.state_dict())
    a, b, c = states
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embedding.weight"], c["embedding.weight"])


# Ways that fail


def give_nan(setting: Setting) -> TimedEncoder:
    ours = load_ours(setting, "fp32", attend_runs)
    return replace(ours, embed=lambda proteins: ours.embed(proteins) / 0)


def test_vectors_that_are_not_finite_are_no_figure(setting):
    ways = [Way("broken", "fp16", "overflows", give_nan), *our_ways(("fp32",), setting)]
    with layouts(setting, 1, len(ways)) as places:
        broken, _ = compare_ways(comparison(), ways, places)
    assert broken.reason == "its vectors are not finite" and broken.ratio is None


def test_a_way_that_raises_gives_a_row_with_the_reason_and_the_others_still_run(setting):
    ways = [FAILING, *our_ways(("fp32",), setting), FULL]
    with layouts(setting, 2, len(ways)) as places:
        rows = list(compare_ways(comparison(), ways, places))
    assert [bool(row.reason) for row in rows] == [True, True, False, False, True, True]
    assert all("no kernel image" in row.reason for row in rows[:2])
    assert all("out of memory" in row.reason for row in rows[4:])
    assert [row.tokens_per_second for row in rows if row.reason] == [None] * 4
    assert rows[2].ratio == 1, "the first of ours stands in for what is missing"
    assert len(rows[3].seconds) == 2


def test_a_program_that_is_not_installed_is_a_row_that_says_so(setting, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    ways = [*peer_ways(setting, has_bf16=True)[-1:], *our_ways(("fp32",), setting)]
    with layouts(setting, 1, len(ways)) as places:
        missing, ours = compare_ways(comparison(), ways, places)
    assert "transformers is not installed; " in missing.reason
    assert "pip install -c constraints.txt -e '.[oracle]'" in missing.reason
    assert ours.ratio == 1 and ours.tokens_per_second


def test_weights_that_find_no_room_are_a_row_and_not_the_end(programme, monkeypatch):
    def fill_the_disk(*_: object) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data.pkl (a test)")

    monkeypatch.setattr("virnucpro.encoders.bench.programme.write_checkpoint", fill_the_disk)
    rows: list = []
    models = {"tiny": TINY, "second": TINY}
    run_bench(replace(programme, parts=("encoder",), models=models), rows.append, lambda _: None)
    assert [row.model for row in rows] == ["tiny", "second"]
    for row in rows:
        assert "no weights could be made: RuntimeError: PytorchStreamWriter" in row.reason


def test_unknown_names_are_refused_before_anything_is_measured():
    for name in ("models", "profiles", "parts", "precisions"):
        with pytest.raises(UsageError, match=f"--{name}: 'nonsense' is unknown"):
            resolve_bench(replace(QUICK, **{name: "nonsense"}))


def test_a_process_that_dies_is_a_reason_and_the_next_way_gets_new_ones(setting):
    ways = [Way("broken", "fp32", "dies", die), *our_ways(("fp32",), setting)]
    with layouts(setting, 2, len(ways)) as (_, many):
        dead, ours = compare_ways(comparison(), ways, [many])
    assert dead.reason == "a process died"
    assert ours.tokens_per_second


def die(_: Setting) -> TimedEncoder:
    os._exit(1)


def test_processes_that_the_memory_does_not_hold_are_not_started(setting):
    ways = our_ways(("fp32",), setting)
    with layouts(setting, 1_000_000, 1) as (_, many):
        (row,) = compare_ways(comparison(), ways, [many])
    assert "1000000 processes would need" in row.reason
    assert not our_processes()


def test_on_a_gpu_one_model_is_loaded_at_a_time_and_every_row_comes_when_it_is_measured(setting):
    """The second and the third kind of row are ours; the reference is in between."""
    ours, reference = our_ways(("fp32",), setting), peer_ways(setting, has_bf16=False)
    n_loaded, report = [], Report([], 0, None)
    with layouts(setting, 1, 3) as (one,):
        broken_one = replace(FAILING, program="virnucpro")
        ways = [*ours, broken_one, *reference, replace(ours[0], how="once more")]
        for row in compare_ways(comparison(one_by_one=True, repeats=1), ways, [one]):
            n_loaded.append(len(one.encoders))
            report.add(row)
    assert n_loaded == [1, 0, 1, 1, 0, 0], "four rows, and twice what came before the reference"
    assert [row.how for row in report.rows] == [way.how for way in ways]
    first, broken, exact, last = report.rows
    assert exact.ratio == 1 and broken.reason and first.ratio and last.ratio
    assert first.largest_error == pytest.approx(last.largest_error)


def test_a_repeat_fills_its_least_time(setting):
    slow = comparison(repeats=2, least_seconds=0.2)
    with layouts(setting, 1, 1) as places:
        (row,) = compare_ways(slow, our_ways(("fp32",), setting), places)
    assert len(row.seconds) == 2 and max(row.seconds) < 0.2, "per pass"
    assert sum(row.cpu_seconds) < 0.4


def test_precisions_are_those_asked_for_and_on_a_gpu_not_float32(monkeypatch):
    gpu = Gpu(0, "GPU-a", "NVIDIA H200", 140 << 30, 139 << 30, (9, 0), (13, 0))
    choice = Choice(("cuda:0",), ("H200",), has_bf16=True, memory=139 << 30, gpus=(gpu,))
    monkeypatch.setattr("virnucpro.encoders.bench.programme.choose_devices", lambda *_: choice)
    assert resolve_bench(BenchOptions()).precisions == ("bf16", "fp16")
    assert resolve_bench(BenchOptions(precisions="bf16,fp32")).precisions == ("bf16", "fp32")
    assert resolve_bench(BenchOptions()).least_seconds == 5
    monkeypatch.undo()
    with pytest.raises(UnavailableError, match="--precision fp16 is not for CPU"):
        resolve_bench(replace(QUICK, precisions="fp16"))


def test_a_pass_that_takes_long_is_repeated_once(setting, monkeypatch):
    monkeypatch.setattr("virnucpro.encoders.bench.comparison.LONG_SECONDS", 0.0)
    with layouts(setting, 1, 1) as places:
        (row,) = compare_ways(comparison(repeats=5), our_ways(("fp32",), setting), places)
    assert len(row.seconds) == 1


# The command line


def test_the_command_prints_a_table_says_what_it_does_and_keeps_quiet_if_asked(tmp_path):
    command = [sys.executable, "-m", "virnucpro", "bench", "--device", "cpu", "--parts"]
    path = tmp_path / "new" / "folder" / "bench.json"
    options = ["limits", "--repeats", "1", "--threads", "1", "--json", str(path)]
    loud = subprocess.run([*command, *options], capture_output=True, text=True)
    assert loud.returncode == 0, loud.stderr
    assert loud.stderr.splitlines()[-1] == "limits"
    assert "matrix product" in loud.stdout and ESCAPE not in loud.stdout
    assert "--parts limits" in json.loads(path.read_text())["command"]
    quiet = subprocess.run([*command, *options, "--quiet"], capture_output=True, text=True)
    assert quiet.stderr == ""


def test_an_interrupted_measurement_still_prints_what_it_has(tmp_path):
    path = tmp_path / "bench.json"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "virnucpro", "bench", "--parts", "limits,encoder"]
    process = subprocess.Popen(
        [*command, "--models", "35M", "--device", "cpu", "--json", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert process.stderr is not None
    while "35M, six-frame-500: " not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 143
    assert "matrix product" in out and "hold what was measured" in err
    assert json.loads(path.read_text())["limits"]
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"], "no weights are left"
