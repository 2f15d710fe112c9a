"""Developer comparisons: each method gives right vectors, and a failed one becomes a row."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from conftest import TINY
from fair_esm_reference import LONGEST, tolerance
from peers import peer_ways
from run_helpers import our_processes
from timing import (
    PROFILES,
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
    proteins_of,
)

from virnucpro.models.base import Pending
from virnucpro.models.esm2.loading import fair_esm_state_dict
from virnucpro.models.transformer import DTYPES
from virnucpro.models.validation.random_weights import write_checkpoint
from virnucpro.models.validation.timing import time_batches


@pytest.fixture
def setting(tmp_path) -> Setting:
    write_checkpoint(tmp_path / "tiny.pt", TINY, seed=3)
    return Setting(tmp_path / "tiny.pt", TINY, "cpu", 2048)


def comparison(**changes) -> Comparison:
    given = {"profile": "proteins", "proteins": proteins_of("proteins", 2000, seed=3)}
    return Comparison(**(given | {"repeats": 2} | changes))


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


def test_two_batches_are_in_progress():
    done: list[str] = []

    def start(batch: Sequence[str]) -> Pending:
        done.append(f"start {batch[0]}")
        return Pending(lambda: np.full((len(batch), 1), len(batch[0]), dtype=np.float32))

    timing = time_batches(
        start,
        [["M", "K"], ["MK"], ["MKV"]],
        lambda rows: done.append(f"store {rows[0, 0]:.0f}"),
    )
    assert done == ["start M", "start MK", "store 1", "start MKV", "store 2", "store 3"]
    assert (timing.n_batches, timing.n_tokens) == (3, 7 + 2 * 4), "two more per protein"
    assert timing.tokens_per_second == timing.n_tokens / timing.seconds


def test_all_methods_agree_beyond_bf16_positions(setting):
    """The rotary tables of the other programs are float32 too."""
    each = [protein[:LONGEST] for protein in proteins_of("proteins", 9000, seed=4)]
    proteins = sorted(each, key=len)[-3:]
    assert max(map(len, proteins)) > 900
    ways = [*peer_ways(setting, has_bf16=True), *our_ways(("fp32", "bf16"), setting)]
    with layouts(setting, 1, len(ways)) as places:
        rows = list(compare_ways(comparison(proteins=proteins, repeats=1), ways, places))
    for row in rows:
        assert row.largest_error <= tolerance(TINY.n_layers, DTYPES[row.precision]), row


def test_openvino_differs_only_by_rounding(setting):
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
def test_measurement_is_repeated_after_a_warm_up(setting, seconds, n_repeats, n_passes):
    place = Clockwork(setting, seconds)
    (row,) = compare_ways(comparison(repeats=4, min_seconds=0.6), [FAILING], [place])
    assert row.seconds == (seconds,) * n_repeats, "of one pass each"
    assert place.n_passes == n_passes


# Inputs


def test_seed_gives_the_same_proteins():
    lengths = {}
    for profile in PROFILES:
        proteins = proteins_of(profile, 300_000, seed=1)
        assert proteins == proteins_of(profile, 300_000, seed=1)
        assert proteins != proteins_of(profile, 300_000, seed=2)
        lengths[profile] = np.array([len(protein) for protein in proteins])
        assert 0 <= 300_000 - (lengths[profile] + 2).sum() <= 2002
    assert set(lengths["reads-150"]) == {49, 50}
    assert lengths["six-frame-500"].max() == 166
    assert (lengths["six-frame-500"] == 166).mean() > 0.85
    assert 240 < np.median(lengths["proteins"]) < 300
    assert 1000 < lengths["proteins"].max() <= 2000


def test_seed_gives_the_same_weights(tmp_path):
    states = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tmp_path / name, TINY, seed)
        states.append(fair_esm_state_dict(tmp_path / name))
    a, b, c = states
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embed_tokens.weight"], c["embed_tokens.weight"])


# Failing methods


@pytest.mark.usefixtures("quick_starts")
def test_failed_method_is_a_row_with_a_reason(setting):
    ways = [FAILING, *our_ways(("fp32",), setting), FULL, OVERFLOWING]
    with layouts(setting, 2, len(ways)) as places:
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
    assert dead.reason == "a process died"
    assert ours.tokens_per_second, "in new processes"


def die(_: Setting) -> TimedEncoder:
    os._exit(1)


def test_missing_program_is_a_row(setting, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    ways = [*peer_ways(setting, has_bf16=True)[-1:], *our_ways(("fp32",), setting)]
    with layouts(setting, 1, len(ways)) as places:
        missing, ours = compare_ways(comparison(), ways, places)
    assert "transformers is not installed; " in missing.reason
    assert "pip install -c constraints.txt -e '.[oracle]'" in missing.reason
    assert ours.ratio == 1 and ours.tokens_per_second


def test_processes_follow_memory(setting):
    ways = our_ways(("fp32",), setting)
    with layouts(setting, 1_000_000, 1) as (_, many):
        (row,) = compare_ways(comparison(), ways, [many])
    assert "1000000 processes would need" in row.reason
    assert not our_processes()


def test_gpu_loads_one_model_at_a_time(
    setting,
):
    n_loaded = []
    rows = []
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
