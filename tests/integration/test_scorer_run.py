"""Runs without a language model: every record of 150 bases or more gets a score."""

from __future__ import annotations

import io
import json
import re
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from math import exp
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from conftest import open_dna, random_dna
from region_helpers import gene
from run_helpers import execute, failures, leftovers, our_processes, rows, statuses, write_run_json
from run_helpers import tables as tables_of
from safetensors.numpy import load, save
from scorer_run_helpers import NoExecutor, in_blocks, many, outputs, predict, write

from virnucpro.core.atomic_io import zstd
from virnucpro.core.errors import InputError, InputMissingError, ResumeError, UsageError
from virnucpro.core.events import Progress, RunEvent
from virnucpro.core.numeric import IntArray
from virnucpro.core.option_schema import build_options
from virnucpro.core.recipe import EncoderSpec, Recipe
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import FastaRecord, Records
from virnucpro.models import nvidia, nvidia_driver
from virnucpro.models.device_choice import Gpu
from virnucpro.models.torch_build import TorchBuild
from virnucpro.results.outputs import RunOutput, open_run_dir
from virnucpro.sequences import open_codes
from virnucpro.sequences.fasta import read_fasta
from virnucpro.store.feature_file import read_checksummed, write_checksummed
from virnucpro.viral import host_markers as landmarks
from virnucpro.viral.calling import score_records
from virnucpro.viral.networks import Scorer, false_discovery_rates_of, thresholds_of
from virnucpro.viral.probability import probability
from virnucpro.viral.scoring import score_block, score_sequences
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.score_cache import ScoreStore
from virnucpro.workflows.status import inspect_run, measure_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "contigs.fa"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A finished run of ``../in.fa``. No test changes it."""
    folder = tmp_path_factory.mktemp("whole")
    predict(write(folder / "in.fa", **many()), to=folder / "run")
    return folder / "run"


def test_planned_run_is_joined_with_no_embed(whole):
    for number, changes in enumerate(({}, {"no_embed": True})):
        joined = whole.parent / f"planned{number}"
        predict(whole.parent / "in.fa", to=joined, plan_only=True)
        unknown = {"total": None, "done": 0, "pending": None}
        assert measure_run(joined)["letters"] == unknown  # until all slices are planned
        predict(whole.parent / "in.fa", to=joined, resume=True, **changes)
        assert tables_of(joined) == tables_of(whole)


def scores(folder: Path) -> dict[str, str]:
    return {row["record"]: row["virus_score"] for row in rows(folder / "predictions.tsv")}


# Scores


def test_every_record_from_150_bases_is_scored(tmp_path):
    others = {
        "short": "ACGT" * 37,
        "unknown": "N" * 700,
        "nothing": "",
        "protein": "MKVLEFPQIL" * 20,
        "stops": "TAA" * 50,
        "poly_g": "G" * 150,
    }
    predict(write(tmp_path / "in.fa", **many(), **others), to=tmp_path / "run")
    found = {row["record"]: row for row in rows(tmp_path / "run/predictions.tsv")}
    assert {found[name]["status"] for name in (*many(), "stops", "poly_g")} == {"scored"}
    assert found["short"]["status"] == "too_short"
    assert found["short"]["note"] == "148 of at least 150"
    assert found["unknown"]["status"] == "no_orf"
    assert found["unknown"]["note"] == "no known base"
    assert (found["nothing"]["status"], found["protein"]["status"]) == ("invalid", "invalid")
    assert list(found) == [*many(), *others]


def test_scores_equal_the_scorer_by_id(whole):
    log_odds = score_sequences(many().values(), Scorer.load_builtin())
    expected = {name: f"{1 / (1 + exp(-x)):.6f}" for name, x in zip(many(), log_odds, strict=True)}
    assert scores(whole) == expected


def kingdoms_of(records: dict[str, str]) -> IntArray:
    return score_block(list(records.values()), Scorer.load_builtin())[2]


def called(folder: Path) -> set[str]:
    return {row["record"] for row in rows(folder / "predictions.tsv") if row["call"] == "virus"}


@pytest.mark.parametrize(
    ("preset", "share"), [("sensitive", 0.1), ("default", 0.03), ("conservative", 0.005)]
)
def test_preset_is_a_share_of_false_positives(tmp_path, preset, share):
    predict(write(tmp_path / "in.fa", **many()), to=tmp_path / "run", preset=preset)
    scorer = Scorer.load_builtin()
    log_odds = list(score_sequences(many().values(), scorer))
    lengths = np.array([len(bases) for bases in many().values()])
    rates = scorer.select_error_rates("nucleotide")
    kingdoms = kingdoms_of(many())
    is_virus = np.array(log_odds) >= thresholds_of(rates, kingdoms, lengths, share)
    viral = {name for name, is_one in zip(many(), is_virus, strict=True) if is_one}
    assert called(tmp_path / "run") == viral
    in_fasta = read_fasta(tmp_path / "run/viral.fasta")
    assert {record.id: record.sequence for record in in_fasta} == {n: many()[n] for n in viral}


def test_threshold_of_a_finished_run_changes(tmp_path):
    source = write(tmp_path / "in.fa", **many())
    folder = tmp_path / "run"
    predict(source, to=folder)
    before = scores(folder)
    usual = called(folder)
    middle = sorted(before.values())[len(before) // 2]
    summary = predict(source, to=folder, threshold=float(middle), resume=True)
    assert scores(folder) == before
    assert called(folder) == {name for name, score in before.items() if score >= middle}
    assert summary.cut == f"a score of {float(middle)} or more"
    assert json.loads((folder / "run.json").read_text())["cut"]["threshold"] == float(middle)
    for _ in range(2):
        predict(source, to=folder, resume=True)
        assert called(folder) == usual
    told = [
        line
        for line in (folder / "virnucpro.log").read_text().splitlines()
        if "the earlier start" in line
    ]
    assert len(told) == 2
    usual_words = "at most 3 % false positives per length (preset default)"
    assert told[0].endswith(f"used another threshold: {usual_words}")
    assert told[1].endswith(f"used another threshold: a score of {float(middle)} or more")


def test_false_discovery_rate_follows_prevalence(tmp_path):
    source = write(tmp_path / "in.fa", **many(), short="ACGT" * 20)
    scorer = Scorer.load_builtin()
    log_odds = np.array(list(score_sequences(many().values(), scorer)), dtype=np.float64)
    lengths = np.array([len(bases) for bases in many().values()])
    for prevalence in (0.05, 0.5):
        predict(source, to=tmp_path / "run", prevalence=prevalence, force=True)
        found = {row["record"]: row["fdr"] for row in rows(tmp_path / "run/predictions.tsv")}
        assert found.pop("short") == ""
        rates = scorer.select_error_rates("nucleotide")
        kingdoms = kingdoms_of(many())
        expected = false_discovery_rates_of(rates, kingdoms, log_odds, lengths, prevalence)
        assert list(found.values()) == [f"{rate:.4f}" for rate in expected]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"threshold": 1.5}, "--threshold is 1.5"),
        ({"threshold": float("nan")}, "--threshold is nan"),
        ({"prevalence": 0.0}, "--prevalence is 0.0"),
        ({"threshold": 0.5, "preset": "sensitive"}, "--preset: no effect with --threshold"),
        ({"genetic_code": 7}, "--genetic-code is 7"),
    ],
)
def test_senseless_threshold_is_refused(tmp_path, changes, reason):
    source = write(tmp_path / "in.fa", **many())
    with pytest.raises(UsageError, match=reason):
        user_options = {"input": [source], "output_dir": tmp_path / "run", **changes}
        execute(build_options(PredictOptions, user_options), lambda _: None, lambda _: NoExecutor())
    assert not (tmp_path / "run").exists()


def test_other_genetic_code_is_another_run(tmp_path):
    source = write(tmp_path / "in.fa", g=gene(900, 5, code=4), **many())
    folder = tmp_path / "run"
    predict(source, to=folder, regions=False)
    notes = {row["record"]: row["note"] for row in rows(folder / "predictions.tsv")}
    assert notes.pop("g") == "open in genetic code 4, not in 11"
    assert set(notes.values()) == {""}
    with pytest.raises(ResumeError, match="--genetic-code was 11, now 4"):
        predict(source, to=folder, genetic_code=4, regions=False, resume=True)
    predict(source, to=tmp_path / "four", genetic_code=4, regions=False)
    assert {row["note"] for row in rows(tmp_path / "four/predictions.tsv")} == {""}
    assert scores(tmp_path / "four")["g"] != scores(folder)["g"]


def test_standard_input_run_resumes_without_it(tmp_path, monkeypatch):
    more = write(tmp_path / "more.fa", b="ACGT")
    again = {"resume": True, "add": True, "preset": "sensitive"}
    for content, others, changes in (
        (b">a\nACGT\n", (), {}),
        (b"", (), again),
        (b"", (more,), again),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        summary = predict(Path("-"), *others, to=tmp_path / "run", **changes)
        table = rows(tmp_path / "run" / "predictions.tsv")
        assert (table[0]["record"], table[0]["file"]) == ("a", "standard_input")
    assert "preset sensitive" in summary.cut
    assert [row["record"] for row in table] == ["a", "b"]


def test_order_of_records_changes_no_score(tmp_path, whole):
    backwards = dict(reversed(many().items()))
    ballast = {f"ballast{i}": "ACGTTGCA" * 100_000 for i in range(3)}  # more than a block
    predict(write(tmp_path / "in.fa", **ballast, **backwards), to=tmp_path / "run")
    found = scores(tmp_path / "run")
    assert scores(whole) == {name: found[name] for name in many()}


def test_rna_scores_equal_dna_scores(tmp_path, whole, caplog):
    rna = {name: bases.replace("T", "U").lower() for name, bases in many().items()}
    predict(write(tmp_path / "rna.fa", **rna), to=tmp_path / "rna")
    assert scores(whole) == scores(tmp_path / "rna")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_original_tables_show_pieces(tmp_path):
    rng = np.random.default_rng(2)
    records = {"long": random_dna(1300, rng), "gap": random_dna(500, rng) + 500 * "N"}
    predict(write(tmp_path / "in.fa", **records, short=random_dna(460, rng)), to=tmp_path / "run")
    names = ["long_piece_1", "long_piece_2", "long_piece_3", "gap_piece_1"]
    names += ["short_piece_1", "short_piece_2"]  # of 300 bases, 140 of them in both
    frames = rows(tmp_path / "run/prediction_results.txt")
    assert [row["Sequence_ID"] for row in frames] == names
    chunks = rows(tmp_path / "run/prediction_results_highestscore.csv")
    assert [row["Modified_ID"] for row in chunks] == sorted(names)
    told = {row["record"]: row for row in rows(tmp_path / "run/predictions.tsv")}
    counts = ("n_chunks", "n_chunks_scored", "n_frames_scored")
    assert [told["long"][name] for name in counts] == ["3", "3", "0"]
    assert [told["gap"][name] for name in counts] == ["2", "1", "0"]


def test_piece_score_depends_on_its_own_bases(tmp_path):
    """Overlapping pieces of 300 bases in 950, and the same in another record."""
    bases = random_dna(950, np.random.default_rng(3))
    other = random_dna(300, np.random.default_rng(4)) + bases[217:517]
    predict(write(tmp_path / "in.fa", whole=bases, other=other), to=tmp_path / "run")
    table = rows(tmp_path / "run/prediction_results.txt")
    piece_scores = {row["Sequence_ID"]: row["score2"] for row in table}
    assert len(piece_scores) == 4 + 2
    assert (
        piece_scores["whole_piece_2"]
        == piece_scores["other_piece_2"]
        != piece_scores["whole_piece_1"]
    )


def test_long_record_takes_four_bytes_per_base(tmp_path, monkeypatch):
    """It is read, scored, searched for regions and written. Few bases are read at once here."""
    monkeypatch.setattr(landmarks, "_BASES_AT_ONCE", 99_999)
    monkeypatch.setattr(open_codes, "_ENCODED_AT_ONCE", 100_000)
    rng = np.random.default_rng(4)
    bases = "".join(rng.choice(list("ACGT"), 1_500_000, p=[0.3, 0.2, 0.2, 0.3]))
    predict(write(tmp_path / "short.fa", a=bases[:20_000]), to=tmp_path / "first")
    peaks = []
    for n_bases in (500_000, 1_500_000):
        source = write(tmp_path / f"{n_bases}.fa", a=bases[:n_bases])
        rounds = []
        for i in range(2):  # anything else in the process only adds to it
            tracemalloc.start()
            predict(source, to=tmp_path / f"{n_bases}-{i}", report=False, workers=1)
            rounds.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        peaks.append(min(rounds))
    assert peaks[1] - peaks[0] < 4 * 1_000_000


# Complete runs


def test_no_process_starts_and_no_vector_is_written(tmp_path):
    stages = []

    def hear(event: RunEvent) -> None:
        if isinstance(event, Progress):
            stages.append(event.stage)
        assert not our_processes()

    source = write(tmp_path / "in.fa", **many())
    summary = predict(source, to=tmp_path / "run", on_event=hear)
    assert "scoring" in stages
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not names & {"features", "features.h5", "chunks.fa"}
    lines = summary.lines(tmp_path / "run")
    assert [line.split()[1] for line in lines[:2]] == ["virus:", "records"] and len(lines) == 3
    assert lines[2] == f"results: {tmp_path / 'run'} (start with report.html)"
    log = (tmp_path / "run/virnucpro.log").read_text()
    for words in ("called by the scorer", "known viruses", "threshold: ", "time: ", lines[0]):
        assert log.count(words) == 1, "each message once"
    stored = json.loads((tmp_path / "run/run.json").read_text())
    assert stored["state"] == "complete"
    assert stored["recipe"]["scorer_sha256"] == Scorer.load_builtin().sha256
    assert "scorer" in stored["announced"][0]
    assert stored["checkpoints"] == stored["models"] == []
    rates = Scorer.load_builtin().select_error_rates("nucleotide")
    expected = [
        [each[0].n_bases, min(probability(one.threshold_at(0.03)) for one in each)]
        for each in zip(*rates, strict=True)
    ]
    assert stored["counts"]["cut_scores"] == expected


def many_more() -> dict[str, str]:
    return {f"more_{name}": bases for name, bases in many(5).items()}


def stamps(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return when each score file was written, and its content."""
    files = (folder / "scores").iterdir()
    return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def letters_done(folder: Path) -> int:
    return measure_run(folder)["letters"]["done"]


