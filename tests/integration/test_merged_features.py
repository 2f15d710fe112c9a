"""``features.h5`` is one real HDF5 file with every vector of a run, or it is not written."""

from __future__ import annotations

import io
import json
import logging
import resource
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from forkserver_runner import fork_server
from run_helpers import (
    again,
    assert_same_vectors,
    flip_bit,
    invoke,
    leftovers,
    no_file_longer_than,
    run_inline,
    vectors,
    wait_until,
)

import virnucpro
from virnucpro._version import __version__
from virnucpro.core.errors import FeatureFileError, StorageError
from virnucpro.core.logging import log_to_handler
from virnucpro.core.recipe import EncoderSpec, Store
from virnucpro.core.types import Embeddings, Shard
from virnucpro.results.outputs import open_run_dir
from virnucpro.store.feature_index import (
    IndexPart,
    check_parts,
    read_parts,
    read_shown,
    write_parts,
)
from virnucpro.store.feature_store import FeatureStore, open_stores
from virnucpro.store.merged_features import write_merged

DIM = 8


def make_store(folder: Path, *, store: Store = "float32", pooling: str = "mean") -> FeatureStore:
    encoder = EncoderSpec(
        **{"model": "tiny", "sha256": "0" * 64, "layer": 2, "pooling": pooling},
        **{"precision": "fp32", "dim": DIM, "store": store},
    )
    (folder / "run").mkdir(parents=True)
    (opened,) = open_stores(folder / "run/features", [encoder], "of the recipe")
    opened.make_folder()
    return opened


def make_parts(
    store: FeatureStore, sizes: Sequence[int], hidden: frozenset[str] = frozenset()
) -> tuple[list[IndexPart], dict[str, np.ndarray]]:
    """Write feature files with these numbers of ORFs. -> the expected rows by id"""
    rng = np.random.default_rng(1)
    parts = list[IndexPart]()
    rows = dict[str, np.ndarray]()
    for index, n_orfs in enumerate(sizes):
        lengths = rng.integers(1, 5, n_orfs).astype(np.int32)
        n_rows = lengths if store.encoder.per_residue else np.ones_like(lengths)
        values = rng.standard_normal((int(n_rows.sum()), DIM)).astype(np.float32)
        ids = tuple(f"contig{index}_{i}\u00e9" for i in range(n_orfs))
        found = Embeddings(ids, lengths, values, store.encoder.per_residue)
        shard = Shard(index, Path("x.faa"), n_orfs, n_orfs, n_orfs, f"{index}" * 64)
        checksums = store.write(shard, found)
        parts.append(IndexPart.from_file(f"{shard.name}.h5", found, checksums, hidden))
        each = np.split(values, np.cumsum(n_rows)[:-1]) if n_orfs else []
        rows |= {name: row for name, row in zip(ids, each, strict=True) if name not in hidden}
    return parts, rows


