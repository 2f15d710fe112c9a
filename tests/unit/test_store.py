"""A feature file exists only when it is complete, and any h5py can read it."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import signal
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xxhash
from forkserver_runner import fork_server
from pyarrow import parquet
from run_helpers import flip_bit, no_file_longer_than, wait_until

from virnucpro.core.atomic_io import atomic_path, disk_error
from virnucpro.core.errors import FeatureFileError, OutputError, StorageError
from virnucpro.core.recipe import EncoderSpec, Store
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Embeddings, Failure
from virnucpro.results.outputs import open_run_dir
from virnucpro.store.feature_export import export, save_npz, save_parquet
from virnucpro.store.feature_file import (
    read_embeddings,
    read_label,
    read_table,
    verify,
    write_embeddings,
)

ATTRIBUTES: dict[str, str | int] = {
    "model": "esm2_t6_8M_UR50D",
    "layer": 6,
    "pooling": "mean",
    "precision": "fp32",
    "fingerprint": "f1" * 32,
    "shard_sha256": "5a" * 32,
}
PER_RESIDUE = {**ATTRIBUTES, "pooling": "none"}
DIM = 4
ENCODER = EncoderSpec(
    model="tiny", sha256="0" * 64, layer=6, pooling="mean", precision="fp32", dim=DIM
)
MOST_SECONDS = 10  # of CPU, for a file that is read in a thousandth of one


def make_embeddings(
    n_orfs: int, *, per_residue: bool = False, prefix: str = "contig", n_failures: int = 0
) -> Embeddings:
    rng = np.random.default_rng(n_orfs)
    lengths = rng.integers(1, 6, n_orfs).astype(np.int32)
    n_rows = int(lengths.sum()) if per_residue else n_orfs
    return Embeddings(
        ids=tuple(f"{prefix}{i}_chunk_1F{i % 3 + 1}" for i in range(n_orfs)),
        lengths=lengths,
        vectors=rng.standard_normal((n_rows, DIM)).astype(np.float32),
        per_residue=per_residue,
        failures=tuple(
            Failure(f"{prefix}_bad{i}F1", f"{prefix}_bad{i}", f"out of memory [red] \u00e9 {i}")
            for i in range(n_failures)
        ),
    )


def attributes_of(embeddings: Embeddings) -> dict[str, str | int]:
    return PER_RESIDUE if embeddings.per_residue else ATTRIBUTES


def rows_by_id(embeddings: Embeddings) -> dict[str, list[list[float]]]:
    """Return the rows of each ORF: one, or one for each residue."""
    counts = embeddings.lengths if embeddings.per_residue else np.ones_like(embeddings.lengths)
    rows = iter(embeddings.vectors.tolist())
    return {
        orf_id: [next(rows) for _ in range(n)]
        for orf_id, n in zip(embeddings.ids, counts, strict=True)
    }


def is_same(found: Embeddings, expected: Embeddings) -> bool:
    """Compare to the last bit."""
    return (
        found.ids == expected.ids
        and found.failures == expected.failures
        and found.per_residue == expected.per_residue
        and found.vectors.dtype == expected.vectors.dtype
        and found.lengths.dtype == expected.lengths.dtype
        and found.vectors.tobytes() == expected.vectors.tobytes()
        and found.lengths.tobytes() == expected.lengths.tobytes()
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "features").mkdir()
    return tmp_path / "features" / "000000.h5"


def refusal_of(path: Path, attributes: dict[str, str | int] = ATTRIBUTES) -> FeatureFileError:
    with pytest.raises(FeatureFileError) as caught:
        read_embeddings(path, attributes)
    assert path.name in str(caught.value)
    return caught.value


# Round trips


@pytest.mark.parametrize("store", ["float32", "bfloat16"])
@pytest.mark.parametrize("per_residue", [False, True], ids=["mean", "per-residue"])
@pytest.mark.parametrize(("n_orfs", "n_failures"), [(7, 0), (7, 2), (1, 0), (0, 2), (0, 0)])
def test_embeddings_are_read_back(
    path: Path, store: Store, per_residue: bool, n_orfs: int, n_failures: int
) -> None:
    embeddings = make_embeddings(n_orfs, per_residue=per_residue, n_failures=n_failures)
    write_embeddings(path, embeddings, attributes_of(embeddings), SafeDir(path.parent), store)
    if store == "bfloat16":
        rounded = torch.from_numpy(embeddings.vectors).bfloat16().float().numpy()
        embeddings = replace(embeddings, vectors=rounded)
    assert is_same(read_embeddings(path, attributes_of(embeddings)), embeddings)


def test_h5py_reads_bfloat16_as_float32(path: Path) -> None:
    ties = np.array([[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20]], dtype=np.float32)
    edges = np.array([[0.0, -0.0, 2.0**-130, 3.3e38]], dtype=np.float32)
    embeddings = replace(make_embeddings(2), vectors=np.concatenate([ties, edges]))
    write_embeddings(path, embeddings, ATTRIBUTES, SafeDir(path.parent), "bfloat16")
    even = [1.0, 1 + 2**-6, -1.0, 1 + 2**-7]
    with h5py.File(path) as h5:
        stored = h5["embeddings"]
        assert stored.dtype == np.float32
        assert stored.id.get_storage_size() == 2 * stored.size
        assert stored[0].tolist() == even
        assert stored[1] == pytest.approx(edges[0], rel=2**-8)


def test_ids_of_any_kind_come_back(path: Path) -> None:
    ids = ("../../x", "/etc/x", "[red]", "\x1b[31m", "\u00e9\U0001f9a0", "a" * 10_000, "\x7f", "'")
    embeddings = replace(make_embeddings(len(ids)), ids=ids)
    write_embeddings(path, embeddings, ATTRIBUTES, SafeDir(path.parent))
    assert read_embeddings(path, ATTRIBUTES).ids == ids


# Checksums


def write_with_sha256(path: Path, embeddings: Embeddings) -> None:
    """Write a file with the label of an earlier version."""
    write_embeddings(path, embeddings, ATTRIBUTES, SafeDir(path.parent))
    label = read_label(path, ATTRIBUTES)
    content = path.read_bytes()[: label.n_bytes]
    old = {
        "attributes": label.attributes,
        "failed_records": label.failed_records,
        "n_bytes": label.n_bytes,
        "sha256": hashlib.sha256(content).hexdigest(),
        "table_bytes": label.table_bytes,
        "table_sha256": hashlib.sha256(content[-label.table_bytes :]).hexdigest(),
        "offsets": label.offsets,
    }
    text = json.dumps(old).encode()
    seal = struct.pack("<32sI", hashlib.sha256(text).digest(), len(text))
    path.write_bytes(content + text + seal)


def write_with_xxh3(path: Path, embeddings: Embeddings) -> None:
    write_embeddings(path, embeddings, ATTRIBUTES, SafeDir(path.parent))


WRITERS = pytest.mark.parametrize("write", [write_with_sha256, write_with_xxh3])


def test_checksums_are_xxh3_of_content_table_and_file(path: Path) -> None:
    checksums = write_embeddings(path, make_embeddings(7), ATTRIBUTES, SafeDir(path.parent))
    label = read_label(path, ATTRIBUTES)
    content = path.read_bytes()
    table = content[label.n_bytes - label.table_bytes : label.n_bytes]
    assert label.checksum == f"xxh3-128:{xxhash.xxh3_128_hexdigest(content[: label.n_bytes])}"
    assert label.table_checksum == f"xxh3-128:{xxhash.xxh3_128_hexdigest(table)}"
    assert checksums.file == f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"
    assert verify(path, ATTRIBUTES) == checksums


def test_file_with_sha256_of_an_earlier_version_is_read(path: Path) -> None:
    embeddings = make_embeddings(7, n_failures=1)
    write_with_sha256(path, embeddings)
    assert is_same(read_embeddings(path, ATTRIBUTES), embeddings)
    assert read_table(path, ATTRIBUTES).ids == embeddings.ids
    assert verify(path, ATTRIBUTES).file == hashlib.sha256(path.read_bytes()).hexdigest()


@WRITERS
@pytest.mark.parametrize("block", ["vectors", "table", "label"])
def test_one_flipped_bit_is_found(path: Path, write: Callable[..., None], block: str) -> None:
    write(path, make_embeddings(7))
    content = path.read_bytes()
    label = read_label(path, ATTRIBUTES)
    start = {
        "vectors": label.offsets["embeddings"],
        "table": label.n_bytes - label.table_bytes,
        "label": label.n_bytes,
    }[block]
    length = {"vectors": 7 * DIM * 4, "table": label.table_bytes, "label": len(content) - start}
    for offset in range(start, start + length[block], 5):
        flip_bit(path, offset)
        for read in (verify, read_embeddings, *([read_table] if block != "vectors" else [])):
            with pytest.raises(FeatureFileError, match="is damaged or truncated"):
                read(path, ATTRIBUTES)
        path.write_bytes(content)


@pytest.mark.parametrize("checksum", ["crc32:00000000", "xxh3-128", "", 5, None])
def test_unknown_checksum_is_refused(path: Path, checksum: object) -> None:
    write_with_xxh3(path, make_embeddings(3))
    label = asdict(read_label(path, ATTRIBUTES)) | {"checksum": checksum}
    text = json.dumps(label).encode()
    seal = struct.pack("<32sI", hashlib.sha256(text).digest(), len(text))
    path.write_bytes(path.read_bytes()[: label["n_bytes"]] + text + seal)
    with pytest.raises(FeatureFileError, match="is damaged or truncated"):
        verify(path, ATTRIBUTES)


def test_same_content_is_not_written_again(path: Path) -> None:
    """Another content, and the same with a damaged bit, are."""
    write_with_xxh3(path, make_embeddings(7))
    first = path.stat().st_ino
    write_with_xxh3(path, make_embeddings(7))
    assert path.stat().st_ino == first
    content = path.read_bytes()
    flip_bit(path)
    write_with_xxh3(path, make_embeddings(7))
    assert path.read_bytes() == content
    write_with_xxh3(path, make_embeddings(8))
    assert read_embeddings(path, ATTRIBUTES).ids == make_embeddings(8).ids


# Damage


def other_hdf5(path: Path, *groups: str) -> None:
    with h5py.File(path, "w") as h5:
        h5["something"] = [1.0, 2.0]
        h5.attrs.update(ATTRIBUTES)
        for name in groups:
            h5.create_group(name)


@pytest.mark.parametrize(
    "place",
    [
        lambda _: None,
        *(
            partial(Path.write_bytes, data=content)
            for content in (b"", b"no HDF5", b"\x89HDF\r\n\x1a\n", b"\0" * 4096)
        ),
        Path.mkdir,
        other_hdf5,
        lambda path: other_hdf5(path, "ids", "embeddings", "lengths", "failed"),
    ],
)
def test_missing_or_other_file_is_refused(path: Path, place: Callable[[Path], object]) -> None:
    place(path)
    refusal_of(path)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_file_of_another_recipe_is_refused(path: Path, name: str) -> None:
    write_embeddings(path, make_embeddings(5), ATTRIBUTES, SafeDir(path.parent))
    message = str(refusal_of(path, {**ATTRIBUTES, name: "another"}))
    assert f"has {name} " in message and message.endswith(", not another")
    refusal_of(path, {**ATTRIBUTES, f"new_{name}": ATTRIBUTES[name]})


@pytest.mark.parametrize(
    ("attributes", "failed_records"),
    [([1], []), ("text", []), (ATTRIBUTES, 5), (ATTRIBUTES, "text"), (ATTRIBUTES, [["a"]])],
)
def test_odd_label_is_refused(path: Path, attributes: object, failed_records: object) -> None:
    write_embeddings(path, make_embeddings(5), ATTRIBUTES, SafeDir(path.parent))
    content = path.read_bytes()[: read_label(path, {}).n_bytes]
    label = {"attributes": attributes, "failed_records": failed_records}
    label |= {"n_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps(label).encode()
    seal = struct.pack("<32sI", hashlib.sha256(text).digest(), len(text))
    path.write_bytes(content + text + seal)
    for required in (ATTRIBUTES, {}):
        assert "is damaged or truncated" in str(refusal_of(path, required))


def test_changed_label_bit_is_refused(path: Path) -> None:
    """Also if its value is not used, or if the result is another valid label."""
    write_embeddings(path, make_embeddings(5), ATTRIBUTES, SafeDir(path.parent))
    whole = path.read_bytes()
    start = read_label(path, {}).n_bytes
    assert len(whole) - start > 200
    for place in range(start, len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert "is damaged or truncated" in str(refusal_of(path, {})), place


def test_huge_label_is_refused_unread(path: Path) -> None:
    """A foreign file, or one that is cut within numbers, may claim gigabytes."""
    with path.open("wb") as out:
        out.truncate(1 << 29)  # takes no space
        out.seek(0, os.SEEK_END)
        out.write(struct.pack("<32sI", b"", 1 << 29))
    tracemalloc.start()
    refusal_of(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def survey_damage(path: Path, is_truncation: bool) -> None:
    """Read damaged files in a separate process, because HDF5 can loop forever.

    Every damage is refused, or harmless to the last bit. A file next to the damaged one records
    what is tried. A loop takes CPU time, which does not pass while other programs use the machine.
    """
    expected = read_embeddings(path, ATTRIBUTES)
    content = path.read_bytes()
    for offset, bit in truncations(content) if is_truncation else flips(content):
        damaged = bytearray(content)
        if is_truncation:
            del damaged[offset:]
        else:
            damaged[offset] ^= 1 << bit
        path.with_suffix(".tried").write_text(f"byte {offset}, bit {bit}")
        path.write_bytes(damaged)
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        try:
            found = read_embeddings(path, ATTRIBUTES)
        except FeatureFileError:
            continue
        assert not is_truncation and is_same(found, expected), (offset, bit)


def truncations(content: bytes) -> Iterator[tuple[int, int]]:
    for length in (*range(0, len(content), 61), len(content) - 1):
        yield length, 0


def flips(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield bits all over the file, and every bit in the headers of HDF5's string heaps."""
    for offset in range(0, len(content), 13):
        yield offset, offset % 8
    heap = content.find(b"GCOL")
    while heap >= 0:
        for offset in range(heap, heap + 48):
            yield from ((offset, bit) for bit in range(8))
        heap = content.find(b"GCOL", heap + 1)