def test_scoring_is_announced_before_its_first_block(tmp_path):
    """A block may be a chromosome, which takes long."""
    n_done: list[int] = []

    def hear(event: RunEvent) -> None:
        if isinstance(event, Progress) and event.stage == "scoring":
            n_done.append(event.done)

    predict(write(tmp_path / "in.fa", **many()), to=tmp_path / "run", on_event=hear)
    assert n_done[0] == 0 < n_done[-1]


def test_interrupted_run_keeps_its_scores(tmp_path, monkeypatch):
    in_blocks(monkeypatch)
    fasta = write(tmp_path / "in.fa", **many(), **many_more())
    predict(fasta, to=tmp_path / "whole")
    steps: list[Progress] = []

    def hear(event: RunEvent) -> None:
        if isinstance(event, Progress) and event.stage == "scoring" and event.done:
            steps.append(event)

    def interrupt(event: RunEvent) -> None:
        hear(event)
        if len(steps) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict(fasta, to=tmp_path / "cut", on_event=interrupt)
    assert not (tmp_path / "cut/predictions.tsv").exists()
    n_done = letters_done(tmp_path / "cut")
    file = min((tmp_path / "cut/scores").iterdir())
    content = file.read_bytes()
    file.write_bytes(b"damaged")
    assert 0 < letters_done(tmp_path / "cut") < n_done
    file.write_bytes(content)
    before = stamps(tmp_path / "cut")
    assert len(before) >= 4
    steps.clear()
    predict(fasta, to=tmp_path / "cut", resume=True, on_event=hear)
    after = stamps(tmp_path / "cut")
    assert {name: after[name] for name in before} == before
    assert len(after) == len(steps) > len(before)
    assert [step.work[0] for step in steps if step.work][: len(before)] == [0] * len(before)
    assert tables_of(tmp_path / "cut") == tables_of(tmp_path / "whole")
    assert not failures(tmp_path / "cut") and not leftovers(tmp_path / "cut")
    scored = {name: content for name, (_, content) in after.items()}
    assert scored == {name: content for name, (_, content) in stamps(tmp_path / "whole").items()}


