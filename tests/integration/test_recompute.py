"""``status --recompute`` finds files that do not follow from the input, which no checksum can."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, open_dna, random_dna
from region_helpers import host_dna, phage_dna
from run_helpers import (
    invoke,
    run_inline,
    write_fasta,
    write_run_json,
)
from safetensors.numpy import load, save

from virnucpro.core.atomic_io import hash_file, zstd
from virnucpro.core.errors import InputError, InputMissingError
from virnucpro.core.model_outputs import vector_output
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.safe_dir import SafeDir
from virnucpro.engine.local import InlineExecutor
from virnucpro.models.lookup import open_model
from virnucpro.store.feature_file import (
    read_checksummed,
    read_embeddings,
    read_label,
    verify,
    write_checksummed,
    write_embeddings,
)
from virnucpro.viral.head import Head
from virnucpro.viral.known import KnownIndex
from virnucpro.viral.networks import Scorer
from virnucpro.workflows.find_proviruses import find_regions
from virnucpro.workflows.predict import run_predict
from virnucpro.workflows.predict_options import PredictOptions, RegionsOptions
from virnucpro.workflows.recompute import Recomputed, largest_distance_explained
from virnucpro.workflows.recompute import recompute as recompute_with
from virnucpro.workflows.resolve_predict import resolve_predict

pytestmark = pytest.mark.usefixtures("quick_starts_in_module")

SMALL = {"bytes_per_slice": 2**12, "residues_per_shard": 900}


def recompute(folder: Path, n: int = 10**6, seed: int = 0) -> Recomputed:
    return recompute_with(folder, n, seed, lambda _: InlineExecutor())


def verified(folder: Path) -> bool:
    """Return True if ``status --verify`` finds nothing."""
    return invoke("status", folder, "--verify")[0] == 0


def record_hash(folder: Path, path: Path) -> None:
    """Put the present checksum of a file into ``run.json``, as an attacker could."""
    stored = json.loads((folder / "run.json").read_text())
    place = str(path.relative_to(folder))
    assert place in stored["outputs"]
    is_feature_file = path.parent.name == "features"
    stored["outputs"][place] = verify(path, {}).file if is_feature_file else hash_file(path)
    write_run_json(folder, stored)


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture(scope="module")
def hashes(tiny) -> dict[str, str]:
    digest = open_model(str(tiny.model), lambda _: None).prepare("fp32", lambda _: None)[1]
    head = Head.load(tiny.head_file)
    return {
        "sha256": digest,
        "head_sha256": head.sha256,
        "scorer_sha256": Scorer.load_builtin().sha256,
        "known_sha256": KnownIndex.load_builtin().sha256,
    }


@pytest.fixture
def make_run(make_config, tiny, hashes) -> Callable[..., Path]:
    """Run with a model that can be found by its path."""

    def make(*inputs: Path, **changes: object) -> Path:
        given = {"head": tiny.head_file, **hashes}
        if changes.get("command") == "extract":
            given = {"sha256": hashes["sha256"]}
        config = make_config(*inputs, **{**given, **SMALL, **changes})
        config = replace(config, models=(str(tiny.model),))
        run_inline(config, tiny.head if "head" in given else None)
        return config.output

    return make


@pytest.fixture
def proteins(tmp_path) -> Path:
    rng = np.random.default_rng(4)
    each = ["M" + "".join(rng.choice(list("DEFGHIKL"), 90)) for _ in range(60)]
    records = {f"p{i}": each[i // 2] for i in range(120)}
    return write_fasta(tmp_path / "proteins.faa", records)


@pytest.fixture
def extracted(make_run, proteins) -> Path:
    return make_run(proteins, command="extract")


@pytest.fixture(scope="module")
def called(tmp_path_factory) -> Iterator[Path]:
    """A run of the scorer, with regions, several slices and blocks, and tables per file."""
    folder = tmp_path_factory.mktemp("called")
    rng = np.random.default_rng(8)
    sources = []
    for name in "ab":
        records = {f"{name}{i}": open_dna(1200, rng) for i in range(100)}
        host = host_dna(60_000, rng)
        phage = phage_dna(20_000, rng)
        records |= {"host": host[:30_000] + phage + host[30_000:], "shared": random_dna(900, rng)}
        sources.append(write_fasta(folder / f"{name}.fa", records))
    run_scorer(*sources, output_dir=folder / "run", per_file=True)
    return folder / "run"


def run_scorer(*sources: Path, output_dir: Path, **changes: object) -> None:
    options = PredictOptions(input=sources, output_dir=output_dir, **changes)
    config = resolve_predict(options, lambda _: None)
    recipe = replace(config.recipe, bytes_per_slice=2**16)
    run_predict(replace(config, recipe=recipe), InlineExecutor(), lambda _: None)


@pytest.fixture
def copied(called, tmp_path) -> Path:
    """A copy of that run, which a test may change."""
    folder = tmp_path / "run"
    for path in called.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(called)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return folder


# Unchanged runs


def test_honest_vectors_have_the_same_bits(extracted):
    before = state_of(extracted)
    made = recompute(extracted)
    files = [path for path in before if "features/" in path and path.endswith(".h5")]
    n_shards = len([path for path in files if "_copies" not in path])
    assert made.faults == [] and made.n_same_bits == made.n_shards == n_shards > 3
    assert made.n_slices > 2 and made.n_skipped == made.n_blocks == 0
    assert state_of(extracted) == before


def test_honest_calls_of_a_head_are_equal(make_run, contigs):
    made = recompute(make_run(contigs, per_file=True))
    assert made.faults == [] and made.n_shards > 3 and made.n_slices > 3


def test_honest_scores_are_equal(called):
    before = state_of(called)
    made = recompute(called)
    assert made.faults == [] and made.n_slices > 3
    assert made.n_blocks == len(list((called / "scores").iterdir())) >= made.n_slices
    assert state_of(called) == before


@pytest.mark.parametrize("pooling", ["mean", "none"])
@pytest.mark.parametrize("store", ["float32", "bfloat16"])
def test_honest_run_of_each_kind(make_run, proteins, pooling, store):
    folder = make_run(proteins, command="extract", pooling=pooling, store=store)
    made = recompute(folder, 2)
    assert made.faults == [] and made.n_same_bits == made.n_shards == made.n_slices == 2


def test_honest_run_with_added_and_packed_input(make_run, proteins, tmp_path):
    more = tmp_path / "more.faa.gz"
    more.write_bytes(gzip.compress(proteins.read_bytes().replace(b">p", b">q")))
    folder = make_run(proteins, command="extract")
    make_run(proteins, more, command="extract", resume=True, add=True)
    assert recompute(folder).faults == []


def test_honest_run_with_later_regions(tmp_path):
    rng = np.random.default_rng(8)
    source = write_fasta(tmp_path / "in.fa", {"host": host_dna(30_000, rng)})
    run_scorer(source, output_dir=tmp_path / "run", regions=False)
    find_regions(RegionsOptions(folder=tmp_path / "run"), lambda _: None)
    assert (tmp_path / "run/regions.tsv").exists()
    made = recompute(tmp_path / "run")
    assert made.faults == [] and made.n_blocks == made.n_slices == 1


def test_slices_of_an_unfinished_run_are_skipped(make_run, proteins):
    folder = make_run(proteins, command="extract", plan_only=True)
    made = recompute(folder, 2)
    assert (made.faults, made.n_shards, made.n_slices, made.n_skipped) == ([], 0, 0, 2)
    assert "2 slices without tables" in made.line


# Choice


def test_seed_decides_what_is_recomputed(extracted):
    one, again, other = (recompute(extracted, 1, seed) for seed in (5, 5, 6))
    assert one == again
    assert (one.n_shards, one.n_slices) == (other.n_shards, other.n_slices) == (1, 1)
    path = extracted / "features/000000.h5"
    shift_vectors(extracted, path, 1.0)
    found = {seed for seed in range(12) if recompute(extracted, 1, seed).faults}
    assert 0 < len(found) < 12


# Files that do not follow from the input, with correct checksums


def shift_vectors(folder: Path, path: Path, by: float) -> None:
    label = read_label(path, {})
    stored = read_embeddings(path, label.attributes)
    other = replace(stored, vectors=stored.vectors * np.float32(1 + by))
    write_embeddings(path, other, label.attributes, SafeDir(folder))
    record_hash(folder, path)


@pytest.mark.parametrize(
    ("by", "is_explained"), [(5e-7, True), (1e-6, True), (1e-4, False), (1.0, False)]
)
def test_vectors_may_differ_by_roundings_only(extracted, by, is_explained):
    path = extracted / "features/000001.h5"
    shift_vectors(extracted, path, by)
    made = recompute(extracted)
    assert made.n_same_bits == made.n_shards - 1
    assert made.largest_distance == pytest.approx(by, rel=0.2)
    has_fault = any(f"{path} has other vectors than the input" in fault for fault in made.faults)
    assert has_fault != is_explained


def test_other_vectors_pass_verify_and_are_found(extracted):
    path = extracted / "features/000000.h5"
    shift_vectors(extracted, path, 0.5)
    assert verified(extracted)
    code, shown = invoke("status", extracted, "--verify", "--recompute", 100, "--seed", 1)
    assert code == 1 and f"differs   {path} has other vectors than the input" in shown


def test_other_vectors_in_any_output_are_found(make_run, proteins):
    extra = (
        vector_output("mean", 1, TINY.dim, "float32"),
        vector_output("std", 2, TINY.dim, "float32"),
        vector_output("none", 2, TINY.dim, "float32"),
    )
    folder = make_run(proteins, command="extract", extra=extra)
    assert recompute(folder).faults == []
    path = folder / "features/000000.h5"
    content = path.read_bytes()
    label = read_label(path, {})
    stored = read_embeddings(path, label.attributes, extra=extra)
    for spec in extra:
        others = tuple(
            replace(array, values=array.values * np.float32(1.5)) if array.spec == spec else array
            for array in stored.extra
        )
        write_embeddings(path, replace(stored, extra=others), label.attributes, SafeDir(folder))
        record_hash(folder, path)
        faults = [fault for fault in recompute(folder).faults if "_copies" not in fault]
        assert len(faults) == 1
        assert f"{path} has other vectors than the input gives in {spec.name}:" in faults[0]
        path.write_bytes(content)


def test_copies_with_other_vectors_are_found(extracted):
    path = sorted((extracted / "features").glob("*_copies.h5"))[0]
    shift_vectors(extracted, path, 1e-6)
    assert verified(extracted)
    (fault,) = recompute(extracted).faults
    assert f"{path} has other vectors than the originals" in fault


def test_vectors_of_other_proteins_are_found(extracted):
    """The file of another shard, with the label of this one."""
    one, two = (extracted / f"features/00000{i}.h5" for i in (0, 1))
    label = read_label(one, {})
    other = read_label(two, {})
    write_embeddings(
        one, read_embeddings(two, other.attributes), label.attributes, SafeDir(extracted)
    )
    record_hash(extracted, one)
    assert verified(extracted)
    assert any("000000.h5 has other ids" in fault for fault in recompute(extracted).faults)


def test_other_scores_are_found(copied):
    path = sorted((copied / "scores").iterdir())[1]
    label, content = read_checksummed(path, {})
    arrays = dict(load(zstd.decompress(content)))
    arrays["log_odds"] = arrays["log_odds"] + 1e-9
    write_checksummed(SafeDir(copied), path, zstd.compress(save(arrays)), label.attributes)
    record_hash(copied, path)
    assert verified(copied)
    assert recompute(copied).faults == [f"{path} has other scores than the input"]


TABLES = {
    "predictions.tsv": (b"\tother\t", b"\tvirus\t"),
    "prediction_results.txt": (b"\tothers\t", b"\tvirus\t"),
    "prediction_results_highestscore.csv": (b"\tFalse\n", b"\tTrue\n"),
    "viral.fasta": (b"AC", b"GT"),
    "regions.bed": (b"provirus", b"PROVIRUS"),
    "samples/a/predictions.tsv": (b"\tother\t", b"\tvirus\t"),
}


@pytest.mark.parametrize("name", TABLES)
def test_changed_table_is_found(copied, name):
    path = copied / name
    before, now = TABLES[name]
    assert before in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(before, now, 1))
    record_hash(copied, path)
    assert verified(copied)
    assert recompute(copied).faults == [f"{path} has other rows than the input gives"]


def test_changed_packed_table_is_found(copied):
    path = copied / "tracks.tsv.gz"
    text = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(text.replace(b"host\t1\t", b"host\t2\t", 1)))
    record_hash(copied, path)
    assert recompute(copied).faults == [f"{path} has other rows than the input gives"]


def test_inserted_row_is_found(copied):
    """A record that the input does not have."""
    path = copied / "predictions.tsv"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], lines[5].replace(b"a4", b"z4"), *lines[5:]]))
    record_hash(copied, path)
    assert recompute(copied).faults == [f"{path} has other rows than the input gives"]


# Errors


def test_nothing_is_recomputed_without_the_input(extracted, proteins):
    text = proteins.read_text()
    proteins.write_text(text + ">more\nMKV\n")
    with pytest.raises(InputError, match="has changed") as caught:
        recompute(extracted)
    assert "put the input of the run back" in caught.value.hint
    proteins.unlink()
    with pytest.raises(InputMissingError, match="is gone"):
        recompute(extracted)
    code, shown = invoke("status", extracted, "--verify", "--recompute", 1)
    assert code == 66 and f"{proteins} is gone" in shown
    proteins.write_text(text)
    assert recompute(extracted).faults == []


def test_options_need_each_other(extracted):
    for words in (("--recompute", 1), ("--verify", "--seed", 1)):
        code, shown = invoke("status", extracted, *words)
        assert code == 64 and "no effect without" in shown
    assert invoke("status", extracted, "--verify", "--recompute", 0)[0] == 64


def test_figures_are_printed_as_json(called):
    words = ("--verify", "--recompute", 1, "--seed", 3, "--json")
    code, shown = invoke("status", called, *words)
    figures = json.loads(shown)
    assert code == 0 and figures["damaged"] == []
    made = figures["recomputed"]
    assert (made["seed"], made["n_blocks"], made["n_slices"]) == (3, 1, 1)


# Tolerance


def test_tolerance_grows_with_roundings():
    facts = {"model": "m", "sha256": "", "pooling": "mean", "dim": 1280}

    def limit(precision: str, layer: int, store: str = "float32") -> float:
        spec = EncoderSpec(**facts, precision=precision, layer=layer, store=store)
        return largest_distance_explained(spec)

    assert limit("fp32", 33) == pytest.approx(2 * 0.42 * 2**-24 * np.sqrt(4 * 1280 * 16 * 33))
    assert limit("bf16", 33) == pytest.approx(2 * 0.42 * 2**-8 * np.sqrt(16 * 33))
    assert limit("fp32", 6) < limit("fp32", 33) < limit("fp16", 33) < limit("bf16", 33)
    assert limit("bf16", 33, "bfloat16") == limit("bf16", 33) + 2**-8
