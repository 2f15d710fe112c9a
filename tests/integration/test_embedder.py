"""``virnucpro.Embedder`` keeps a model loaded, and gives the bytes of ``extract``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import virnucpro
from virnucpro.core.errors import InputError, UsageError

pytestmark = pytest.mark.usefixtures("quick_starts_in_module")

MODEL = "virnucpro-tiny"


@pytest.fixture(scope="module")
def sequences() -> list[str]:
    """More residues than fit the first shard, and repeated proteins."""
    rng = np.random.default_rng(9)
    letters = list("ACDEFGHIKLMNPQRSTVWY")
    unique = ["M" + "".join(rng.choice(letters, n)) for n in rng.integers(20, 400, 110)]
    return [*unique, unique[3], unique[0]]


@pytest.fixture(scope="module")
def expected(sequences, tmp_path_factory) -> dict[str, Any]:
    """The vectors of ``extract`` by pooling, in input order."""
    found = {}
    for pooling in ("mean", "none"):
        folder = tmp_path_factory.mktemp("runs") / "run"
        options = {"model": MODEL, "device": "cpu", "workers": 1, "report": False}
        virnucpro.extract(sequences, output_dir=folder, pooling=pooling, **options)
        found[pooling] = list(virnucpro.open(folder))
    return found


def is_same(found: Any, expected: list[np.ndarray]) -> bool:
    return len(found) == len(expected) and all(
        row.tobytes() == vector.tobytes() for row, vector in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_bytes_are_those_of_extract(sequences, expected, pooling):
    with virnucpro.Embedder(MODEL, devices="cpu", pooling=pooling) as embedder:
        found = embedder.embed(sequences)
        again = embedder.embed(sequences)
    assert is_same(found, expected[pooling]) and is_same(again, expected[pooling])


def test_processes_make_the_same_bytes(sequences, expected):
    with virnucpro.Embedder(MODEL, devices="cpu", workers=2) as embedder:
        assert len(embedder.devices) == 2
        found = embedder.embed(sequences)
    assert is_same(found, expected["mean"])


def test_call_adds_a_column(sequences, expected):
    with virnucpro.Embedder(MODEL, devices="cpu", sequence_column="protein") as embedder:
        batch = embedder({"protein": np.array(sequences, dtype=object), "n": np.arange(112)})
    assert list(batch) == ["protein", "n", "embedding"]
    assert is_same(batch["embedding"], expected["mean"])


def test_faulty_input_names_its_position():
    with virnucpro.Embedder(MODEL, devices="cpu") as embedder:
        assert embedder.embed([]).shape == (0, embedder.dim)
        assert np.array_equal(embedder.embed(["mkvl*"]), embedder.embed(["MKVL"]))
        for text, status in (("MK9", "invalid"), ("", "invalid")):
            with pytest.raises(InputError, match=f"sequence 1 is {status}"):
                embedder.embed(["MKVL", text])
        with pytest.raises(InputError, match="sequence 0 is int"):
            embedder.embed([3])
        with pytest.raises(UsageError, match="list of sequences"):
            embedder.embed("MKVL")
        with pytest.raises(UsageError, match="no column sequence"):
            embedder({"protein": ["MKVL"]})
    with pytest.raises(UsageError, match="closed"):
        embedder.embed(["MKVL"])


def test_threads_of_the_process_are_kept():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with virnucpro.Embedder(MODEL, devices="cpu") as embedder:
            embedder.embed(["MKVL"])
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # of its own code
def test_ray_actors_make_the_same_bytes(sequences, expected):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("ray.data", reason="ray[data] is not installed")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    try:
        rows = [{"n": n, "sequence": text} for n, text in enumerate(sequences)]
        dataset = ray.data.from_items(rows, override_num_blocks=2).map_batches(
            virnucpro.Embedder,
            fn_constructor_args=[MODEL],
            fn_constructor_kwargs={"devices": "cpu"},
            batch_size=28,
            compute=ray.data.ActorPoolStrategy(size=2),
        )
        found = sorted(dataset.take_all(), key=lambda row: row["n"])
    finally:
        ray.shutdown()
    assert is_same([row["embedding"] for row in found], expected["mean"])