def test_damaged_or_foreign_scores_are_remade(tmp_path, monkeypatch):
    in_blocks(monkeypatch)
    fasta = write(tmp_path / "in.fa", **many())
    predict(fasta, to=tmp_path / "run")
    expected = tables_of(tmp_path / "run")
    whole = stamps(tmp_path / "run")
    names = sorted(whole)
    for place in (0, 400, -1, None):  # the second: in a number that is read as another
        content = bytearray(whole[names[0]][1])
        if place is None:
            content = bytearray(whole[names[1]][1])  # of another block
        else:
            content[place] ^= 1
        (tmp_path / "run/scores" / names[0]).write_bytes(content)
        if place == 400:
            assert inspect_run(tmp_path / "run", verify=True)[1] == 1
        (tmp_path / "run/scores" / "000999.scores").write_bytes(b"nothing")
        (tmp_path / "run/scores" / "mine.scores").write_bytes(b"of the user")
        predict(fasta, to=tmp_path / "run", resume=True)
        assert tables_of(tmp_path / "run") == expected
        now = stamps(tmp_path / "run")
        assert now.pop("mine.scores")[1] == b"of the user"
        assert {name: one[1] for name, one in now.items()} == {n: w[1] for n, w in whole.items()}
        assert now[names[1]] == whole[names[1]]