@pytest.mark.parametrize("is_truncation", [True, False], ids=["truncated", "flipped-bit"])
def test_damage_is_refused_or_harmless(path: Path, is_truncation: bool) -> None:
    write_embeddings(path, make_embeddings(7, n_failures=1), ATTRIBUTES, SafeDir(path.parent))
    survey = fork_server().Process(target=survey_damage, args=(path, is_truncation))
    survey.start()
    survey.join()
    tried = path.with_suffix(".tried").read_text()
    assert survey.exitcode != -signal.SIGPROF, f"reading hangs on a damaged file: {tried}"
    assert survey.exitcode == 0, tried


def test_truncated_file_is_refused(path: Path) -> None:
    write_embeddings(path, make_embeddings(7, n_failures=1), ATTRIBUTES, SafeDir(path.parent))
    content = path.read_bytes()
    assert read_label(path, ATTRIBUTES).failed_records == ["contig_bad0"]
    cut = [content[:length] for length, _ in truncations(content)]
    for damaged in (*cut, content[:512] + content[1024:]):
        path.write_bytes(damaged)
        with pytest.raises(FeatureFileError, match="is damaged or truncated"):
            read_label(path, ATTRIBUTES)


# Interrupted writes


def test_bits_that_the_disk_changed_are_noticed_when_read(path, monkeypatch) -> None:
    class Faulty(io.FileIO):
        def write(self, content: Any) -> int:
            whole = bytes(content)
            return super().write(whole[:-1] + bytes([whole[-1] ^ 1]))

    monkeypatch.setattr("virnucpro.core.safe_dir._NamedFile", Faulty)
    write_embeddings(path, make_embeddings(5), ATTRIBUTES, SafeDir(path.parent))
    with pytest.raises(FeatureFileError, match="is damaged or truncated"):
        read_embeddings(path, ATTRIBUTES)


