"""--cache: vectors by content, shared by runs, users and machines, and verified when read."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_helpers import CONTIGS, PROTEINS, execute, no_file_longer_than, tables, vectors

import virnucpro
from virnucpro.core.errors import UsageError
from virnucpro.core.events import BatchDone, EmbeddingStarted
from virnucpro.core.recipe import EncoderSpec
from virnucpro.engine.local import InlineExecutor, ProcessExecutor
from virnucpro.engine.vector_cache import CacheDir, VectorCache
from virnucpro.engine.work_options import WorkOptions
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.summary import Summary
from virnucpro.workflows.work_share import work

ENCODER = EncoderSpec(
    model="toy", sha256="a" * 64, layer=2, pooling="mean", precision="fp32", dim=8
)
ROOM = 10**9
N_ROUNDS = 8  # of four writers that are killed


def cache_in(folder: Path, n_bytes: int = ROOM, **changes: object) -> VectorCache:
    """Open a cache as another process would."""
    folder.mkdir(exist_ok=True)
    return VectorCache(CacheDir(folder, n_bytes), replace(ENCODER, **changes), "cpu")


def vector_of(sequence: str) -> np.ndarray:
    """Return the toy encoder's vector of a sequence."""
    return np.random.default_rng(list(sequence.encode())).normal(size=8).astype(np.float32)


def fill(cache: VectorCache, *sequences: str) -> None:
    assert cache.write(sequences, np.stack(list(map(vector_of, sequences)))) == ""


def packs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pack"))


@pytest.fixture
def predict_on(tiny, tmp_path) -> Callable[..., Summary]:
    def start(folder: str, *inputs: Path, **options: object) -> Summary:
        on_event = options.pop("on_event", lambda _: None)
        executor = options.pop("executor", lambda _: InlineExecutor())
        values = {"model": str(tiny.model), "head": tiny.head_file, "device": "cpu"}
        values |= {"precision": "fp32", "input": inputs or (CONTIGS,)}
        values |= {"output_dir": tmp_path / folder, **options}
        return execute(PredictOptions(**values), on_event, executor)

    return start


def test_vectors_are_read_back_bit_for_bit(tmp_path):
    fill(cache_in(tmp_path), "MKV", "MA", "MKVL")
    fill(cache_in(tmp_path), "W")
    cache = cache_in(tmp_path)
    found = cache.read(["MA", "C", "MKVL", "W", "MA"])
    assert found.keys() == {0, 2, 3, 4}
    for place, sequence in ((0, "MA"), (2, "MKVL"), (3, "W"), (4, "MA")):
        assert found[place].tobytes() == vector_of(sequence).tobytes()
    fill(cache_in(tmp_path), "C")
    assert (
        cache.read(["C"])[0].tobytes() == vector_of("C").tobytes()
    )  # it was added in the meantime


@pytest.mark.parametrize(
    "changes",
    [
        *({"sha256": "b" * 64}, {"layer": 1}, {"pooling": "bos"}, {"precision": "bf16"}),
        *({"family": "fair-esm"}, {"dim": 4}),
    ],
)
def test_vectors_of_other_settings_are_not_used(tmp_path, changes):
    fill(cache_in(tmp_path), "MKV")
    assert cache_in(tmp_path, **changes).read(["MKV"]) == {}
    assert cache_in(tmp_path, model="another name").read(["MKV"]).keys() == {0}
    other_device = VectorCache(CacheDir(tmp_path, ROOM), ENCODER, "cuda")
    assert other_device.read(["MKV"]) == {}


def test_flipped_bit_costs_only_its_vector(tmp_path):
    sequences = ["MKV", "MA", "MKVL", "W"]
    fill(cache_in(tmp_path), *sequences)
    (pack,) = packs(tmp_path)
    content = pack.read_bytes()
    rng = random.Random(1)
    for _ in range(300):
        place = rng.randrange(len(content))
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.randrange(8)
        pack.write_bytes(damaged)
        found = cache_in(tmp_path).read(sequences)
        assert len(found) >= (len(sequences) - 1 if place >= 24 else 0)
        for i, vector in found.items():
            assert vector.tobytes() == vector_of(sequences[i]).tobytes()