BOMB = 400 * 2**20  # bytes, which zstd packs into 40 kB


def packed_without_size(content: bytes) -> bytes:
    packer = zstd.ZstdCompressor()
    return packer.compress(content) + packer.flush()


def with_counts(name: str, number: int) -> Callable[[bytes], bytes]:
    """Change the last of some counts in the content of a score file."""

    def change(content: bytes) -> bytes:
        arrays = load(zstd.decompress(content))
        arrays[name] = arrays[name].copy()
        arrays[name][-1] = number
        return zstd.compress(save(arrays))

    return change


BOMBS = {
    "one frame": lambda _: zstd.compress(bytes(BOMB)),
    "a second frame": lambda content: content + zstd.compress(bytes(BOMB)),
    "no size": lambda _: packed_without_size(bytes(BOMB)),
    "pieces": with_counts("n_piece", 2**40),
    "fewer pieces": with_counts("n_piece", -1),
    "lengths": with_counts("lengths", 2**40),
}


@pytest.mark.parametrize("with_records", [True, False])
@pytest.mark.parametrize("name", BOMBS)
def test_score_file_cannot_fill_memory(tmp_path, name, with_records):
    sequence = open_dna(900, np.random.default_rng(3))
    predict(write(tmp_path / "in.fa", a=sequence), to=tmp_path / "run")
    rundir = open_run_dir(tmp_path / "run")
    manifest = rundir.read_manifest()
    store = ScoreStore(rundir, rundir.scores, manifest.recipe.fingerprint, "")
    (path,) = store.files()
    records = Records.from_records(manifest.records(manifest.inputs)) if with_records else None
    assert store.read(path, records)[0] is not None
    label, content = read_checksummed(path, {})
    write_checksummed(rundir, path, BOMBS[name](content), label.attributes)
    tracemalloc.start()
    assert store.read(path, records)[0] is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_scores_serve_only_their_records(tmp_path):
    records = [FastaRecord(name, name, "MKVLEFPQIL" * 9) for name in "ab"]
    recipe = Recipe(
        command="predict", input_type="protein", chunk_size=0, min_length=0, encoders=()
    )
    store = ScoreStore(SafeDir(tmp_path), tmp_path, recipe.fingerprint, finder="")
    store.write(
        0, score_records(Records.from_records(records), recipe, Scorer.load_builtin()), work=0
    )
    for changes in ({}, {"id": "c"}, {"header": "c"}, {"line": 7}, {"sequence": "M" * 90}):
        others = Records.from_records([records[0]._replace(**changes), records[1]])
        assert (store.read(store.path(0), others)[0] is None) == bool(changes), changes