def test_failed_write_keeps_the_old_file(path: Path) -> None:
    before = make_embeddings(5)
    after = make_embeddings(9)
    write_embeddings(path, before, ATTRIBUTES, SafeDir(path.parent))
    with pytest.raises(StorageError, match="too large"), no_file_longer_than(1000):
        write_embeddings(path, after, ATTRIBUTES, SafeDir(path.parent))
    assert is_same(read_embeddings(path, ATTRIBUTES), before)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    write_embeddings(path, after, ATTRIBUTES, SafeDir(path.parent))
    assert is_same(read_embeddings(path, ATTRIBUTES), after)


@pytest.mark.parametrize("name", ["x" * 300, "loop/file"])
def test_impossible_path_is_refused_with_a_hint(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputError) as caught, atomic_path(tmp_path / name) as temporary:
        temporary.write_bytes(b"content")
    assert "another path" in caught.value.hint
    with pytest.raises(OutputError) as caught, open_run_dir(tmp_path / name).locked(create=True):
        pass
    assert "another path" in caught.value.hint


def test_every_disk_error_has_a_hint() -> None:
    for number in errno.errorcode:
        assert disk_error(OSError(number, os.strerror(number), "file")).hint


def test_two_processes_may_write_one_file_at_once(path: Path) -> None:
    """Processes in two containers may have the same number."""
    with atomic_path(path) as first, atomic_path(path) as second:
        second.write_bytes(b"whole")
        first.write_bytes(b"whole as well")
    assert path.read_bytes() == b"whole as well"


