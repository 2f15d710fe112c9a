"""Shared fixtures: a tiny ESM-2 with random weights, its head, and runs with them."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from forkserver_runner import Forked
from hypothesis import HealthCheck, settings
from run_helpers import our_processes, run_inline

from virnucpro.core import child_process as processes
from virnucpro.core.events import EventHandler
from virnucpro.core.recipe import EncoderSpec, Recipe
from virnucpro.engine.base import Executor, Resources
from virnucpro.models.checkpoint import hash_weights
from virnucpro.models.esm2.config import ESM2Shape
from virnucpro.models.esm2.loading import save_esm2
from virnucpro.models.esm2.model import ESM2
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.models.lookup import imported_folder
from virnucpro.models.names import DEFAULT_MODEL
from virnucpro.models.packing import use_device
from virnucpro.models.registry import FAMILIES, Published, RemoteFile
from virnucpro.sequences.kmers import N_FEATURES
from virnucpro.viral.classifier import RecordClassifier
from virnucpro.viral.head import EncoderInfo, Head, HeadInfo, Layer, Network
from virnucpro.workflows.extract_config import ExtractConfig
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.predict_config import PredictConfig
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.run_config import RunConfig

# the same examples every time; many more, and others, with --hypothesis-profile=long
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", untimed, max_examples=50, derandomize=True)
settings.register_profile("long", untimed, max_examples=5_000)
settings.load_profile("gate")

use_device(torch.device("cpu"))  # called before a test computes

TINY = ESM2Shape(n_layers=2, dim=32, n_heads=2)


@dataclass(frozen=True)
class Tiny:
    """A model that is small enough for tests, and a head for it. Weights are random."""

    model: Path
    head_file: Path

    @property
    def head(self) -> Head:
        return Head.load(self.head_file)


def make_tiny(folder: Path, shape: ESM2Shape = TINY, seed: int = 0) -> Tiny:
    """Write ``esm2_tiny/`` and ``head.safetensors``. Every weight affects the result."""
    model = random_esm2(shape, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_esm2(folder / "esm2_tiny", model)
    rng = np.random.default_rng(seed)
    facts = HeadInfo(
        encoders=(
            EncoderInfo(
                family="esm2",
                name="esm2_tiny",
                encoder_id=inspect_esm2(folder / "esm2_tiny").encoder_id,
                layer=shape.n_layers,
                pooling="mean",
                dim=shape.dim,
            ),
        ),
        chunk_size=500,
        threshold=0.5,
        frame_rule="max",
        exponent=0.5,
        training="not trained: random weights",
    )
    protein = Network(random_layers(rng, shape.dim, 16, 2), temperature=1.5)
    nucleotide = Network(random_layers(rng, shape.dim + N_FEATURES, 16, 2), temperature=0.75)
    Head(facts, protein, nucleotide).save(folder / "head.safetensors")
    return Tiny(folder / "esm2_tiny", folder / "head.safetensors")


def random_esm2(shape: ESM2Shape, seed: int) -> ESM2:
    """Make random weights.

    Linear layers keep the length of a vector. Norms are not 1 and biases not 0.
    """
    model = ESM2(shape, shape.n_layers, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name == "embedding.weight":
                parameter.copy_(noise)
            elif parameter.ndim == 2:
                parameter.copy_(parameter.shape[1] ** -0.5 * noise)
            else:
                parameter.copy_(0.1 * noise + name.endswith("norm.weight"))
    return model.eval().requires_grad_(False)


def random_layers(rng: np.random.Generator, *sizes: int) -> tuple[Layer, ...]:
    """Make fully connected layers of these widths. Scores lie on both sides of 0.5."""
    return tuple(
        (
            (4 * n_in**-0.5 * rng.standard_normal((n_out, n_in))).astype(np.float32),
            np.zeros(n_out, dtype=np.float32),
        )
        for n_in, n_out in pairwise(sizes)
    )


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a folder once for all test processes. The first one makes it and the others wait."""
    ours = tmp_path_factory.getbasetemp()
    common = ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours

    def once(name: str, make: Callable[[Path], None]) -> Path:
        with (common / f"{name}.made").open("a+") as made:
            fcntl.flock(made, fcntl.LOCK_EX)
            made.seek(0)
            folder = made.read()
            if not folder:
                folder = tempfile.mkdtemp(prefix=name, dir=common)
                make(Path(folder))
                made.write(folder)
        return Path(folder)

    return once


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def installed_default(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the tiny model the default, and install it as `models import` does."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    file = RemoteFile(url=f"http://127.0.0.1:1/{DEFAULT_MODEL}.pt", sha256="0" * 64)
    published = Published(
        n_layers=TINY.n_layers,
        dim=TINY.dim,
        n_heads=TINY.n_heads,
        files=(file,),
        folder_sha256=hash_weights(tiny.model),
    )
    monkeypatch.setitem(FAMILIES["esm2"].published, DEFAULT_MODEL, published)
    return Path(shutil.copytree(tiny.model, imported_folder() / DEFAULT_MODEL))


@pytest.fixture
def quick_starts(monkeypatch):
    """Fork workers from a process that has imported their modules."""
    monkeypatch.setattr(processes, "start_interpreter", Forked)


@pytest.fixture(scope="module")
def quick_starts_in_module() -> Iterator[None]:
    """As ``quick_starts``, in all tests of a module and in its fixtures of this scope."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_interpreter", Forked)
        yield


@pytest.fixture(scope="session")
def configure(tiny: Tiny) -> Callable[..., RunConfig]:
    """Configure a run in fp32 with small shards. Keywords change its options or its config."""

    def make(*inputs: Path, output: Path, **changes: object) -> RunConfig:
        recipe = {
            "command": "predict",
            "input_type": "nucleotide",
            "chunk_size": 300,
            "min_length": 0,
            "head_sha256": "",
            "scorer_sha256": "",
            "known_sha256": "",
            "residues_per_shard": 2000,
            "bytes_per_slice": 2**23,
            "keep_vectors": True,
        }
        encoder = {
            "family": "esm2",
            "reads": "protein",
            "model": "tiny",
            "sha256": hash_weights(tiny.model),
            "layer": TINY.n_layers,
            "pooling": "mean",
            "precision": "fp32",
            "dim": TINY.dim,
            "store": "float32",
            "extra": (),
        }
        resources = {
            "devices": ("cpu",),
            "tokens_per_batch": 2048,
            "silence_seconds": 60.0,
            "n_helpers": 0,
        }
        weights: dict[str, object] = {"checkpoints": (tiny.model,), "weights": (tiny.model,)}
        options: dict[str, object] = {"input": inputs, "output_dir": output}
        parts = (recipe, encoder, resources, weights)
        for name, value in changes.items():
            next((part for part in parts if name in part), options)[name] = value
        shared = {
            "recipe": Recipe(encoders=(EncoderSpec(**encoder),), **recipe),
            "resources": Resources(**resources),
            **weights,
        }
        if recipe["command"] == "extract":
            return ExtractConfig(options=ExtractOptions(**options), **shared)
        # the classifier is replaced when it runs: see ``run_inline``
        return PredictConfig(
            options=PredictOptions(**options), classifier=RecordClassifier(), **shared
        )

    return make


@pytest.fixture
def make_config(configure: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., RunConfig]:
    return partial(configure, output=tmp_path / "run")


@pytest.fixture
def predicted(make_config: Callable[..., RunConfig], tiny: Tiny) -> Callable[..., Path]:
    """Run in this process with the tiny head, and check the outcome. -> the run folder"""

    def predict(
        *inputs: Path,
        exit_code: int = 0,
        on_event: EventHandler = lambda _: None,
        executor: Executor | None = None,
        **changes: object,
    ) -> Path:
        config = make_config(*inputs, **changes)
        assert run_inline(config, tiny.head, on_event, executor).exit_code == exit_code
        return config.output

    return predict


def random_dna(n: int, rng: np.random.Generator) -> str:
    return "".join(rng.choice(list("ACGT"), n))


def open_dna(n: int, rng: np.random.Generator) -> str:
    """Return random bases without a stop codon in the first frame."""
    codons = [a + b + c for a in "ACG" for b in "ACGT" for c in "ACGT"]
    return "".join(rng.choice(codons, n // 3 + 1))[:n]


@pytest.fixture
def contigs(tmp_path: Path) -> Path:
    return write_contigs(tmp_path / "contigs.fa")


@pytest.fixture(scope="session")
def undisturbed(configure, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the contigs on one device. No test changes it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_inline(configure(write_contigs(folder / "contigs.fa"), output=folder / "run"), tiny.head)
    return folder / "run"


def write_contigs(path: Path) -> Path:
    """Write 40 records: open, random, without a frame, empty, and one that is not DNA."""
    rng = np.random.default_rng(7)
    records = [
        (f"contig{i}", open_dna(200 + 60 * i, rng) if i % 3 else random_dna(700, rng))
        for i in range(37)
    ]
    records.insert(5, ("closed", "TAAATAAATAACTTAATTAGTTAGCTAGCTAACTAGTCATCACTATTA" * 4))
    records.insert(9, ("empty", ""))
    records.insert(20, ("protein", "MKVLEFPQIL"))
    path.write_text("".join(f">{name} of a test\n{bases}\n" for name, bases in records))
    return path


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread, because small matrices are slower on many, most of all on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert not our_processes()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the global random generators before each test, whatever the order of tests."""
    seed = item.config.getoption("--global-seed")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--global-seed", type=int, default=0, help="of the global generators (0)")
    parser.addoption("--index", action="store_true", help="ask the package index for every pin")
    parser.addoption("--rounds", type=int, default=1, help="of random harm (default 1)")
    parser.addoption("--chaos-seed", type=int, default=1, help="of the first round")
    parser.addoption("--records", type=int, default=300_000, help="that are planned (300,000)")
    parser.addoption("--shards", type=int, default=1_100, help="that are resumed (1,100)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chaos_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("--chaos-seed")
        rounds = metafunc.config.getoption("--rounds")
        metafunc.parametrize("chaos_seed", range(first, first + rounds))