def test_scored_blocks_stay_when_input_is_added(tmp_path):
    """The only block of a file is not full."""
    one = write(tmp_path / "one.fa", **many(1))
    two = write(tmp_path / "two.fa", **many_more())
    predict(one, to=tmp_path / "run")
    before = stamps(tmp_path / "run")
    predict(one, two, to=tmp_path / "run", resume=True, add=True)
    after = stamps(tmp_path / "run")
    assert len(after) == 2 and before.items() <= after.items()
    predict(one, two, to=tmp_path / "at_once")
    assert scores(tmp_path / "run") == scores(tmp_path / "at_once")


CUTS: list[dict[str, object]] = [
    {"preset": "sensitive"},
    {"preset": "conservative"},
    {"prevalence": 0.3},
    {"threshold": 0.9},
    {"evidence": "known"},
]


def long_ones() -> dict[str, str]:
    rng = np.random.default_rng(3)
    return {
        "big": open_dna(60_000, rng),
        "circle circular=true": random_dna(40_000, rng),
        "virus": open_dna(30_000, rng),
    }


# columns of viruses.tsv that are read from the letters of a virus
IDENTITY = RunOutput.VIRUS_TABLE.columns[RunOutput.VIRUS_TABLE.columns.index("group") :]


def test_rethreshold_equals_a_new_run(tmp_path):
    fasta = write(tmp_path / "in.fa", **many(), **long_ones(), bad="")
    predict(fasta, to=tmp_path / "run")
    before = stamps(tmp_path / "run")
    for number, cut in enumerate(CUTS):
        predict(fasta, to=tmp_path / "run", resume=True, **cut)
        predict(fasta, to=tmp_path / f"new{number}", **cut)
        assert outputs(tmp_path / "run") == outputs(tmp_path / f"new{number}"), cut
    assert stamps(tmp_path / "run") == before