@pytest.mark.parametrize("place", [0, 10, 23, 24, 60, 200])
def test_truncated_pack_is_ignored(tmp_path, place):
    fill(cache_in(tmp_path), "MKV", "MA", "MKVL", "W")
    (pack,) = packs(tmp_path)
    cache = cache_in(tmp_path)
    assert len(cache.read(["MKV"])) == 1
    with pack.open("rb+") as out:
        out.truncate(place)
    assert cache.read(["MKV", "MA"]) == {}
    assert cache_in(tmp_path).read(["MKV", "MA"]) == {}


def test_swapped_vector_is_not_used(tmp_path):
    fill(cache_in(tmp_path), "MKV", "MAA")
    (pack,) = packs(tmp_path)
    content = pack.read_bytes()
    head = 24 + 2 * 32
    row = 8 * 4
    rows = content[head : head + row], content[head + row :]
    pack.write_bytes(content[:head] + rows[1] + rows[0])
    assert cache_in(tmp_path).read(["MKV", "MAA"]) == {}


def test_vector_that_is_not_finite_is_not_used(tmp_path):
    vector = vector_of("MKV")
    vector[3] = np.nan
    cache_in(tmp_path).write(["MKV"], vector[None])
    assert packs(tmp_path) and cache_in(tmp_path).read(["MKV"]) == {}


def test_foreign_file_in_place_of_a_pack(tmp_path):
    cache = cache_in(tmp_path / "cache")
    folder = tmp_path / "cache"
    fill(cache, "MKV")
    (pack,) = packs(folder)
    name = pack.name.replace(pack.name[17:49], "0" * 32)
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine" * 100)
    for place in (
        lambda path: path.write_bytes(b"\x80\x04K*."),  # a pickle
        os.mkfifo,
        lambda path: path.symlink_to(mine),
        lambda path: path.mkdir(),
    ):
        place(folder / name)
        assert cache_in(folder).read(["MKV", "MA"]).keys() == {0}
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()
    (folder / "notes.txt").write_text("mine")
    fill(cache_in(folder, 0), "MA")  # deletes every pack
    assert (folder / "notes.txt").read_text() == "mine" and mine.exists()
    assert packs(folder) == []


def test_full_cache_drops_the_least_recently_read(tmp_path):
    for i in range(4):
        before = packs(tmp_path)
        fill(cache_in(tmp_path), f"M{'A' * i}")
        (new,) = set(packs(tmp_path)).difference(before)
        os.utime(new, (1e9 + i, 1e9 + i))
    assert cache_in(tmp_path).read(["M"]).keys() == {0}  # the oldest is used again
    fill(cache_in(tmp_path, 3 * 2**16), "W")
    found = cache_in(tmp_path).read(["M", "MA", "MAA", "MAAA", "W"])
    assert found.keys() == {0, 3, 4}


def test_pack_deleted_while_read_is_a_miss(tmp_path):
    cache = cache_in(tmp_path)
    fill(cache, "MKV")
    assert len(cache.read(["MKV"])) == 1
    for pack in packs(tmp_path):
        pack.unlink()
    assert cache.read(["MKV"]) == {}
    fill(cache, "MKV")
    assert len(cache.read(["MKV"])) == 1
    (tmp_path / "away").mkdir()
    for pack in packs(tmp_path):
        pack.rename(tmp_path / "away" / pack.name)
    tmp_path.rename(tmp_path.with_name("moved"))
    assert cache.read(["MKV"]) == {}


def test_leftovers_of_a_killed_writer_are_swept(tmp_path):
    pack = f"{'0' * 16}-{'1' * 32}.pack"
    old, new, other = (tmp_path / f".{name}.tmp" for name in (f"{pack}.01ab", f"{pack}.02ab", "a"))
    for path in (old, new, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (1e9, 1e9))
    fill(cache_in(tmp_path), "MKV")
    assert not old.exists() and new.exists() and other.exists()