def read_merged(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as h5:
        ids = h5["ids"].asstr()[:].tolist()
        lengths = h5["lengths"][:]
        values = h5["embeddings"][:]
        assert not (h5["ids"].is_virtual or h5["embeddings"].is_virtual)
        counts = lengths if h5.attrs["pooling"] == "none" else np.ones_like(lengths)
    assert len(set(ids)) == len(ids) and len(values) == counts.sum()
    return dict(zip(ids, np.split(values, np.cumsum(counts)[:-1]), strict=True))


# The file


@pytest.mark.parametrize("hidden", [(), ("contig0_0é", "contig0_3é", "contig1_0é", "contig3_7é")])
@pytest.mark.parametrize("pooling", ["mean", "none"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_rows_of_all_files_in_order(tmp_path, kind, pooling, hidden):
    store = make_store(tmp_path, store=kind, pooling=pooling)
    parts, rows = make_parts(store, [5, 1, 0, 8], frozenset(hidden))
    write_merged(store, parts)
    found = read_merged(store.index)
    if kind == "bfloat16":
        rows = {
            name: torch.from_numpy(row).bfloat16().float().numpy() for name, row in rows.items()
        }
    assert list(found) == list(rows)
    assert_same_vectors(found, rows)


def test_needs_no_other_file(tmp_path):
    store = make_store(tmp_path)
    parts, rows = make_parts(store, [3, 4])
    write_merged(store, parts)
    alone = store.index.rename(tmp_path / "alone.h5")
    for path in store.folder.iterdir():
        path.unlink()
    assert_same_vectors(read_merged(alone), rows)


def test_attributes_name_no_single_shard(tmp_path):
    store = make_store(tmp_path)
    write_merged(store, make_parts(store, [3, 4])[0])
    with h5py.File(store.index) as h5:
        found = dict(h5.attrs)
    assert found == {
        **{"model": "tiny", "layer": 2, "pooling": "mean", "precision": "fp32"},
        **{"fingerprint": "of the recipe", "virnucpro_version": __version__},
    }


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_without_rows_has_its_datasets(tmp_path, sizes):
    store = make_store(tmp_path)
    write_merged(store, make_parts(store, sizes)[0])
    with h5py.File(store.index) as h5:
        assert h5["ids"].shape == h5["lengths"].shape == (0,)
        assert h5["embeddings"].shape == (0, DIM)


def test_vectors_can_be_mapped_into_memory(tmp_path):
    store = make_store(tmp_path)
    parts, rows = make_parts(store, [900, 900])
    write_merged(store, parts)
    with h5py.File(store.index) as h5:
        offset = h5["embeddings"].id.get_offset()
        shape = h5["embeddings"].shape
    assert offset % 4096 == 0
    mapped = np.memmap(store.index, np.float32, "r", offset, shape)
    assert np.array_equal(mapped, np.concatenate(list(rows.values())))


def test_same_content_has_same_bytes(tmp_path):
    for name in ("one", "two"):
        began = int(time.time())
        store = make_store(tmp_path / name, store="bfloat16")
        parts, _ = make_parts(store, [50, 60])
        write_merged(store, parts)
        write_parts(store, parts)
        wait_until(lambda began=began: time.time() > began + 1)  # HDF5 counts time in seconds
    for name in ("features.h5", "features/parts.json"):
        one, two = (tmp_path / folder / "run" / name for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def read_few(path: Path, n_rows: int) -> None:
    """Run in a separate process, which may open few files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    found = read_merged(path)
    assert len(found) == n_rows and all(found) and np.isfinite(list(found.values())).all()


def test_all_is_read_with_64_open_files(tmp_path):
    store = make_store(tmp_path)
    parts, rows = make_parts(store, [3] * 74)
    write_merged(store, parts)
    reader = fork_server().Process(target=read_few, args=(store.index, len(rows)))
    reader.start()
    reader.join()
    assert reader.exitcode == 0


def test_memory_does_not_grow_with_files(tmp_path):
    """Memory has one block and the ids of one file. A file here has 1.3 MB."""
    peaks = []
    for n_files in (2, 8):
        store = make_store(tmp_path / str(n_files))
        parts, _ = make_parts(store, [40_000] * n_files)
        tracemalloc.start()
        write_merged(store, parts)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


# Damage and errors


@pytest.mark.parametrize("harm", ["gone", "a flipped bit", "of another shard"])
def test_damaged_part_is_named_and_not_merged(tmp_path, harm):
    store = make_store(tmp_path)
    parts, _ = make_parts(store, [3, 4, 5])
    path = store.folder / parts[1].name
    match harm:
        case "gone":
            path.unlink()
        case "a flipped bit":
            flip_bit(path)
        case "of another shard":
            path.write_bytes((store.folder / parts[0].name).read_bytes())
    with pytest.raises(FeatureFileError, match=path.name):
        write_merged(store, parts)
    assert not store.index.exists() and not leftovers(store.tree.root)


@pytest.mark.parametrize("n_bytes", [0, 50, 1000, 5000, 20_000, 40_000])
def test_full_disk_is_reported_and_keeps_old_file(tmp_path, n_bytes):
    """HDF5 writes its part of the file first and last, and the vectors in between."""
    store = make_store(tmp_path)
    parts, _ = make_parts(store, [900, 900])
    store.index.write_bytes(b"the old one")
    with no_file_longer_than(n_bytes), pytest.raises(StorageError) as caught:
        write_merged(store, parts)
    assert "File too large" in str(caught.value) and "features.h5" in str(caught.value)
    assert store.index.read_bytes() == b"the old one"
    assert not leftovers(store.tree.root)
    write_merged(store, parts)
    assert len(read_merged(store.index)) == 1800


# The list of files


def test_list_is_read_as_written(tmp_path):
    store = make_store(tmp_path)
    parts, rows = make_parts(store, [3, 4], frozenset({"contig1_2é"}))
    write_parts(store, parts)
    assert read_parts(store) == parts
    check_parts(store)
    assert_same_vectors({name: row[None] for name, row in read_shown(store)}, rows)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../x.h5"},
        {"name": 3},
        {"label": None},
        {"orfs": [[2, 1]]},
        {"orfs": [[0, 9]]},
        {"rows": [[-1, 2]]},
        {"rows": [[0, 1.5]]},
        {"rows": 3},
        {"n_orfs": True},
    ],
)
def test_impossible_part_is_refused(tmp_path, change):
    store = make_store(tmp_path)
    parts, _ = make_parts(store, [3])
    write_parts(store, parts)
    fields = {name: getattr(parts[0], name) for name in IndexPart.__slots__}
    with pytest.raises((ValueError, TypeError)):
        IndexPart(**{**fields, **change})


def test_list_with_flipped_bit_is_refused(tmp_path):
    store = make_store(tmp_path)
    write_parts(store, make_parts(store, [3])[0])
    for place in range(store.parts.stat().st_size):
        flip_bit(store.parts, place)
        with pytest.raises(FeatureFileError, match=r"parts\.json"):
            read_parts(store)
        flip_bit(store.parts, place)
    read_parts(store)


@pytest.mark.parametrize("how", ["swapped", "missing"])
def test_exchanged_files_are_noticed(tmp_path, how):
    store = make_store(tmp_path)
    parts, _ = make_parts(store, [3, 3])
    write_parts(store, parts)
    one, two = (store.folder / part.name for part in parts)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    if how == "missing":
        one.unlink()
    with pytest.raises(FeatureFileError, match=r"000000\.h5"):
        check_parts(store)
    with pytest.raises(FeatureFileError, match=r"000000\.h5"):
        list(read_shown(store))


def link_as_older_runs(store: FeatureStore, hidden: frozenset[str]) -> None:
    """Write ``features.h5`` as older versions did: virtual datasets over the feature files."""
    names = sorted(path.name for path in store.folder.glob("*.h5"))
    with h5py.File(store.index, "w", libver="v110") as h5:
        for number, name in enumerate(names):
            with h5py.File(store.folder / name) as part:
                shown = [i for i, one in enumerate(part["ids"].asstr()[:]) if one not in hidden]
                source = h5py.VirtualSource(f"features/{name}", "ids", part["ids"].shape)
            layout = h5py.VirtualLayout((len(shown),), h5py.string_dtype())
            for row, i in enumerate(shown):
                layout[row : row + 1] = source[i : i + 1]
            h5.create_group(f"groups/{number:06}").create_virtual_dataset("ids", layout)


def test_vectors_of_older_runs_are_read(tmp_path):
    store = make_store(tmp_path)
    hidden = frozenset({"contig0_0é", "contig1_2é"})
    _, rows = make_parts(store, [3, 4], hidden)
    link_as_older_runs(store, hidden)
    assert_same_vectors({name: row[None] for name, row in read_shown(store)}, rows)


# Runs


@pytest.fixture
def proteins(tmp_path) -> Path:
    rng = np.random.default_rng(4)
    each = ["M" + "".join(rng.choice(list("DEFGHIKL"), 90)) for _ in range(60)]
    path = tmp_path / "proteins.faa"
    path.write_text("".join(f">p{i}\n{each[i % 60]}\n" for i in range(90)))
    return path


@pytest.fixture
def make_limited(make_config, proteins) -> Callable[..., object]:
    """Run with a limit on the bytes of vectors in ``features.h5``."""

    def make(max_bytes: int, **changes: object) -> object:
        config = make_config(proteins, command="extract", **changes)
        return replace(config, max_merged_bytes=max_bytes)

    return make


N_BYTES = 90 * 32 * 4  # of the vectors of that run


def test_limit_counts_bytes_of_vectors(make_limited, tmp_path):
    for limit, is_written in ((N_BYTES, True), (N_BYTES - 1, False)):
        config = make_limited(limit, output=tmp_path / str(limit))
        run_inline(config, None)
        assert (config.output / "features.h5").exists() == is_written
        log = (config.output / "virnucpro.log").read_text()
        assert ("features.h5 is not written" in log) != is_written


@pytest.mark.parametrize(
    ("changes", "name"), [({}, "iter_features"), ({"pooling": "none"}, "read_features")]
)
def test_above_limit_message_says_how_to_read(make_limited, changes, name):
    config = make_limited(0, **changes)
    run_inline(config, None)
    log = (config.output / "virnucpro.log").read_text()
    assert f"virnucpro.{name}('{config.output}')" in log and "features/*.h5" in log
    read = getattr(virnucpro, name)
    assert len(list(read(config.output))) > 0


def test_further_encoder_is_not_read_by_python(tmp_path):
    encoder = EncoderSpec(model="m", sha256="", layer=1, pooling="mean", precision="fp32", dim=8)
    stores = open_stores(tmp_path / "features", [encoder, replace(encoder, layer=2)], "")
    log = io.StringIO()
    for store in stores:
        store.make_folder()
        with log_to_handler(logging.StreamHandler(log)):
            write_merged(store, make_parts(store, [3])[0], max_bytes=0)
    first, second = log.getvalue().splitlines()
    assert "iter_features" in first and "iter_features" not in second
    assert f"features/{stores[1].folder.name}/*.h5" in second


def test_above_limit_every_vector_is_read(make_limited, tmp_path):
    whole = make_limited(N_BYTES, output=tmp_path / "whole")
    run_inline(whole, None)
    config = make_limited(0)
    run_inline(config, None)
    found = dict(virnucpro.read_features(config.output))
    assert_same_vectors(found, vectors(whole.output))
    assert "features.h5" not in json.loads((config.output / "run.json").read_text())["outputs"]
    code, shown = invoke("status", config.output, "--verify")
    assert code == 0, shown


def test_resume_over_limit_deletes_and_back(make_limited):
    config = make_limited(N_BYTES)
    run_inline(config, None)
    merged = config.output / "features.h5"
    before = merged.read_bytes()
    run_inline(make_limited(0, resume=True), None)
    assert not merged.exists()
    run_inline(again(config, resume=True), None)
    assert merged.read_bytes() == before


def test_every_format_and_copy_is_in_the_file(make_limited, tmp_path):
    pooled = make_limited(10**9, output=tmp_path / "pooled")
    run_inline(pooled, None)
    assert list((pooled.output / "features").glob("*_copies.h5"))
    residues = make_limited(10**9, pooling="none", output=tmp_path / "residues")
    run_inline(residues, None)
    means = vectors(pooled.output)
    rows = vectors(residues.output)
    assert set(means) == set(rows) == {f"p{i}" for i in range(90)}
    for i in range(60, 90):
        assert np.array_equal(means[f"p{i}"], means[f"p{i - 60}"])
        assert rows[f"p{i}"].shape == (91, 32)
    layer = make_limited(10**9, layer=1, output=tmp_path / "layer")
    run_inline(layer, None)
    assert not np.array_equal(vectors(layer.output)["p0"], means["p0"])


def test_force_clears_list_and_file(make_limited, proteins):
    config = make_limited(10**9)
    run_inline(config, None)
    open_run_dir(config.output).delete_results()
    assert not (config.output / "features.h5").exists()
    assert not (config.output / "features").exists()