def test_stricter_threshold_without_the_input(tmp_path, monkeypatch):
    in_blocks(monkeypatch, 20_000)
    fasta = write(tmp_path / "in.fa", **many(), **long_ones(), bad="")
    added = write(tmp_path / "added.fa", later="ACGTTGCA" * 50)

    def predict_both(to: Path, threshold: float) -> None:
        predict(fasta, to=to, threshold=threshold, per_file=True)
        predict(fasta, added, to=to, threshold=threshold, resume=True, add=True)

    predict_both(tmp_path / "run", 0.0)
    values = sorted(filter(None, scores(tmp_path / "run").values()))
    strict = float(values[len(values) // 2])
    predict_both(tmp_path / "new", strict)
    fasta.unlink()
    added.unlink()
    predict(fasta, to=tmp_path / "run", threshold=strict, resume=True, add=True)
    assert outputs(tmp_path / "run") == outputs(tmp_path / "new")
    assert outputs(tmp_path / "run/samples/in") == outputs(tmp_path / "new/samples/in")
    assert 0 < len(called(tmp_path / "run")) < len(many())
    assert inspect_run(tmp_path / "run", verify=True)[1] == 0
    assert "complete" in inspect_run(tmp_path / "run", verify=False)[0][0]


def test_wider_threshold_without_the_input(
    tmp_path,
):
    fasta = write(tmp_path / "in.fa", **many(), **long_ones())
    predict(fasta, to=tmp_path / "run", preset="conservative")
    predict(fasta, to=tmp_path / "new", threshold=0.01)
    away = fasta.rename(tmp_path / "away.fa")
    with pytest.raises(InputMissingError, match=r"in\.fa is missing.*viral\.fasta") as caught:
        predict(fasta, to=tmp_path / "run", threshold=0.01, resume=True)
    assert caught.value.exit_code == 66 and "put the input back" in caught.value.hint
    expected = outputs(tmp_path / "new")
    for name, content in expected.items():
        path = tmp_path / "run" / name
        if name in str(caught.value):
            assert not path.exists()
        elif name == "viruses.tsv":
            # newly called records have no letters left, so they get no identity
            told = rows(path)
            whole = rows(tmp_path / "new" / name)
            is_known = [bool(row["group"]) for row in told]
            assert [
                row if known else row | dict.fromkeys(IDENTITY, "")
                for row, known in zip(whole, is_known, strict=True)
            ] == told
            assert not all(is_known)
        else:
            assert path.read_bytes() == content, name
    told, n_damaged = inspect_run(tmp_path / "run", verify=True)
    assert n_damaged == 0
    assert (
        "missing   viral.fasta, viruses.fasta: --resume writes them if the input is there" in told
    )
    away.rename(fasta)
    predict(fasta, to=tmp_path / "run", threshold=0.01, resume=True)
    assert not any("missing" in line for line in inspect_run(tmp_path / "run", verify=False)[0])
    assert outputs(tmp_path / "run") == expected


def test_missing_input_without_usable_scores(tmp_path, monkeypatch):
    fasta = write(tmp_path / "in.fa", **many(), **long_ones())
    predict(fasta, to=tmp_path / "run", regions=False)
    content = fasta.read_text()
    fasta.write_text(content.replace("A", "C", 1))
    with pytest.raises(ResumeError, match="changed since this run began"):
        predict(fasta, to=tmp_path / "run", preset="sensitive", resume=True)
    fasta.unlink()
    before = tables_of(tmp_path / "run")
    with pytest.raises(InputMissingError, match="options for regions"):
        predict(fasta, to=tmp_path / "run", resume=True)
    with monkeypatch.context() as patch, pytest.raises(InputMissingError, match="another version"):
        patch.setattr("virnucpro.workflows.score_cache.SCORE_FORMAT", 0)
        predict(fasta, to=tmp_path / "run", resume=True, regions=False)
    assert tables_of(tmp_path / "run") == before
    with pytest.raises(ResumeError, match="--genetic-code was 11, now 4"):
        predict(fasta, to=tmp_path / "run", resume=True, regions=False, genetic_code=4)
    with pytest.raises(InputMissingError, match=r"other\.fa"):
        predict(tmp_path / "other.fa", to=tmp_path / "run", resume=True, regions=False)
    more = write(tmp_path / "more.fa", more="ACGTTGCA" * 50)
    with pytest.raises(InputMissingError, match=r"in\.fa"):
        predict(fasta, more, to=tmp_path / "run", resume=True, regions=False)
    (file, *_) = (tmp_path / "run/scores").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(InputMissingError, match=r"in\.fa"):
        predict(fasta, to=tmp_path / "run", resume=True, regions=False)
    assert tables_of(tmp_path / "run") == before
    file.write_bytes(whole)
    predict(fasta, to=tmp_path / "run", resume=True, regions=False)
    assert tables_of(tmp_path / "run") == before


def test_proteins_are_rethresholded_without_input(tmp_path):
    rng = np.random.default_rng(8)
    proteins = {f"p{n}": "".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), 90)) for n in range(30)}
    (folder := tmp_path / "in").mkdir()
    fasta = write(folder / "in.faa", **proteins, short="MKV", starred="MKVLEFPQIL" * 9 + "*")
    predict(folder, to=tmp_path / "run", threshold=0.1)
    predict(folder, to=tmp_path / "new", threshold=0.5)
    fasta.unlink()
    predict(folder, to=tmp_path / "run", threshold=0.5, resume=True)
    assert tables_of(tmp_path / "run") == tables_of(tmp_path / "new")


