"""A command ends with a documented exit code, whatever damage its input files have.

Each test damages a valid file and passes it to the command line, in this process. An exception
other than our own fails the test, and so does an undocumented exit code.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from conftest import open_dna, random_dna
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from labelled_data_helpers import write_labelled
from region_helpers import host_dna
from run_helpers import execute, predict_here, write_fasta, write_run_json

from virnucpro.cli.main import main
from virnucpro.core.atomic_io import MAX_JSON_BYTES
from virnucpro.core.json_checksum import add_checksum
from virnucpro.core.recipe import Recipe
from virnucpro.engine.local import InlineExecutor
from virnucpro.models.trained_encoder import _TrainedEncoderInfo, save_trained_encoder
from virnucpro.store.feature_file import _SEAL
from virnucpro.viral.hmm import OWN_REGION_MODEL
from virnucpro.workflows.predict_options import PredictOptions

EXITS = {0, 1, 2, 64, 65, 66, 69, 73, 74}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DEEP = "[" * 5_000 + "]" * 5_000
SNIPPETS = [
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\t", b"\n", b"\r"),
    *(b'"', b">", b"|", b"{"),
    *(b"NaN", b"-Infinity", b"1e999", b"-1", b"9" * 20, b"9" * 5_000, b"x" * 100_000),
    *(DEEP.encode(), b"../", b"\x1f\x8b", b"", b"\xe2\x80\xae"),
]
NUMBERS = [b"", b"-1", b"0", b"1e999", b"nan", b"9" * 20, b"9" * 5_000, b"1_0", b"\xd9\xa1", b"+3"]
VALUES: list[object] = [
    *(None, True, "", "text", "a\0b", "\ud800", "/", [], {}, [1], {"a": 1}, [[[]]]),
    *(-1, 0, 1.5, 10**18, 10**300, float("nan"), float("inf"), -float("inf"), "DEEP", "HUGE"),
]


def fuzzed(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with the damages of some seeds."""
    few = settings(
        max_examples=max(4, settings.default.max_examples // 12),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    return given(damage=st.integers(0, 2**32).map(Damage))(few(test))


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch):
    """Restore the signals and the environment variable that a command sets."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def end_of(*words: object, code: int | None = None) -> str:
    """Run a command and return its output. Check its exit code, or that it is documented."""
    shown = io.StringIO()
    argv = sys.argv
    sys.argv = ["virnucpro", *map(str, words)]
    try:
        with redirect_stdout(shown), redirect_stderr(shown), pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = argv
    text = shown.getvalue()
    assert (ended.value.code or 0) in (EXITS if code is None else {code}), text
    assert "Traceback" not in text
    assert all(line.isprintable() for line in re.split(r"[\n\t]", text)), ascii(text)
    return text


# Damage from a seed


class Damage:
    """Changes of content. The seed identifies them, so that a failure has a short name."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)

    def __repr__(self) -> str:
        return f"Damage({self.seed})"

    def is_next(self) -> bool:
        return self.rng.random() < 0.5

    def choose(self, choices: Iterable[Any]) -> Any:
        return self.rng.choice(list(choices))

    def mutate_bytes(self, content: bytes) -> bytes:
        """Change or drop bytes, change numbers, or cut off the end."""
        for _ in range(self.rng.randint(1, 3)):
            start = self.rng.randint(0, len(content))
            match self.choose(["put", "put", "flip", "number", "cut", "double"]):
                case "put":
                    end = start + self.rng.randint(0, 30)
                    content = content[:start] + self.choose(SNIPPETS) + content[end:]
                case "flip":
                    flipped = bytes(
                        byte ^ 1 << self.rng.randrange(8) for byte in content[start:][:1]
                    )
                    content = content[:start] + flipped + content[start + 1 :]
                case "number":
                    spans = [match.span() for match in re.finditer(rb"\d+(\.\d+)?", content)]
                    first, end = self.choose(spans or [(0, 0)])
                    content = content[:first] + self.choose(NUMBERS) + content[end:]
                case "cut":
                    content = content[:start]
                case "double":
                    content = content[:start] + content[max(0, start - 200) :]
        return content

    def mutate_values(self, text: str) -> str:
        """Change JSON so that a value or two have another type or another name."""
        whole = {"": json.loads(text)}
        for _ in range(self.rng.randint(1, 2)):
            holder, key = self.choose(places_in(whole))
            value = holder[key]
            if isinstance(value, str) and value.startswith("{") and self.rng.random() < 0.8:
                holder[key] = self.mutate_values(value)
            elif isinstance(holder, dict) and holder is not whole and self.rng.random() < 0.2:
                holder[f"{key}_2"] = holder.pop(key)
            else:
                holder[key] = self.choose(VALUES)
        dumped = json.dumps(whole[""])
        return dumped.replace('"DEEP"', DEEP).replace('"HUGE"', "9" * 5_000)

    def mutate_json(self, content: bytes) -> bytes:
        if self.rng.random() < 0.3:
            return self.mutate_bytes(content)
        return self.mutate_values(content.decode()).encode()

    def mutate_tensors(self, content: bytes) -> bytes:
        """Change the header or any bytes of a safetensors file."""
        if self.rng.random() < 0.2:
            return self.mutate_bytes(content)
        end = 8 + int.from_bytes(content[:8], "little")
        header = self.mutate_values(content[8:end].decode()).encode()
        return len(header).to_bytes(8, "little") + header + content[end:]


def places_in(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each value inside, as its container and key."""
    for key in list(content if isinstance(content, dict) else range(len(content))):
        yield content, key
        if isinstance(content[key], (dict, list)):
            yield from places_in(content[key])


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# Valid files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def fasta(folder: Path) -> Path:
    rng = np.random.default_rng(5)
    records = {"a": open_dna(400, rng), "b": random_dna(700, rng), "c": "N" * 200, "d": "AC"}
    return write_fasta(folder / "in.fa", {f"{name} of a test": records[name] for name in records})


@pytest.fixture(scope="module")
def genome(folder: Path) -> Path:
    rng = np.random.default_rng(6)
    records = {"chromosome": host_dna(12_000, rng), "contig": random_dna(300, rng)}
    return write_fasta(folder / "genome.fa", records)


@pytest.fixture(scope="module")
def run(genome: Path, folder: Path) -> dict[str, bytes]:
    """The files of a run with regions, by name. It is in ``folder / "run"``."""
    options = PredictOptions(input=(genome,), output_dir=folder / "run", report=False)
    execute(options, lambda _: None, lambda _: InlineExecutor())
    return files_of(folder / "run")


@pytest.fixture(scope="module")
def embedded(tiny, folder: Path) -> dict[str, bytes]:
    """The files of a run with vectors. It is in ``folder / "embedded"``."""
    proteins = write_fasta(folder / "in.faa", {"p": "MKVLEFPQILAAGG", "q": "MKVLPPQIL"})
    predict_here([proteins], tiny, folder / "embedded")
    return files_of(folder / "embedded")


def files_of(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


def put_back(run: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(run)
    for name, content in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)


def put_back_with(run: Path, files: dict[str, bytes], **facts: object) -> None:
    """Restore the files, except for these values of ``run.json``."""
    put_back(run, files)
    write_run_json(run, {**json.loads(files["run.json"]), **facts})


# Input


@fuzzed
def test_any_fasta_ends_as_promised(damage, fasta, folder):
    content = damage.mutate_bytes(fasta.read_bytes())
    if damage.is_next():
        content = damage.mutate_bytes(gzip.compress(content, mtime=0))
    path = written(folder / "damaged.fa", content)
    end_of("predict", "-i", path, "-o", folder / "new", "--force", "--no-report", "-q")


@fuzzed
def test_any_sample_sheet_ends_as_promised(damage, fasta, folder):
    name, separator = damage.choose([("sheet.tsv", "\t"), ("sheet.csv", ",")])
    rows = (("sample", "path", "note"), ("one", fasta.name, ""), ("two", str(fasta), "x"))
    sheet = "".join(separator.join(row) + "\n" for row in rows).encode()
    path = written(folder / name, damage.mutate_bytes(sheet))
    end_of("predict", "-i", path, "-o", folder / "new", "--force", "--no-report", "-q")


# Run folders


def commands_on(run: Path, genome: Path) -> list[tuple[object, ...]]:
    return [
        ("status", run),
        ("status", run, "--json"),
        ("status", run, "--verify"),
        ("report", run),
        ("regions", run, "-q"),
        ("compare", run, run),
        ("predict", "-i", genome, "-o", run, "--resume", "--no-report", "-q"),
    ]


@fuzzed
def test_any_manifest_of_a_run_ends_as_promised(damage, run, genome, folder):
    put_back(folder / "run", run)
    content = damage.mutate_json(run["run.json"])
    if damage.is_next():
        content = with_right_checksum(content)
    written(folder / "run" / "run.json", content)
    end_of(*damage.choose(commands_on(folder / "run", genome)))


def with_right_checksum(content: bytes) -> bytes:
    """Add the checksum that this program would have written."""
    with suppress(ValueError, RecursionError):
        facts = json.loads(content)
        return add_checksum(facts).encode() if isinstance(facts, dict) else content
    return content


@fuzzed
def test_any_table_of_a_run_ends_as_promised(damage, run, genome, folder):
    put_back(folder / "run", run)
    names = ["predictions.tsv", "regions.tsv", "tracks.tsv.gz", "machine.json", "virnucpro.log"]
    name = damage.choose([name for name in names if name in run])
    content = run[name]
    if name.endswith(".gz") and damage.is_next():
        content = gzip.compress(damage.mutate_bytes(gzip.decompress(content)), mtime=0)
    else:
        content = damage.mutate_bytes(content)
    written(folder / "run" / name, content)
    end_of(*damage.choose(commands_on(folder / "run", genome)))


@fuzzed
def test_any_feature_file_and_plan_end_as_promised(damage, embedded, folder):
    put_back(folder / "embedded", embedded)
    name = damage.choose([n for n in embedded if re.search(r"features/|plan\.json", n)])
    content = embedded[name]
    if name.endswith(".h5") and damage.is_next():
        content = with_other_label(content, damage)
    else:
        content = damage.mutate_bytes(content)
    written(folder / "embedded" / name, content)
    run = folder / "embedded"
    end_of(*damage.choose([("status", run, "--verify"), ("report", run)]))


def with_other_label(content: bytes, damage: Damage) -> bytes:
    """Change the label of a feature file, with a correct hash."""
    _, n_bytes = _SEAL.unpack(content[-_SEAL.size :])
    start = len(content) - _SEAL.size - n_bytes
    label = damage.mutate_values(content[start : start + n_bytes].decode()).encode()
    seal = _SEAL.pack(hashlib.sha256(label).digest(), len(label))
    return content[:start] + label + seal


@fuzzed
def test_any_pair_of_tables_ends_as_promised(damage, run, folder):
    name = damage.choose(["prediction_results.txt", "prediction_results_highestscore.csv"])
    a = written(folder / "a.txt", run[name])
    b = written(folder / "b.txt", damage.mutate_bytes(run[name]))
    end_of("compare", a, b)


# Models


@fuzzed
def test_any_model_folder_ends_as_promised(damage, tiny, folder):
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(tiny.model, model)
    if damage.is_next():
        file = model / "config.json"
        file.write_bytes(damage.mutate_json(file.read_bytes()))
    else:
        file = model / "model.safetensors"
        file.write_bytes(damage.mutate_tensors(file.read_bytes()))
    end_of("models", "info", model)


@fuzzed
def test_any_learned_encoder_ends_as_promised(damage, folder):
    path = folder / "encoder.safetensors"
    if not (folder / "whole.safetensors").exists():
        rng = np.random.default_rng(1)
        facts = _TrainedEncoderInfo(encoding="onehot", architecture="mlp", dim=4)
        weights = {"layer.weight": rng.standard_normal((4, 3)).astype(np.float32)}
        save_trained_encoder(folder / "whole.safetensors", facts, weights)
    content = (folder / "whole.safetensors").read_bytes()
    written(path, damage.mutate_tensors(content))
    end_of("models", "info", path)


@fuzzed
def test_any_head_ends_as_promised(damage, tiny, folder):
    head = written(folder / "head.safetensors", damage.mutate_tensors(tiny.head_file.read_bytes()))
    nothing = folder / "nothing.fa"
    model = ("--model", tiny.model, "--head", head, "--device", "cpu", "--workers", "1")
    end_of("predict", "-i", nothing, "-o", folder / "headed", "--force", "-q", *model)


@fuzzed
def test_any_region_model_ends_as_promised(damage, run, folder):
    put_back(folder / "run", run)
    content = OWN_REGION_MODEL.read_bytes()
    model = written(folder / "regions.json", damage.mutate_json(content))
    end_of("regions", folder / "run", "--region-model", model, "-q")


# Training and evaluation


@fuzzed
def test_any_file_of_options_ends_as_promised(damage, folder):
    text = "batch-size: 64\nlr: 1e-3\nclass_weights: auto\nchunk_size: [300, 500]\n"
    text += damage.choose(["", "seed: &a 1\nhidden: *a\n", "? [a]\n: 1\n", "<<: {a: 1}\n"])
    path = written(folder / "options.yaml", damage.mutate_bytes(text.encode()))
    nothing = folder / "nothing.tsv"
    end_of("train", "--config", path, "--data", nothing, "-o", folder / "trained")


@fuzzed
def test_any_manifest_and_split_end_as_promised(damage, folder):
    labelled = folder / "labelled"
    if not labelled.exists():
        labelled.mkdir()
        write_labelled(labelled, n_groups=3, per_group=1)
    manifest = (labelled / "manifest.tsv").read_bytes()
    groups = sorted({line.split("\t")[3] for line in manifest.decode().split("\n")[1:-1]})
    split = "".join(f"{group}\ttest\n" for group in groups)
    split = f"group\tsplit\n{split}".encode()
    if damage.is_next():
        manifest = damage.mutate_bytes(manifest)
    else:
        split = damage.mutate_bytes(split)
    table = written(labelled / "damaged.tsv", manifest)
    splits = written(labelled / "split.tsv", split)
    to = folder / "evaluated"
    end_of("evaluate", "--data", table, "--split", splits, "-o", to, "--force", "-q")


@fuzzed
def test_any_truth_and_genes_end_as_promised(damage, genome, folder):
    truth = (
        b"seq_id\tstart\tend\tkind\nchromosome\t100\t5000\tprophage\nchromosome\t9\t50\tunclear\n"
    )
    genes = b"##gff-version 3\nchromosome\t.\tCDS\t1\t900\t.\t+\t0\tID=a\n"
    if damage.is_next():
        truth = damage.mutate_bytes(truth)
    else:
        genes = damage.mutate_bytes(genes)
    table = written(folder / "truth.tsv", truth)
    gff = written(folder / "genes.gff", genes)
    words = ("--regions", table, "--genes", gff, "-o", folder / "worth", "--force", "-q")
    end_of("evaluate", "--data", genome, *words)


# Known faults


def test_deep_or_large_model_json_is_refused(tiny, folder):
    model = folder / "deep"
    shutil.copytree(tiny.model, model)
    for content in (DEEP, f"[{70 * '['}{70 * ']'}]", "{"):
        (model / "config.json").write_text(content)
        assert "cannot be read" in end_of("models", "info", model, code=69)
    with (model / "config.json").open("r+b") as config:
        config.truncate(MAX_JSON_BYTES + 1)  # a hole, which takes no space
    assert "more than 268,435,456 bytes" in end_of("models", "info", model, code=69)


@pytest.mark.parametrize("number", ["-1" + "0" * 300, "-1" + "0" * 5_000, "-1e300", "NaN"])
def test_region_model_with_bad_number_is_refused(run, folder, number):
    put_back(folder / "run", run)
    text = OWN_REGION_MODEL.read_text().replace("-4.0", number, 1)
    model = written(folder / "r.json", text.encode())
    shown = end_of("regions", folder / "run", "--region-model", model, "-q", code=69)
    assert "is not a region model" in shown


@pytest.mark.parametrize("text", [5_000 * "[", "lr: " + "9" * 5_000, "seed: 2026-99-99"])
def test_invalid_yaml_options_are_refused(folder, text):
    path = written(folder / "options.yaml", text.encode())
    shown = end_of("train", "--config", path, "--data", "x", "-o", folder / "trained", code=64)
    assert "options.yaml" in shown


@pytest.mark.parametrize("name", ["cut", "counts"])
def test_run_json_with_text_for_numbers_is_damaged(run, genome, folder, name):
    put_back_with(folder / "run", run, **{name: "text"})
    for words in commands_on(folder / "run", genome):
        code = None if words[0] in ("report", "compare") else 73
        end_of(*words, code=code)


def test_run_json_with_impossible_input_is_damaged(run, folder):
    for name in ("a\0b", "\ud800"):
        (first, *_) = json.loads(run["run.json"])["inputs"]
        put_back_with(folder / "run", run, inputs=[first | {"path": name}])
        assert "run.json is damaged" in end_of("regions", folder / "run", code=73)


def test_recipe_difference_is_printable(run, genome, folder):
    recipe = json.loads(run["run.json"])["recipe"] | {"residues_per_shard": "a\0\x1b[31mb"}
    fingerprint = Recipe(**recipe | {"encoders": ()}).fingerprint
    put_back_with(folder / "run", run, recipe=recipe, fingerprint=fingerprint)
    words = ("predict", "-i", genome, "-o", folder / "run", "--resume", "-q")
    assert r"residues_per_shard was a\x00\x1b[31mb" in end_of(*words, code=73)


def test_path_with_a_nul_byte_is_a_usage_error(fasta, folder):
    for words in (("-i", fasta, "-o", f"{folder}/a\0b"), ("-i", f"{fasta}\0", "-o", folder / "o")):
        assert "has a NUL byte" in end_of("predict", *words, code=64)


def test_positions_of_thousands_of_digits_are_refused(genome, folder):
    many = "9" * 5_000
    truth = written(
        folder / "t.tsv", f"seq_id\tstart\tend\tkind\nx\t1\t{many}\tprophage\n".encode()
    )
    words = ("evaluate", "--data", genome, "-o", folder / "worth", "--force", "--regions")
    assert "t.tsv:2: no interval" in end_of(*words, truth, code=65)
    truth.write_text("seq_id\tstart\tend\tkind\nchromosome\t100\t5000\tprophage\n")
    genes = written(folder / "g.gff", f"x\t.\tCDS\t1\t{many}\t.\t+\t0\tID=a\n".encode())
    assert "g.gff:1 is not a line of GFF3" in end_of(*words, truth, "--genes", genes, code=65)