def write_for_ever(folder: Path, number: int) -> None:
    """Write and read small packs, in a cache that is always full, until this process is killed."""
    rng = random.Random(number)
    cache = cache_in(folder, 40 * 2**16)
    while True:
        sequences = ["M" + "".join(rng.choices("ACDE", k=5)) for _ in range(20)]
        found = cache.read(sequences)
        for i, vector in found.items():
            if vector.tobytes() != vector_of(sequences[i]).tobytes():
                (folder / f"wrong-{number}").touch()
        missing = [one for i, one in enumerate(sequences) if i not in found]
        if reason := missing and cache.write(missing, np.stack(list(map(vector_of, missing)))):
            (folder / f"refused-{number}").write_text(reason)


def test_killed_writers_leave_a_valid_cache(tmp_path):
    rng = random.Random(7)
    folder = tmp_path / "cache"
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    n_kills = 0
    for _ in range(N_ROUNDS):
        writers = [
            context.Process(target=write_for_ever, args=(folder, rng.randrange(10**9)))
            for _ in range(4)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            time.sleep(rng.random() * 0.1)
            assert writer.is_alive()
            writer.kill()
            n_kills += 1
        for writer in writers:
            writer.join()
    assert n_kills >= 32 and len(packs(folder)) > 20
    assert list(folder.glob("wrong-*")) == list(folder.glob("refused-*")) == []
    fill(cache_in(folder, 40 * 2**16), "W")
    assert sum(max(2**16, path.stat().st_size) for path in packs(folder)) <= 40 * 2**16
    sequences = [
        "M" + "".join(letters)
        for letters in np.random.default_rng(0).choice(list("ACDE"), (900, 5))
    ]
    found = cache_in(folder).read(sequences)
    assert len(found) > 100
    for i, vector in found.items():
        assert vector.tobytes() == vector_of(sequences[i]).tobytes()


def test_second_run_embeds_nothing(predict_on, tmp_path):
    events: list[object] = []
    first = predict_on("first", cache=tmp_path / "cache")
    second = predict_on("second", cache=tmp_path / "cache", on_event=events.append)
    predict_on("without")
    assert events and not any(isinstance(event, BatchDone) for event in events)
    assert first.n_cached == 0 and first.n_tokens == second.n_cached_tokens > 0
    names = ["000000.h5", "000001.h5"]
    for name in names:
        first_bytes = (tmp_path / "first/features" / name).read_bytes()
        assert (tmp_path / "second/features" / name).read_bytes() == first_bytes
        assert (tmp_path / "without/features" / name).read_bytes() == first_bytes
    assert tables(tmp_path / "first") == tables(tmp_path / "second")
    counts = json.loads((tmp_path / "second/run.json").read_text())["counts"]
    assert (
        counts["n_cached"]
        == second.n_cached
        == len(set(map(bytes, vectors(tmp_path / "first").values())))
    )
    line = f"cache: {second.n_cached} vectors read, 100.0% of the tokens of this start"
    assert line in second.lines(tmp_path / "second")
    page = (tmp_path / "second/report.html").read_text()
    assert "vectors read from the cache in the last start" in page


def test_runs_that_share_records_share_their_vectors(predict_on, tmp_path):
    records = CONTIGS.read_text().split(">")[1:]
    one = tmp_path / "one.fa"
    other = tmp_path / "other.fa"
    one.write_text("".join(f">{record}" for record in records[:10]))
    other.write_text("".join(f">{record}" for record in reversed(records[6:])))
    predict_on("one", one, cache=tmp_path / "cache")
    summary = predict_on("other", other, cache=tmp_path / "cache")
    predict_on("alone", other)
    assert summary.n_cached > 0 and summary.n_tokens > 0
    assert tables(tmp_path / "other") == tables(tmp_path / "alone")
    alone = vectors(tmp_path / "alone")
    # other neighbours in a batch: sums of float32 of some ten terms in another order
    for name, vector in vectors(tmp_path / "other").items():
        assert vector == pytest.approx(alone[name], abs=1e-5)


@pytest.mark.usefixtures("quick_starts")
def test_workers_of_a_run_share_the_cache(predict_on, tmp_path):
    executor = ProcessExecutor
    predict_on("first", cache=tmp_path / "cache", executor=executor, workers=2)
    second = predict_on("second", cache=tmp_path / "cache", executor=executor, workers=1)
    assert second.n_tokens == 0 < second.n_cached
    assert tables(tmp_path / "first") == tables(tmp_path / "second")


@pytest.mark.parametrize("place", ["a file", "a folder below a file"])
def test_unreadable_cache_is_a_warning(predict_on, tmp_path, place):
    (tmp_path / "cache").write_text("mine")
    cache = tmp_path / "cache" if place == "a file" else tmp_path / "cache" / "folder"
    summary = predict_on("run", cache=cache)
    assert summary.exit_code == 0 and (tmp_path / "cache").read_text() == "mine"
    (line,) = lines_of(tmp_path / "run", "the run continues without the cache")
    assert " WARNING " in line and str(cache) in line


def lines_of(folder: Path, text: str) -> list[str]:
    """Return the lines with this text in the log of a run."""
    lines = (folder / "virnucpro.log").read_text().splitlines()
    return [line for line in lines if text in line]


def test_unwritable_cache_is_a_warning(predict_on, tmp_path):
    cache = tmp_path / "cache"

    def take_away(event: object) -> None:
        if isinstance(event, EmbeddingStarted):
            cache.rmdir()
            cache.write_text("mine")

    summary = predict_on("run", cache=cache, on_event=take_away)
    predict_on("without")
    assert summary.exit_code == 0 and cache.read_text() == "mine"
    assert tables(tmp_path / "run") == tables(tmp_path / "without")
    (line,) = lines_of(tmp_path / "run", "no longer adds to the cache")
    assert " WARNING " in line and str(cache) in line


def test_full_disk_is_reported_once(tmp_path):
    cache = cache_in(tmp_path)
    with no_file_longer_than(10):
        reason = cache.write(["MKV"], vector_of("MKV")[None])
        again = cache.write(["MA"], vector_of("MA")[None])
    assert "File too large" in reason and again == ""
    assert list(tmp_path.iterdir()) == []


def test_cache_without_effect_is_refused(tmp_path):
    common = {"input": (CONTIGS,), "output_dir": tmp_path, "cache": tmp_path / "cache"}
    with pytest.raises(UsageError, match="--cache: no effect with --plan-only"):
        PredictOptions(**common, plan_only=True)
    with pytest.raises(UsageError, match="--cache: no effect with --pooling none"):
        ExtractOptions(**common, pooling=("none",))
    with pytest.raises(UsageError, match="--cache-size: no effect without --cache"):
        WorkOptions(folder=tmp_path, cache_size=3.0)


def test_extract_and_work_have_the_cache(tiny, predict_on, tmp_path):
    options = {"model": str(tiny.model), "device": "cpu", "precision": "fp32"}
    options |= {"input": (PROTEINS,), "cache": tmp_path / "cache"}
    for folder in ("one", "two"):
        made = ExtractOptions(output_dir=tmp_path / folder, **options)
        summary = execute(made, lambda _: None, lambda _: InlineExecutor())
    assert summary.n_tokens == 0 < summary.n_cached
    predict_on("first", cache=tmp_path / "cache")
    predict_on("planned", plan_only=True)
    planned = WorkOptions(folder=tmp_path / "planned", device="cpu", cache=tmp_path / "cache")
    outcome = work(planned, lambda _: None, lambda _: InlineExecutor())
    embedding = outcome.progress.embedding
    assert embedding.n_tokens_embedded == 0 < embedding.n_cached
    assert f"cache: {embedding.n_cached} vectors read" in outcome.lines


@pytest.mark.usefixtures("quick_starts")
def test_python_has_the_cache_options(tiny, tmp_path):
    options = {"model": str(tiny.model), "device": "cpu", "precision": "fp32"}
    options |= {"cache": tmp_path / "cache", "cache_size": 0.5}
    one, other = (virnucpro.embed(PROTEINS, **options) for _ in range(2))
    assert packs(tmp_path / "cache")
    assert one.vectors.tobytes() == other.vectors.tobytes()