def test_status_counts_letters_of_a_live_run(tmp_path, monkeypatch):
    in_blocks(monkeypatch)
    fasta = write(tmp_path / "in.fa", **many())
    total = sum(map(len, many().values()))
    told: list[tuple[int, dict[str, Any]]] = []
    speeds: list[str] = []

    def look(event: RunEvent) -> None:
        if isinstance(event, Progress) and event.stage == "scoring" and event.done:
            told.append((event.done, measure_run(tmp_path / "run")))
            lines, _ = inspect_run(tmp_path / "run", verify=False)
            speeds.extend(line for line in lines if line.startswith("speed"))

    predict(fasta, to=tmp_path / "run", on_event=look)
    assert len(told) > 3
    assert len(speeds) == len(told)
    assert all(re.fullmatch(r"speed     [\d,]+ letters/s, remaining [\d:]+", s) for s in speeds)
    assert not any(
        line.startswith("speed") for line in inspect_run(tmp_path / "run", verify=False)[0]
    )
    for n_done, status in told:
        letters = {"total": total, "done": n_done, "pending": total - n_done}
        assert status["letters"] == letters and "shards" not in status
        assert status["letters_per_second"] > 0 and status["remaining_seconds"] is not None
    status = measure_run(tmp_path / "run")
    assert status["letters"] == {"total": total, "done": total, "pending": 0}
    assert (status["state"], status["remaining_seconds"]) == ("complete", 0)
    monkeypatch.setattr("virnucpro.workflows.score_cache.SCORE_FORMAT", 0)  # as of another scorer
    assert measure_run(tmp_path / "run")["letters"] == status["letters"]
    assert (
        f"scored    {total:,} of {total:,} letters"
        in inspect_run(tmp_path / "run", verify=False)[0]
    )