def test_interrupted_write_leaves_nothing(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as temporary:
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt
    assert list(path.parent.iterdir()) == []


def test_only_leftovers_are_swept(path: Path) -> None:
    write_embeddings(path, make_embeddings(5), ATTRIBUTES, SafeDir(path.parent))
    with pytest.raises(OutputError), atomic_path(path.with_name("000001.h5")) as temporary:
        temporary.write_bytes(b"half")
        SafeDir(path.parents[1]).remove_temp_files(path.parent)  # as the next run does
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("n_files", [2, 40])
def test_files_are_deleted_by_name(tmp_path: Path, n_files: int) -> None:
    folder = tmp_path / "run/shards"
    folder.mkdir(parents=True)
    for number in range(n_files):
        (folder / f"{number}.faa").write_text(">a")
    (folder / "notes.txt").write_text("mine")
    tree = SafeDir(tmp_path / "run")
    tree.delete_files(folder, lambda name: name.endswith(".faa"))
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    tree.delete_files(tmp_path / "run/missing", lambda _: True)


@pytest.mark.parametrize("n_files", [2, 40])
def test_file_that_cannot_be_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_files: int
) -> None:
    for number in range(n_files):
        (tmp_path / f"{number}.faa").write_text(">a")

    def refuse(name: str, *, dir_fd: int) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", name)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(PermissionError) as caught:
        SafeDir(tmp_path).delete_files(tmp_path, lambda name: name.endswith(".faa"))
    assert Path(caught.value.filename).parent == tmp_path


