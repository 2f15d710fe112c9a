"""``virnucpro bench`` measures how fast a device embeds."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from conftest import TINY
from forkserver_runner import start

from virnucpro.core.errors import UnavailableError, UsageError
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.validation.bench import _best_rate, _HardwareLimit, bench
from virnucpro.models.validation.options import BenchOptions
from virnucpro.models.validation.random_weights import MODELS


def measure(tmp_path, monkeypatch, **models: ESM2Shape) -> tuple[dict, list[str]]:
    """Return the JSON and the lines of a short measurement, for models of these shapes."""
    for name, shape in models.items():
        monkeypatch.setitem(MODELS, name, shape)
    path = tmp_path / "new" / "bench.json"
    lines = []
    options = BenchOptions(models=",".join(models), device="cpu", quick=True, json=path)
    bench(options, ["virnucpro", "bench"], lambda _: None, lines.extend)
    return json.loads(path.read_text()), lines


def test_both_programs_are_measured_in_each_precision(tmp_path, monkeypatch):
    figures, lines = measure(tmp_path, monkeypatch, tiny=TINY)
    assert figures["command"] == "virnucpro bench"
    assert figures["machine"]["cores"] >= 1 and figures["machine"]["cpu"]
    assert figures["versions"]["torch"].startswith("2.") and figures["versions"]["fair-esm"]
    units = [limit["unit"] for limit in figures["limits"]]
    assert units[-1] == "bytes/s" and set(units[:-1]) == {"FLOP/s"}
    reference, *ours = rows = figures["encoder"]
    assert not [row for row in (*figures["limits"], *rows) if row["reason"]]
    assert reference["program"] == "fair-esm" and {row["program"] for row in ours} == {"virnucpro"}
    assert all(len(row["rates"]) == 3 and min(row["rates"]) > 0 for row in rows)
    for row in rows:
        ratio = row["tokens_per_second"] / reference["tokens_per_second"]
        assert row["ratio"] == pytest.approx(ratio)
    assert len({row["precision"] for row in ours}) == len(ours)
    assert f"{ours[-1]['tokens_per_second']:,.0f}" in lines[-1]


def test_cpu_limit_is_measured_on_all_threads():
    before = torch.get_num_threads()
    seen = set[int]()
    torch.set_num_threads(3)
    try:
        limit = _HardwareLimit(what="nothing", precision=None, unit="bytes/s")
        _best_rate(
            limit, 1.0, torch.device("cpu"), lambda: lambda: seen.add(torch.get_num_threads())
        )
    finally:
        torch.set_num_threads(before)
    assert seen == {3}


def test_model_too_large_for_memory_is_a_row(tmp_path, monkeypatch):
    """It needs more bytes than a process can address."""
    huge = ESM2Shape(n_layers=1, dim=1 << 42, n_heads=1)
    figures, lines = measure(tmp_path, monkeypatch, huge=huge, second=huge)
    assert [row["model"] for row in figures["encoder"]] == ["huge", "second"]
    for row in figures["encoder"]:
        assert "no weights could be made: making weights does not run" in row["reason"]
    assert row["reason"] in lines[-1]


def test_impossible_measurement_is_refused_first():
    for name in ("models", "precisions"):
        with pytest.raises(UsageError, match=f"--{name}: 'nonsense' is unknown"):
            bench(BenchOptions(device="cpu", **{name: "nonsense"}), [], print, print)
    with pytest.raises(UnavailableError, match="--precision fp16 is not possible on CPU"):
        bench(BenchOptions(device="cpu", precisions="fp16"), [], print, print)


def test_interrupted_bench_prints_its_rows(tmp_path):
    path = tmp_path / "bench.json"
    said = tmp_path / "said"
    read, write = os.pipe()
    with said.open("w") as out, os.fdopen(read) as errors:
        process = start(
            *("bench", "--models", "8M", "--device", "cpu", "--json", path),
            streams=[0, out.fileno(), write],
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        os.close(write)
        while "8M: fair-esm" not in errors.readline():
            assert process.exitcode is None
        os.kill(process.pid, signal.SIGTERM)
        err = errors.read()
    process.join()
    assert process.exitcode == 143
    assert "matrix product" in said.read_text() and "contain the measurements" in err
    assert json.loads(path.read_text())["limits"]
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"bench.json", "said"}, "no weights are left"
