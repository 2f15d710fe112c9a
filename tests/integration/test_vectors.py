"""``virnucpro.open``: any vector of a finished run, or a clear error."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np
import polars
import pytest
import torch
from pyarrow import parquet
from run_helpers import flip_bit, leftovers, run_inline, write_fasta, write_run_json
from torch.utils.data import DataLoader

import virnucpro
from virnucpro.core.errors import FeatureFileError, InputMissingError, UnavailableError, UsageError
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.types import Embeddings, Shard, hash_texts
from virnucpro.store.feature_index import IndexPart, write_parts
from virnucpro.store.feature_store import FeatureStore, open_stores
from virnucpro.store.vector_index import write_index
from virnucpro.store.vectors import Vectors, open_vectors
from virnucpro.workflows.run_config import RunConfig

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def sequences() -> dict[str, str]:
    """Proteins, of which a third repeat an earlier one. One id looks like a path."""
    rng = np.random.default_rng(6)
    letters = list("ACDEFGHIKLMNPQRSTVWY")
    unique = ["M" + "".join(rng.choice(letters, n)) for n in rng.integers(8, 60, 40)]
    records = {f"p{i}": unique[i * 7 % 40 if i % 3 else i % 40] for i in range(90)}
    return {**records, "../a/b": unique[0], "sp|P12345|X": unique[1], "\u00e9": unique[2]}


@pytest.fixture
def finished(tmp_path, make_config: MakeConfig, sequences) -> Callable[..., Path]:
    def make(**changes: object) -> Path:
        fasta = write_fasta(tmp_path / "in.faa", sequences)
        config = make_config(fasta, command="extract", residues_per_shard=600, **changes)
        run_inline(config, None)
        return config.output

    return make


def make_store(folder: Path, sizes: list[int], hidden: frozenset[str] = frozenset()) -> Vectors:
    """Write a store of many small files, without a run."""
    encoder = EncoderSpec(
        model="m", sha256="", layer=3, pooling="mean", precision="fp32", dim=4, store="bfloat16"
    )
    folder.mkdir()
    (store,) = open_stores(folder / "features", [encoder], "of the recipe")
    store.make_folder()
    write_store(store, sizes, hidden)
    return open_vectors([store])


def write_store(store: FeatureStore, sizes: list[int], hidden: frozenset[str]) -> None:
    parts = []
    for number, n_orfs in enumerate(sizes):
        ids = tuple(f"{number}_{i}" for i in range(n_orfs))
        values = np.array([[number, i, 0, 1] for i in range(n_orfs)], np.float32).reshape(-1, 4)
        lengths = np.arange(1, n_orfs + 1, dtype=np.int32)
        content = Embeddings(ids, lengths, values, sequence_sha256=hash_texts(ids))
        shard = Shard(number, Path("x.faa"), n_orfs, n_orfs, n_orfs, f"{number}")
        checksums = store.write(shard, content)
        parts.append(IndexPart.from_file(f"{shard.name}.h5", content, checksums, hidden))
    write_parts(store, parts)
    write_index(store, parts)


# Reading


@pytest.mark.parametrize("store", ["float32", "bfloat16"])
def test_vectors_by_id_position_and_slice(finished, sequences, store):
    folder = finished(store=store)
    expected = dict(virnucpro.read_features(folder))
    run = virnucpro.open(folder)
    names = list(sequences)
    assert list(run.ids) == names and len(run) == len(names)
    every = np.stack([expected[name] for name in names])
    for position, name in enumerate(names):
        assert np.array_equal(run[name], every[position])
        assert np.array_equal(run[position], every[position])
    assert np.array_equal(run[-1], every[-1])
    assert np.array_equal(run[5:60:7], every[5:60:7])
    assert np.array_equal(run[[80, 0, -1]], every[[80, 0, -1]])
    assert np.array_equal(run[np.arange(93) % 2 == 0], every[::2])
    assert np.array_equal(np.stack(list(run)), every)
    assert run[3:3].shape == (0, run.dim)


def test_vectors_per_residue(finished, sequences):
    folder = finished(pooling="none")
    expected = dict(virnucpro.read_features(folder))
    run = virnucpro.open(folder)
    assert run.name.startswith("residues_layer") and not run.has_one_row
    for name, letters in sequences.items():
        assert run[name].shape == (len(letters), run.dim)
        assert np.array_equal(run[name], expected[name])
    found = dict(run.items())
    assert all(np.array_equal(found[name], expected[name]) for name in sequences)


def test_index_names_every_sequence(finished, sequences):
    table = polars.read_parquet(finished() / "features/index.parquet")
    assert table["id"].to_list() == list(sequences)
    assert table["length"].to_list() == list(map(len, sequences.values()))
    digests = [sha256(letters.encode()).digest() for letters in sequences.values()]
    assert table["sha256"].to_list() == digests


def test_hidden_records_are_not_in_the_index(tmp_path):
    run = make_store(tmp_path / "run", [3, 2], frozenset({"0_1", "1_0"}))
    assert list(run.ids) == ["0_0", "0_2", "1_1"]
    assert run["0_2"].tolist() == [0, 2, 0, 1] and run[2].tolist() == [1, 1, 0, 1]
    assert "0_1" not in run


def test_batches_have_all_vectors_once(tmp_path):
    run = make_store(tmp_path / "run", [5, 0, 7, 1])
    for size in (0, 1, 4, 13, 99):
        batches = list(run.batches(size))
        assert [name for batch in batches for name in batch.ids] == list(run.ids)
        assert np.array_equal(np.concatenate([batch.vectors for batch in batches]), run[:])


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_run_without_vectors(tmp_path, sizes):
    run = make_store(tmp_path / "run", sizes)
    assert len(run) == 0 and list(run) == list(run.ids) == list(run.torch_dataset()) == []
    with pytest.raises(KeyError):
        run["a"]


@pytest.mark.parametrize("key", [13, -14, [0, 13]])
def test_position_out_of_range(tmp_path, key):
    run = make_store(tmp_path / "run", [5, 0, 7, 1])
    with pytest.raises(IndexError, match="13"):
        run[key]


def test_unknown_output_names_the_others(tmp_path):
    run = make_store(tmp_path / "run", [2])
    with pytest.raises(UsageError, match="no output mean_layer9") as caught:
        run.output("mean_layer9")
    assert run.outputs == ("mean_layer3",) and "mean_layer3" in caught.value.hint
    assert np.array_equal(run.output("mean_layer3")[1], run[1])


def test_opened_run_is_sent_to_processes(tmp_path):
    run = make_store(tmp_path / "run", [5, 7])
    assert np.array_equal(pickle.loads(pickle.dumps(run))["1_6"], run["1_6"])  # noqa: S301


# Torch and other libraries


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_dataset_has_each_vector_once(tmp_path, shuffle, world_size):
    run = make_store(tmp_path / "run", [5, 0, 7, 1])
    found = []
    for rank in range(world_size):
        dataset = run.torch_dataset(shuffle=shuffle, rank=rank, world_size=world_size)
        pairs = list(dataset)
        assert len(pairs) == len(dataset)
        assert all(np.array_equal(run[name], vector.numpy()) for name, vector in pairs)
        found += [name for name, _ in pairs]
    assert sorted(found) == sorted(run.ids)
    assert (found == list(run.ids)) != shuffle


def test_dataset_order_follows_seed_and_epoch(tmp_path):
    run = make_store(tmp_path / "run", [9, 9, 9])

    def order(seed: int, epoch: int) -> list[str]:
        dataset = run.torch_dataset(shuffle=True, seed=seed)
        dataset.set_epoch(epoch)
        return [name for name, _ in dataset]

    assert order(1, 1) == order(1, 1)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4


def test_loader_workers_share_the_vectors(tmp_path):
    run = make_store(tmp_path / "run", [5, 7, 4])
    loader = DataLoader(run.torch_dataset(shuffle=True), batch_size=4, num_workers=2)
    batches = list(loader)
    assert sorted(name for names, _ in batches for name in names) == sorted(run.ids)
    assert all(isinstance(rows, torch.Tensor) and rows.shape[1] == 4 for _, rows in batches)


def test_rank_out_of_range(tmp_path):
    run = make_store(tmp_path / "run", [2])
    with pytest.raises(UsageError, match="rank 2 of 2"):
        run.torch_dataset(rank=2, world_size=2)


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_arrow_table_has_every_vector(finished, pooling):
    run = virnucpro.open(finished(pooling=pooling))
    table = run.to_arrow()
    rows = [np.array(row, np.float32) for row in table["embedding"].to_pylist()]
    assert table["id"].to_pylist() == list(run.ids)
    assert all(np.array_equal(row, vector) for row, vector in zip(rows, run, strict=True))


def test_anndata_has_every_vector(tmp_path):
    pytest.importorskip("anndata", reason="anndata is not installed")
    run = make_store(tmp_path / "run", [5, 7])
    found = run.to_anndata()
    assert np.array_equal(found.X, run[:]) and found.obs_names.tolist() == list(run.ids)
    assert found.obs["length"].tolist() == run.lengths.tolist()


def test_missing_anndata_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "anndata", None)
    run = make_store(tmp_path / "run", [5, 7])
    with pytest.raises(UnavailableError, match="to_anndata needs the package anndata") as caught:
        run.to_anndata()
    assert caught.value.hint == "install it: pip install anndata"


# Damage


def harm(path: Path, how: str) -> None:
    match how:
        case "missing":
            path.unlink()
        case "cut short":
            path.write_bytes(path.read_bytes()[:-1])
        case "of another shard":
            path.write_bytes((path.parent / "000000.h5").read_bytes())


@pytest.mark.parametrize("how", ["missing", "cut short", "of another shard"])
def test_damaged_part_is_named(tmp_path, how):
    make_store(tmp_path / "run", [3, 4, 5])
    harm(tmp_path / "run/features/000001.h5", how)
    run = open_vectors(open_again(tmp_path / "run"))
    assert run["0_1"].tolist() == [0, 1, 0, 1]  # other parts can be read
    for read in (lambda: run["1_2"], lambda: run[3:6], lambda: list(run)):
        fault = r"000001\.h5 is missing" if how == "missing" else r"000001\.h5 is "
        with pytest.raises(FeatureFileError, match=fault) as caught:
            read()
        assert "resume=True" in caught.value.hint


def test_damaged_part_names_the_command_that_makes_it_again(tmp_path):
    make_store(tmp_path / "run", [3, 4])
    argv = ["/bin/virnucpro", "extract", "-i", "my proteins.faa", "-o", "run"]
    write_run_json(tmp_path / "run", {"argv": argv})
    harm(tmp_path / "run/features/000001.h5", "missing")
    run = open_vectors(open_again(tmp_path / "run"))
    for read in (lambda: run["1_2"], lambda: list(run), lambda: run[3:6]):
        with pytest.raises(FeatureFileError) as caught:
            read()
        command = f"virnucpro extract -i 'my proteins.faa' -o {tmp_path / 'run'} --resume"
        assert caught.value.hint.endswith(f": {command}")
        assert caught.value.__notes__ == [caught.value.hint]


def open_again(folder: Path) -> tuple[FeatureStore, ...]:
    encoder = EncoderSpec(
        model="m", sha256="", layer=3, pooling="mean", precision="fp32", dim=4, store="bfloat16"
    )
    return open_stores(folder / "features", [encoder], "of the recipe")


def test_flipped_bit_is_found_by_whole_reads(tmp_path):
    run = make_store(tmp_path / "run", [3, 4, 5])
    flip_bit(tmp_path / "run/features/000001.h5", 200)
    readers = (run.to_arrow, lambda: list(run), lambda: list(run.torch_dataset(shuffle=True)))
    for read in readers:
        with pytest.raises(FeatureFileError, match=r"000001\.h5 is damaged or truncated"):
            read()


@pytest.mark.parametrize("name", ["index.parquet", "lookup.npy", "parts.json"])
def test_flipped_index_bit_gives_no_wrong_vector(tmp_path, name):
    """Each bit gives an error that names a file of the store, or changes nothing."""
    expected = make_store(tmp_path / "run", [3, 4, 5])
    rows = {orf_id: expected[orf_id].tolist() for orf_id in expected.ids}
    path = tmp_path / "run/features" / name
    n_errors = 0
    for place in range(0, path.stat().st_size, 37):
        flip_bit(path, place)
        try:
            run = open_vectors(open_again(tmp_path / "run"))
            assert {orf_id: run[orf_id].tolist() for orf_id in rows} == rows
            assert run["0_0"].tolist() == rows["0_0"]
        except FeatureFileError as error:
            assert name in str(error)
            n_errors += 1
        flip_bit(path, place)
    assert n_errors > 0


def test_lookup_of_an_earlier_version_is_read(tmp_path):
    """It has other digests, and the index does not name them."""
    run = make_store(tmp_path / "run", [3, 4])
    folder = tmp_path / "run/features"
    texts = [blake2b(name.encode(), digest_size=16).digest() for name in run.ids]
    digests = np.frombuffer(b"".join(texts), "<u8").reshape(-1, 2)
    order = np.argsort(digests[:, 0])
    rows = [digests[order, 0], order.astype("<u8"), digests[:, 1]]
    np.save(folder / "lookup.npy", np.stack(rows))
    digest = sha256((folder / "lookup.npy").read_bytes()).hexdigest()
    table = parquet.read_table(folder / "index.parquet")
    parquet.write_table(
        table.replace_schema_metadata({"lookup_sha256": digest}), folder / "index.parquet"
    )
    earlier = open_vectors(open_again(tmp_path / "run"))
    assert [earlier.position(name) for name in run.ids] == list(range(7))
    assert "0_3" not in earlier


def test_run_without_index_says_how_to_get_it(finished):
    folder = finished()
    (folder / "features/index.parquet").unlink()
    with pytest.raises(InputMissingError, match=r"index\.parquet") as caught:
        virnucpro.open(folder)
    assert "resume=True" in caught.value.hint


def test_resume_writes_the_same_index(tmp_path, make_config, sequences):
    config = make_config(write_fasta(tmp_path / "in.faa", sequences), command="extract")
    run_inline(config, None)
    paths = [config.output / "features" / name for name in ("index.parquet", "lookup.npy")]
    before = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
    run_inline(replace(config, options=replace(config.options, resume=True)), None)
    assert [path.read_bytes() for path in paths] == before
    assert not leftovers(config.output)