def test_leftovers_that_cannot_be_deleted_do_not_stop(tmp_path: Path) -> None:
    folders = {f".{i}.h5.0123abcd.tmp" for i in range(0, 20, 2)}
    for i in range(20):
        left = tmp_path / f".{i}.h5.0123abcd.tmp"
        left.mkdir() if left.name in folders else left.write_text("half")
    SafeDir(tmp_path).remove_temp_files(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == folders


# Other formats


@pytest.mark.parametrize("n_orfs", [5, 1, 0])
@pytest.mark.parametrize("per_residue", [False, True], ids=["mean", "per-residue"])
def test_exports_load_without_code(tmp_path: Path, n_orfs: int, per_residue: bool) -> None:
    embeddings = make_embeddings(n_orfs, per_residue=per_residue)
    encoder = replace(ENCODER, pooling="none" if per_residue else "mean")
    save_npz(tmp_path / "000000.npz", embeddings, SafeDir(tmp_path))
    with np.load(tmp_path / "000000.npz", allow_pickle=False) as stored:
        ids = tuple(stored["ids"].tolist())
        found = Embeddings(ids, stored["lengths"], stored["embeddings"], per_residue)
    assert is_same(found, embeddings)
    export(tmp_path / "000000.pt", embeddings, "pt", encoder, SafeDir(tmp_path))
    stored = torch.load(tmp_path / "000000.pt", weights_only=True)
    assert set(stored) == {"proteins", "data"}
    assert len(stored["proteins"]) == len(stored["data"]) == n_orfs
    assert rows_by_id(embeddings) == {
        name: np.atleast_2d(tensor.numpy()).tolist()
        for name, tensor in zip(stored["proteins"], stored["data"], strict=True)
    }
    assert all(tensor.ndim == 1 + per_residue for tensor in stored["data"])
    save_parquet(tmp_path / "000000.parquet", embeddings, encoder, SafeDir(tmp_path))
    table = parquet.read_table(tmp_path / "000000.parquet")
    rows = zip(table["id"].to_pylist(), table["embedding"].to_pylist(), strict=True)
    assert {name: row if per_residue else [row] for name, row in rows} == rows_by_id(embeddings)
    assert table["length"].to_pylist() == embeddings.lengths.tolist()
    assert (table.schema.metadata[b"model"], table.schema.metadata[b"layer"]) == (b"tiny", b"6")


def test_parquet_holds_odd_ids_and_bfloat16(tmp_path: Path) -> None:
    vectors = np.random.default_rng(1).standard_normal((2, 50_000)).astype(np.float32)
    rounded = torch.from_numpy(vectors).bfloat16().float().numpy()
    encoder = replace(ENCODER, dim=50_000)
    sizes = []
    for each in (vectors, rounded):
        embeddings = Embeddings(("\udcff<>", "b"), np.ones(2, np.int32), each)
        save_parquet(tmp_path / "000000.parquet", embeddings, encoder, SafeDir(tmp_path))
        sizes.append((tmp_path / "000000.parquet").stat().st_size)
        table = parquet.read_table(tmp_path / "000000.parquet")
        assert table["id"].to_pylist() == [r"\xff<>", "b"]
        assert table["embedding"].to_pylist() == each.tolist()
    assert sizes[1] < 0.55 * sizes[0]


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    parts = [make_embeddings(5, prefix="a", n_failures=1), make_embeddings(3, prefix="b")]
    for name in ("one", "two"):
        began = int(time.time())
        folder = tmp_path / name
        folder.mkdir()
        tree = SafeDir(folder)
        write_embeddings(folder / "000000.h5", parts[0], ATTRIBUTES, tree, "bfloat16")
        save_npz(folder / "000000.npz", parts[0], tree)
        export(folder / "000000.pt", parts[0], "pt", ENCODER, tree)
        save_parquet(folder / "000000.parquet", parts[0], ENCODER, tree)
        wait_until(lambda began=began: time.time() > began + 1)  # HDF5 counts time in seconds
    for name in ("000000.h5", "000000.npz", "000000.pt", "000000.parquet"):
        first = tmp_path / "one" / name
        second = tmp_path / "two" / name
        assert first.read_bytes() == second.read_bytes(), name


def test_pt_file_has_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    export(tmp_path / "000000.pt", make_embeddings(5), "pt", ENCODER, SafeDir(tmp_path))
    with zipfile.ZipFile(tmp_path / "000000.pt") as archive:
        assert not any(f".{os.getpid()}" in name for name in archive.namelist())
