"""Feature store: a folder for each encoder, and copies with the vectors of their originals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from run_helpers import assert_same_vectors, run_inline, vectors

from virnucpro.core.errors import FeatureFileError, OutputError
from virnucpro.core.events import RunEvent, ShardDone
from virnucpro.core.recipe import RESIDUES_PER_SHARD, EncoderSpec, Recipe
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Embeddings, Failure, Orf, Shard
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.orfs import Orfs
from virnucpro.store.feature_file import find_vectors, read_embeddings, write_embeddings
from virnucpro.store.feature_store import FeatureReader, FeatureStore, ShardFeatures, open_stores
from virnucpro.store.run_dir import RunDir
from virnucpro.store.shard_files import ShardWriter, shard_size
from virnucpro.workflows.run_config import RunConfig
from virnucpro.workflows.status import inspect_run

DIM = 4
ENCODER = EncoderSpec(
    model="tiny", sha256="0" * 64, layer=2, pooling="mean", precision="fp32", dim=DIM
)
# the same weights at another layer, and others under a name that is a path
OTHERS = (replace(ENCODER, layer=1), replace(ENCODER, model="../../x", sha256="1" * 64))


@pytest.fixture
def rundir(tmp_path) -> RunDir:
    rundir = open_run_dir(tmp_path / "run")
    rundir.root.mkdir()
    return rundir


@pytest.fixture
def stores(rundir) -> tuple[FeatureStore, ...]:
    stores = open_stores(rundir.features, (ENCODER, *OTHERS), "of the recipe")
    for store in stores:
        store.make_folder()
    return stores


@pytest.mark.parametrize(
    ("n_residues", "n_shards"), [(100_000, 7), (700_000, 38), (17_500_000, 208), (57_000_000, 374)]
)
def test_shard_sizes_grow(n_residues, n_shards):
    place = 0
    while n_residues > 0:
        n_residues -= shard_size(place, RESIDUES_PER_SHARD)
        place += 1
    assert place == n_shards


def test_shards_grow_with_their_number(tmp_path):
    recipe = Recipe(
        **{"command": "extract", "input_type": "protein", "chunk_size": 0, "min_length": 0},
        **{"encoders": (ENCODER,), "residues_per_shard": 50_000},
    )
    writer = ShardWriter(SafeDir(tmp_path), tmp_path, recipe)
    writer.add_orfs(
        Orfs.from_proteins([f"p{n}" for n in range(100)], [f"{n:A>16000}" for n in range(100)])
    )
    writer.flush()
    sizes = [shard.n_residues for shard in writer.shards]
    assert sizes == [16_000] * 32 + [32_000] * 32 + [64_000]  # the last has one more than it needs


def make_shard(index: int, orfs: list[Orf]) -> Shard:
    n_embedded = sum(orf.copy_of is None for orf in orfs)
    path = Path(f"{index:06d}.faa")
    return Shard(index, path, len(orfs), n_embedded, 10 * n_embedded, f"{index}" * 64)


def make_orf(name: str, copy_of: int | None = None) -> Orf:
    return Orf(name, name, f"record of {name}", 0, 30, "+", "MKVLEFPQIL", copy_of=copy_of)


def embed(names: str, failed: str = "", first: float = 0.0) -> Embeddings:
    rows = [[first + i] * DIM for i in range(len(names))]
    return Embeddings(
        ids=tuple(names),
        lengths=np.full(len(names), 10, dtype=np.int32),
        vectors=np.array(rows, dtype=np.float32).reshape(len(names), DIM),
        failures=tuple(Failure(name, f"record of {name}", "no memory") for name in failed),
    )


def rows_of(features: ShardFeatures) -> dict[str, np.ndarray]:
    ids = [orf_id for file in features.files for orf_id in file.embeddings.ids]
    return dict(zip(ids, features.select_rows(ids), strict=True))


def test_copy_has_the_row_of_its_original(stores):
    store = stores[0]
    shards = [
        [make_orf("a"), make_orf("b"), make_orf("c")],
        [make_orf("d"), make_orf("A", 0), make_orf("B", 1)],
        [make_orf("C", 2), make_orf("D", 3), make_orf("AA", 0)],
    ]
    places = [make_shard(i, orfs) for i, orfs in enumerate(shards)]
    store.write(places[0], embed("ac", failed="b"))
    store.write(places[1], embed("d", first=7.0))
    store.write(places[2], embed(""))
    reader = FeatureReader(store, places)
    features = [
        reader.read(place, orfs, {}, place.index)
        for place, orfs in zip(places, shards, strict=True)
    ]
    rows = {name: row[0] for found in features for name, row in rows_of(found).items()}
    assert rows == {"a": 0, "c": 1, "d": 7, "A": 0, "C": 1, "D": 7, "AA": 0}
    reasons = {name: why for found in features for name, why in found.reasons.items()}
    assert reasons == {"b": "no memory", "B": "no memory"}
    files = {name for *_, content in store.read_files() for name in content.ids}
    assert files == rows.keys()  # so that readers of the files find the copies too


def test_lost_shard_fails_with_its_copies(stores):
    lost = [make_orf("a")]
    kept = [make_orf("b"), make_orf("A", 0), make_orf("B", 1)]
    shards = [make_shard(0, lost), make_shard(1, kept)]
    stores[0].write(shards[1], embed("b"))
    reader = FeatureReader(stores[0], shards)
    reasons = {0: "its worker died"}
    assert reader.read(shards[0], lost, reasons, 0).reasons == {"a": "its worker died"}
    features = reader.read(shards[1], kept, reasons, 1)
    assert features.reasons == {"A": "its worker died"}
    assert rows_of(features).keys() == {"b", "B"}


def test_each_encoder_has_its_own_store(rundir, stores):
    assert stores[0].folder == rundir.features
    assert {store.folder.parent for store in stores[1:]} == {rundir.features}
    shard = make_shard(0, [make_orf("a")])
    assert len({store.path(shard) for store in stores}) == len(stores)
    assert stores[0].index == rundir.feature_index
    for i, store in enumerate(stores):
        store.write(shard, embed("a", first=i))
        assert len(store.completed_names()) == 1
    for i, store in enumerate(stores):
        ((*_, content),) = store.read_files()
        assert (content.vectors == i).all()


def test_each_encoder_has_its_own_pending_shards(stores):
    shards = [make_shard(i, [make_orf(name)]) for i, name in enumerate("ab")]
    for shard in shards:
        stores[0].write(shard, embed("ab"[shard.index]))
    stores[1].write(shards[1], embed("", failed="b"))

    def owed(store: FeatureStore, *replaced: str) -> list[int]:
        pending = store.find_pending(shards, frozenset(replaced), lambda *_: None)
        return [shard.index for shard in pending]

    assert [owed(store) for store in stores] == [[], [0, 1], [0, 1]]
    assert owed(stores[1], "record of b") == [0]
    assert [shards[1].name in store.completed_names() for store in stores] == [True, True, False]


def test_files_keep_shard_order_beyond_a_million(rundir, stores):
    names = {999_999: "a", 1_000_000: "b", 10_000_000: "c"}
    for index, name in names.items():
        stores[0].write(make_shard(index, [make_orf(name)]), embed(name))
    assert [content.ids for *_, content in stores[0].read_files()] == [("a",), ("b",), ("c",)]
    assert stores[0].completed_names() == {str(index) for index in names}
    rundir.delete_results()
    assert not stores[0].folder.exists()


def test_scattered_vectors_are_not_misread(tmp_path):
    path = tmp_path / "chunked.h5"
    with h5py.File(path, "w") as h5:
        h5.create_dataset("embeddings", data=np.ones((8, DIM), dtype=np.float32), chunks=(2, DIM))
    with pytest.raises(FeatureFileError, match="are not stored one after the other"):
        find_vectors(path)


def test_equal_file_is_kept_and_others_replaced(rundir):
    path = rundir.features / "000000.h5"
    about = {"shard": 0}
    rundir.features.mkdir()
    write_embeddings(path, embed("ab"), about, rundir)
    before = path.stat().st_ino
    write_embeddings(path, embed("ab"), about, rundir)
    assert path.stat().st_ino == before
    write_embeddings(path, embed("ab", first=1.0), about, rundir)
    assert path.stat().st_ino != before
    assert read_embeddings(path, about).vectors[:, 0].tolist() == [1.0, 2.0]


def test_file_without_vectors_is_valid(rundir):
    path = rundir.features / "000000.h5"
    rundir.features.mkdir()
    write_embeddings(path, embed("", failed="a"), {"shard": 0}, rundir)
    assert find_vectors(path) == 0


def test_second_store_is_cleared_and_guarded(rundir, stores, tmp_path):
    shard = make_shard(0, [make_orf("a")])
    for store in stores:
        store.write(shard, embed("a"))
        store.index.write_bytes(b"all vectors")
        store.parts.write_bytes(b"a list of files")
        store.partial_path(shard, "me").write_bytes(b"rows")
    mine = stores[1].folder / "mine.txt"
    mine.write_text("mine")
    rundir.remove_leftovers()
    assert not any(store.partial_path(shard, "me").exists() for store in stores)
    assert all(shard.name in store.completed_names() for store in stores)
    rundir.delete_results()
    left = [path for path in rundir.root.rglob("*") if path.is_file()]
    assert left == [mine]
    mine.unlink()
    mine.parent.rmdir()
    mine.parent.symlink_to(tmp_path)
    with pytest.raises(OutputError, match="is a link"), rundir.locked():
        pass


def test_run_of_two_encoders_resumes(make_config, tiny, contigs, tmp_path):
    layers = [
        make_config(contigs, command="extract", layer=n, output=tmp_path / f"{n}") for n in (2, 1)
    ]
    for config in layers:
        run_inline(config, None)
    encoders = tuple(config.recipe.encoders[0] for config in layers)
    recipe = replace(layers[0].recipe, encoders=encoders)

    def config_of_both(**changes: bool) -> RunConfig:
        weights = (tiny.model, tiny.model)
        config = make_config(
            contigs, command="extract", weights=weights, output=tmp_path / "both", **changes
        )
        return replace(config, recipe=recipe)

    both = config_of_both()
    run_inline(both, None)
    stores = open_stores(open_run_dir(both.output).features, recipe.encoders, recipe.fingerprint)

    def assert_whole() -> None:
        for store, alone in zip(stores, layers, strict=True):
            with h5py.File(store.index) as h5:
                found = dict(zip(h5["ids"].asstr()[:], h5["embeddings"][:], strict=True))
            assert_same_vectors(found, vectors(alone.output))

    assert_whole()
    n_shards = len(stores[0].completed_names())
    lines = inspect_run(both.output, verify=True)[0]
    assert f"shards    {n_shards} done" in lines
    (stores[1].folder / "000001.h5").unlink()
    assert inspect_run(both.output, verify=True)[1] == 1
    lines = inspect_run(both.output, verify=False)[0]
    assert f"shards    {n_shards - 1} done" in lines
    name = (stores[1].folder / "000001.h5").relative_to(both.output)
    assert f"missing   {name}: --resume writes them if the input is there" in lines
    events: list[RunEvent] = []
    assert run_inline(config_of_both(resume=True), None, events.append).n_tokens > 0
    assert [event.shard.index for event in events if isinstance(event, ShardDone)] == [1]
    assert_whole()
    assert run_inline(config_of_both(resume=True), None).n_tokens == 0
