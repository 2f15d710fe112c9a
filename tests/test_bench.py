"""What ``virnucpro bench`` promises: figures of all ways, from a seed, that survive a cut-off."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from conftest import TINY
from forked import start, virnucpro
from oracle import LONGEST, tolerance
from peers import peer_ways
from runs import our_processes

from virnucpro.encoders.esm2.checkpoint import ESM2Shape
from virnucpro.encoders.esm2.model import DTYPES
from virnucpro.encoders.options import BenchOptions
from virnucpro.encoders.proof.bench import Programme, Report, programme_on, resolve_bench, run_bench
from virnucpro.encoders.proof.synthetic import PROFILES, make_proteins, write_checkpoint
from virnucpro.encoders.proof.timing import (
    Comparison,
    Pass,
    Setting,
    TimedEncoder,
    Vectors,
    Way,
    compare_ways,
    layouts,
    load_ours,
    our_ways,
)
from virnucpro.ground.devices import Choice, Gpu
from virnucpro.ground.errors import UnavailableError, UsageError

ESCAPE = "\x1b"
QUICK = BenchOptions(device="cpu", threads=2, tokens=400, repeats=2, seed=3, quick=True)


@pytest.fixture(scope="module")
def programme() -> Programme:
    """All parts, on a model of two layers."""
    programme = resolve_bench(QUICK)
    assert set(programme.models) == {"8M"}
    return replace(programme, models={"tiny": TINY})


@pytest.fixture
def setting(tmp_path) -> Setting:
    write_checkpoint(tmp_path / "tiny.pt", TINY, seed=3)
    return Setting(tmp_path / "tiny.pt", TINY, "cpu", 2048)


def comparison(**changes) -> Comparison:
    given = {"profile": "proteins", "proteins": make_proteins("proteins", 2000, seed=3)}
    return Comparison(**(given | {"limits": {}, "repeats": 2} | changes))


def load_nothing(_: Setting) -> TimedEncoder:
    raise RuntimeError("no kernel image is available [red](a test)[/red]")


def fail_when_run(setting: Setting) -> TimedEncoder:
    def embed(_: list[str]) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory (a test)")

    return replace(load_ours(setting, "fp32"), embed=embed)


def give_nan(setting: Setting) -> TimedEncoder:
    ours = load_ours(setting, "fp32")
    return replace(ours, embed=lambda proteins: ours.embed(proteins) / 0)


FAILING = Way("broken", "fp32", "never loads", load_nothing)
FULL = Way("broken", "fp32", "never fits", fail_when_run)
OVERFLOWING = Way("broken", "fp16", "overflows", give_nan)


# The figures


@pytest.mark.usefixtures("quick_starts")
def test_all_programs_are_measured_in_both_layouts_and_the_json_has_every_repeat(
    programme, tmp_path
):
    """The weights are made as those of the oracle, for which the tolerance is derived."""
    report = Report(["virnucpro", "bench"], programme.seed, tmp_path / "bench.json")
    for row in run_bench(programme, lambda _: None):
        report.add(row)
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert figures["command"] == "virnucpro bench" and figures["seed"] == 3
    assert figures["machine"]["cores"] >= 1 and figures["machine"]["cpu"]
    assert figures["versions"]["torch"].startswith("2.") and figures["versions"]["fair-esm"]
    limits, rows = figures["limits"], figures["encoder"]
    assert not [row for row in (*limits, *rows) if row["reason"]]
    assert [row["unit"] for row in limits] == ["FLOP/s"] * len(programme.precisions) + ["bytes/s"]
    assert all(len(row["seconds"]) == 2 for row in (*limits, *rows))
    ways = {(row["program"], row["layout"]) for row in rows}
    both = ("1 x 2 threads", "2 x 1 thread")
    assert ways == {(program, layout) for program in ("fair-esm", "virnucpro") for layout in both}
    assert len({(row["n_proteins"], row["n_tokens"]) for row in rows}) == 1
    first = rows[0]
    assert (first["program"], first["how"][:12]) == ("fair-esm", "as published")
    for row in rows:
        assert row["ratio"] == pytest.approx(row["tokens_per_second"] / first["tokens_per_second"])
        assert row["largest_error"] <= tolerance(TINY.n_layers, DTYPES[row["precision"]]), row
        assert 0 <= row["host_share"] < 1 and min(row["seconds"]) > 0
    text = "\n".join(report.lines(is_terminal=False))
    assert ESCAPE not in text and "fair-esm" in text and "matrix product" in text


def test_all_ways_are_right_beyond_the_positions_that_bf16_can_count(setting):
    """The tables of the rotary embedding are float32 in the other programs too."""
    each = [protein[:LONGEST] for protein in make_proteins("proteins", 9000, seed=4)]
    proteins = sorted(each, key=len)[-3:]
    assert max(map(len, proteins)) > 900
    ways = [*peer_ways(setting, has_bf16=True), *our_ways(("fp32", "bf16"), setting)]
    with layouts(setting, 1, len(ways)) as places:
        rows = list(compare_ways(comparison(proteins=proteins, repeats=1), ways, places))
    for row in rows:
        assert row.largest_error <= tolerance(TINY.n_layers, DTYPES[row.precision]), row


def test_openvino_gives_the_vectors_that_its_roundings_explain(setting):
    pytest.importorskip("openvino")
    ways = peer_ways(setting, has_bf16=False)
    assert [way.program for way in ways][1:] == ["openvino"]
    with layouts(setting, 1, len(ways)) as places:
        _, row = compare_ways(comparison(repeats=1), ways, places)
    assert not row.reason
    assert row.largest_error <= tolerance(TINY.n_layers, torch.float32)


@dataclass
class Clockwork:
    """A layout in which every pass takes this time."""

    setting: Setting
    seconds: float
    n_passes: int = 0
    name: str = "clockwork"
    n_processes: int = 1

    def time(self, way: Way, proteins: Sequence[str]) -> tuple[Pass, Vectors]:
        self.n_passes += 1
        vectors = np.ones((len(proteins), self.setting.shape.dim), dtype=np.float32)
        return Pass(self.seconds, self.seconds, self.seconds, 1, None), vectors


@pytest.mark.parametrize(
    ("seconds", "n_repeats", "n_passes"),
    [(0.25, 4, 1 + 4 * 3), (9.0, 1, 2)],
    ids=["as many passes as fill the least time", "once where a pass takes long"],
)
def test_a_measurement_is_repeated_after_a_warm_up(setting, seconds, n_repeats, n_passes):
    place = Clockwork(setting, seconds)
    (row,) = compare_ways(comparison(repeats=4, least_seconds=0.6), [FAILING], [place])
    assert row.seconds == (seconds,) * n_repeats, "of one pass each"
    assert place.n_passes == n_passes


# What goes in


def test_the_same_seed_gives_the_same_proteins_of_the_lengths_of_their_profile():
    lengths = {}
    for profile in PROFILES:
        proteins = make_proteins(profile, 300_000, seed=1)
        assert proteins == make_proteins(profile, 300_000, seed=1)
        assert proteins != make_proteins(profile, 300_000, seed=2)
        lengths[profile] = np.array([len(protein) for protein in proteins])
        assert 0 <= 300_000 - (lengths[profile] + 2).sum() <= 2002
    assert set(lengths["reads-150"]) == {49, 50}
    assert lengths["six-frame-500"].max() == 166
    assert (lengths["six-frame-500"] == 166).mean() > 0.85
    assert 240 < np.median(lengths["proteins"]) < 300
    assert 1000 < lengths["proteins"].max() <= 2000


def test_the_same_seed_gives_the_same_weights(tmp_path):
    states = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tmp_path / name, TINY, seed)
        model = load_ours(Setting(tmp_path / name, TINY, "cpu", 2048), "fp32").model
        states.append(model.state_dict())
    a, b, c = states
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embedding.weight"], c["embedding.weight"])


def test_unknown_names_are_refused_before_anything_is_measured():
    for name in ("models", "profiles", "parts", "precisions"):
        with pytest.raises(UsageError, match=f"--{name}: 'nonsense' is unknown"):
            resolve_bench(replace(QUICK, **{name: "nonsense"}))


def test_precisions_are_those_asked_for_and_on_a_gpu_not_float32():
    gpu = Gpu(0, "GPU-a", "NVIDIA H200", 140 << 30, 139 << 30, (9, 0), (13, 0))
    choice = Choice(("cuda:0",), ("H200",), has_bf16=True, memory=139 << 30, gpus=(gpu,))
    usual = programme_on(choice, BenchOptions())
    assert (usual.precisions, usual.least_seconds) == (("bf16", "fp16"), 5)
    assert programme_on(choice, BenchOptions(precisions="bf16,fp32")).precisions == ("bf16", "fp32")
    with pytest.raises(UnavailableError, match="--precision fp16 is not possible on CPU"):
        resolve_bench(replace(QUICK, precisions="fp16"))


# Ways that fail


@pytest.mark.usefixtures("quick_starts")
def test_a_way_that_fails_or_dies_gives_a_row_with_the_reason_and_the_others_still_run(setting):
    ways = [FAILING, *our_ways(("fp32",), setting), FULL, OVERFLOWING]
    with layouts(setting, 2, len(ways)) as places:
        report = Report([], 0, None)
        rows = list(compare_ways(comparison(), ways, places))
        dying = [Way("broken", "fp32", "dies", die), ways[1]]
        dead, ours = compare_ways(comparison(), dying, places[1:])
    reasons = ("no kernel image", "", "out of memory", "its vectors are not finite")
    for pair, reason in zip(zip(rows[::2], rows[1::2], strict=True), reasons, strict=True):
        for row in pair:
            assert (reason in row.reason) if reason else not row.reason
            assert (row.tokens_per_second is None) == bool(reason)
    assert rows[2].ratio == 1, "the first of ours stands in for what is missing"
    assert len(rows[3].seconds) == 2
    for row in rows:
        report.add(row)
    text = " ".join("\n".join(report.lines(is_terminal=False)).split())
    assert "[red](a test)[/red]" in text, "a reason is no markup"
    assert dead.reason == "a process died"
    assert ours.tokens_per_second, "in new processes"


def die(_: Setting) -> TimedEncoder:
    os._exit(1)


def test_a_program_that_is_not_installed_is_a_row_that_says_so(setting, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    ways = [*peer_ways(setting, has_bf16=True)[-1:], *our_ways(("fp32",), setting)]
    with layouts(setting, 1, len(ways)) as places:
        missing, ours = compare_ways(comparison(), ways, places)
    assert "transformers is not installed; " in missing.reason
    assert "pip install -c constraints.txt -e '.[oracle]'" in missing.reason
    assert ours.ratio == 1 and ours.tokens_per_second


def test_weights_that_find_no_room_are_a_row_and_not_the_end(programme):
    """More bytes than a process can address."""
    huge = ESM2Shape(n_layers=1, dim=1 << 42, n_heads=1)
    without_room = replace(programme, parts=("encoder",), models={"huge": huge, "second": huge})
    rows = list(run_bench(without_room, lambda _: None))
    assert [row.model for row in rows] == ["huge", "second"]
    for row in rows:
        assert "no weights could be made: RuntimeError: " in row.reason


def test_processes_that_the_memory_does_not_hold_are_not_started(setting):
    ways = our_ways(("fp32",), setting)
    with layouts(setting, 1_000_000, 1) as (_, many):
        (row,) = compare_ways(comparison(), ways, [many])
    assert "1000000 processes would need" in row.reason
    assert not our_processes()


def test_on_a_gpu_one_model_is_loaded_at_a_time_and_compared_with_the_first_that_has_figures(
    setting,
):
    n_loaded, rows = [], []
    with layouts(setting, 1, 3) as (one,):
        peers = peer_ways(setting, has_bf16=False)[:1]
        ways = [FAILING, *peers, *our_ways(("fp32",), setting)]
        for row in compare_ways(comparison(one_by_one=True, repeats=1), ways, [one]):
            n_loaded.append(len(one.encoders))
            rows.append(row)
    assert n_loaded == [0] * 3
    assert [row.how for row in rows] == [way.how for way in ways]
    broken, reference, ours = rows
    assert broken.reason and broken.ratio is None
    assert reference.ratio == 1 and reference.largest_error == 0
    assert ours.ratio and ours.largest_error


# The command line


def test_the_command_prints_tables_and_no_progress_if_asked(tmp_path):
    path = tmp_path / "new" / "folder" / "bench.json"
    words = ["--device", "cpu", "--parts", "limits", "--repeats", "1", "--threads", "1", "--quiet"]
    answer = virnucpro("bench", *words, "--json", path)
    assert answer.returncode == 0 and answer.stderr == ""
    assert "matrix product" in answer.stdout and ESCAPE not in answer.stdout
    assert "--parts limits" in json.loads(path.read_text())["command"]


def test_an_interrupted_measurement_still_prints_what_it_has(tmp_path):
    path, said = tmp_path / "bench.json", tmp_path / "said"
    words = ["--parts", "limits,encoder", "--models", "8M", "--device", "cpu", "--repeats", "1"]
    read, write = os.pipe()
    with said.open("w") as out, os.fdopen(read) as errors:
        process = start(
            *("bench", *words, "--json", path),
            streams=[0, out.fileno(), write],
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        os.close(write)
        while "8M, six-frame-500: " not in errors.readline():
            assert process.exitcode is None
        os.kill(process.pid, signal.SIGTERM)
        err = errors.read()
    process.join()
    assert process.exitcode == 143
    assert "matrix product" in said.read_text() and "hold what was measured" in err
    assert json.loads(path.read_text())["limits"]
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"bench.json", "said"}, "no weights are left"