def test_added_input_joins_with_repaired_records(
    tmp_path,
):
    first = write(tmp_path / "in.fa", a=many()["open500"], bad="", c=many()["open300"])
    predict(first, to=tmp_path / "run")
    assert statuses(tmp_path / "run")["bad"] == "invalid"
    added = write(tmp_path / "more.fa", bad=many()["random999"], d=many()["random1000"])
    (tmp_path / "run/predictions.tsv").write_text("damaged\n")
    with pytest.raises(InputError, match=r"predictions\.tsv is damaged"):
        predict(first, added, to=tmp_path / "run", resume=True, add=True)
    predict(first, to=tmp_path / "run", resume=True, add=True)
    predict(first, added, to=tmp_path / "run", resume=True, add=True)
    assert list(statuses(tmp_path / "run").items()) == [
        (name, "scored") for name in ("a", "c", "bad", "d")
    ]
    all_at_once = {"a": many()["open500"], "bad": many()["random999"], "c": many()["open300"]}
    predict(
        write(tmp_path / "whole.fa", **all_at_once, d=many()["random1000"]), to=tmp_path / "whole"
    )
    assert scores(tmp_path / "run") == scores(tmp_path / "whole")


def test_scorer_run_is_not_resumed_with_a_model(tmp_path, tiny):
    fasta = write(tmp_path / "in.fa", a=many()["open500"])
    predict(fasta, to=tmp_path / "run")
    with pytest.raises(ResumeError, match="it has the scorer, not the model esm2_t"):
        predict(fasta, to=tmp_path / "run", resume=True, model=str(tiny.model), head=tiny.head_file)
    with pytest.raises(ResumeError, match="--input-type was nucleotide, now protein"):
        predict(fasta, to=tmp_path / "run", resume=True, input_type="protein")
    stored = json.loads((tmp_path / "run/run.json").read_text())
    spec = EncoderSpec(
        model="esm2_x", sha256="0" * 64, layer=2, pooling="mean", precision="fp32", dim=32
    )
    recipe = Recipe(**stored["recipe"] | {"scorer_sha256": "", "encoders": (spec,)})
    stored |= {"recipe": asdict(recipe), "fingerprint": recipe.fingerprint}
    write_run_json(tmp_path / "run", stored)
    with pytest.raises(ResumeError, match="does not name the model of the run"):
        predict(fasta, to=tmp_path / "run", resume=True)


def test_minimum_length_is_the_larger_one(tmp_path):
    fasta = write(tmp_path / "in.fa", **many())
    predict(fasta, to=tmp_path / "run", min_length=400)
    short = {name for name, status in statuses(tmp_path / "run").items() if status == "too_short"}
    assert short == {name for name, bases in many().items() if len(bases) < 400}
    predict(fasta, to=tmp_path / "run", min_length=100, force=True)
    assert set(statuses(tmp_path / "run").values()) == {"scored"}


def test_help_of_min_length_names_the_default():
    shortest = Scorer.load_builtin().min_length("nucleotide")
    option = get_type_hints(PredictOptions, include_extras=True)["min_length"].__metadata__[0]
    assert f"at least {shortest} bases" in option.help


def test_workers_score_on_cpus_despite_gpus(tmp_path, monkeypatch):
    gpu = Gpu(0, "GPU-a", "NVIDIA A100", 80 << 30, 79 << 30, (8, 0), (13, 0))
    monkeypatch.setattr(nvidia_driver, "has_nvml", lambda: True)
    monkeypatch.setattr(nvidia, "list_gpus", lambda: ([gpu], ""))
    monkeypatch.setattr(
        "virnucpro.models.torch_build.torch_build", lambda: TorchBuild("2.13.0", "13.0")
    )
    fasta = write(tmp_path / "in.fa", **many())
    predict(fasta, to=tmp_path / "run", workers=2)
    resources = json.loads((tmp_path / "run/run.json").read_text())["resources"]
    assert (resources["n_helpers"], set(resources["devices"])) == (1, {"cpu"})
    with pytest.raises(UsageError, match="--workers is for --device cpu"):
        predict(fasta, to=tmp_path / "other", workers=2, device="cuda")


def test_scorer_run_never_mentions_embedding(tmp_path):
    summary = predict(write(tmp_path / "in.fa", a="N" * 500), to=tmp_path / "run")
    log = (tmp_path / "run/virnucpro.log").read_text()
    assert "1 no_orf" in log
    assert not {"frame", "frames", "shard", "shards", "embedding"} & {*log.replace(",", "").split()}
    assert [*summary.seconds] == ["reading", "scoring"]


def test_status_names_the_scorer_and_no_shard(whole):
    lines, n_damaged = inspect_run(whole, verify=True)
    text = "\n".join(lines)
    assert "command   predict, the scorer\n" in text and "28 scored" in text
    assert "\nshards" not in text and n_damaged == 0
