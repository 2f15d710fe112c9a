"""A run: one row for every record, resume, and refused inputs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import islice, permutations
from pathlib import Path
from threading import Event

import h5py
import numpy as np
import pytest
import torch
from conftest import open_dna
from run_helpers import (
    again,
    assert_same_run,
    assert_same_vectors,
    flip_bit,
    forget_hashes,
    leftovers,
    rows,
    run_inline,
    statuses,
    tables,
    vectors,
    write_run_json,
)

from virnucpro._version import __version__
from virnucpro.core.errors import (
    FeatureFileError,
    InputError,
    OutputError,
    ResumeError,
    UsageError,
)
from virnucpro.core.events import BatchDone, EmbeddingStarted, Progress, ShardDone
from virnucpro.core.types import shard_name
from virnucpro.engine.local import InlineExecutor
from virnucpro.models.checkpoint import hash_weights
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.translate import Chunk, translate_six_frames
from virnucpro.workflows import run_steps
from virnucpro.workflows.status import inspect_run
from virnucpro.workflows.write_tables import Backlog

SHARED = Path(__file__).parents[3] / "shared"


@pytest.fixture
def finished(make_config, contigs, undisturbed):
    """The config of a complete run, a copy of the undisturbed one."""
    config = make_config(contigs)
    shutil.copytree(undisturbed, config.output)
    return config


def done_shards(events):
    return [event.shard.index for event in events if isinstance(event, ShardDone)]


def test_every_record_is_one_row_in_order(make_config, tiny, contigs):
    config = make_config(contigs, min_length=300)
    summary = run_inline(config, tiny.head)
    table = rows(config.output / "predictions.tsv")
    ids = [line[1:].split()[0] for line in contigs.read_text().splitlines() if line[0:1] == ">"]
    assert [row["record"] for row in table] == ids
    assert {row["file"] for row in table} == {"contigs"}
    found = statuses(config.output)
    assert found["closed"] == "too_short"
    assert found["empty"] == found["protein"] == "invalid"
    assert found["contig1"] == "too_short"
    assert found["contig2"] == "scored"
    assert summary.records.n_records == len(ids)
    assert sum(summary.records.statuses.values()) == len(ids)


def test_tables_agree_with_each_other(tiny, undisturbed):
    frames = [
        line.split("\t")
        for line in (undisturbed / "prediction_results.txt").read_text().splitlines()[1:]
    ]
    scores: dict[str, list[float]] = {}
    for name, label, others, virus in frames:
        assert label == ("virus" if float(virus) > float(others) else "others")
        assert float(others) + float(virus) == pytest.approx(1, abs=1e-9)
        scores.setdefault(name[:-2], []).append(float(virus))
    chunks = (undisturbed / "prediction_results_highestscore.csv").read_text().splitlines()[1:]
    assert [row.split("\t")[0] for row in chunks] == sorted(scores)
    called = []
    assert statuses(undisturbed)["closed"] == "no_orf"
    for row in rows(undisturbed / "predictions.tsv"):
        name, status, call, score = (
            row[column] for column in ("record", "status", "call", "virus_score")
        )
        n_chunks = row["n_chunks_scored"]
        n_frames = row["n_frames_scored"]
        mine = [found for chunk, found in scores.items() if chunk.rsplit("_chunk_", 1)[0] == name]
        assert len(mine) == int(n_chunks)
        assert int(n_frames) == sum(f[0].rsplit("_chunk_", 1)[0] == name for f in frames)
        if status == "scored":
            assert float(score) == tiny.head.facts.score(mine)
            assert call == ("virus" if float(score) >= 0.5 else "other")
            called += [name] if call == "virus" else []
    headers = [
        line for line in (undisturbed / "viral.fasta").read_text().splitlines() if line[0] == ">"
    ]
    assert headers == [f">{name} of a test" for name in called]
    assert len(vectors(undisturbed)) == len(frames)
    assert not leftovers(undisturbed)


def test_scores_match_head_and_vectors_by_id(tiny, contigs, undisturbed):
    found = vectors(undisturbed)
    bases = bases_of_frames(contigs)
    frames = rows(undisturbed / "prediction_results.txt")
    assert len(frames) > 100
    for name, _, _, score in map(dict.values, frames):
        expected = tiny.head.classify_frames(found[name][None], [bases[name]])
        assert expected[0] == float(score)


def bases_of_frames(fasta: Path) -> dict[str, str]:
    """Return the bases of each frame in chunks of 300, by id."""
    return {
        orf.id: orf.coding_sequence(record.sequence)
        for record in read_fasta(fasta)
        for orf in translate_six_frames(list(Chunk.from_record(record, 300)))
    }


def test_head_without_nucleotides_scores_proteins(make_config, tiny, contigs):
    config = make_config(contigs)
    head = replace(tiny.head, nucleotide=None)
    run_inline(config, head)
    found = vectors(config.output)
    for name, _, _, score in map(dict.values, rows(config.output / "prediction_results.txt")):
        assert head.classify(found[name][None])[0] == float(score)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_input_gives_header_only_tables(predicted, tmp_path, text):
    fasta = tmp_path / "empty.fa"
    fasta.write_text(text)
    output = predicted(fasta)
    for name, content in tables(output).items():
        assert len(content.splitlines()) == (0 if name.endswith(".fasta") else 1)


def test_resume_embeds_missing_or_damaged_shards(make_config, tiny, contigs, undisturbed, tmp_path):
    resumed = make_config(contigs, resume=True)
    shutil.copytree(undisturbed, resumed.output)
    features = resumed.output / "features"
    files = sorted(features.glob("*.h5"))
    files[1].unlink()
    flip_bit(files[2])
    files[3].write_bytes(files[3].read_bytes()[:-100])
    shutil.copyfile(files[5], files[4])
    events = []
    run_inline(resumed, tiny.head, events.append)
    # what is damaged within, the tables find, while others are embedded
    assert {1, 2} <= set(done_shards(events)) <= {1, 2, 3, 4}
    assert_same_run(resumed.output, undisturbed)


def test_tables_are_written_while_shards_are_embedded(predicted, contigs):
    second_is_written = Event()
    waited = []

    def hear(event) -> None:
        match event:
            case Progress(stage="writing tables", done=2):
                second_is_written.set()
            case ShardDone(shard=shard) if shard.index == 3:
                waited.append(second_is_written.wait(60))

    predicted(contigs, on_event=hear)
    assert waited == [True]


def test_interrupt_after_last_shard_ends_tables(make_config, tiny, contigs, monkeypatch):
    at_last_shard = Event()
    abandoned = Event()

    class ToldBacklog(Backlog):
        def abandon(self) -> None:
            super().abandon()
            abandoned.set()

    class Interrupted(InlineExecutor):
        def run(self, shards, job, resources):
            yield from super().run(shards, job, resources)
            assert at_last_shard.wait(60)
            raise KeyboardInterrupt

    def hear(event) -> None:
        match event:
            case Progress(stage="writing tables", done=done, total=total) if done == total:
                at_last_shard.set()
                assert abandoned.wait(60)

    monkeypatch.setattr(run_steps, "Backlog", ToldBacklog)
    config = make_config(contigs)
    with pytest.raises(KeyboardInterrupt):
        run_inline(config, tiny.head, hear, Interrupted())
    assert len(list((config.output / "features").glob("*.h5"))) == 7
    assert not (config.output / "predictions.tsv").exists()


class FailingDisk(InlineExecutor):
    """Changes a byte whenever the last feature file is written."""

    def run(self, shards, job, resources):
        for event in super().run(shards, job, resources):
            if isinstance(event, ShardDone) and event.shard.index == 6:
                flip_bit(job.root / "features/000006.h5", 1000)
            yield event


def test_file_damaged_twice_is_remade_then_reported(
    predicted, make_config, tiny, contigs, undisturbed
):
    config = make_config(contigs)
    events = []
    with pytest.raises(FeatureFileError, match="is damaged or truncated") as caught:
        run_inline(config, tiny.head, events.append, FailingDisk())
    assert done_shards(events) == [*range(7), 6]
    assert "--resume" in caught.value.hint
    assert not (config.output / "predictions.tsv").exists()
    predicted(contigs, resume=True)
    assert_same_run(config.output, undisturbed)


def test_existing_run_needs_resume_or_force(predicted, tiny, contigs, finished):
    before = tables(finished.output)
    with pytest.raises(OutputError, match="already has a run"):
        run_inline(finished, tiny.head)
    with pytest.raises(UsageError, match="contradict"):
        predicted(contigs, resume=True, force=True)
    assert tables(finished.output) == before


def test_force_deletes_only_results(predicted, contigs, finished):
    (finished.output / "notes.txt").write_text("mine")
    (finished.output / "features" / "mine.txt").write_text("mine")
    (finished.output / "features" / "999999.h5").write_text("old")
    predicted(contigs, force=True, chunk_size=500)
    for name in ("notes.txt", "features/mine.txt"):
        assert (finished.output / name).read_text() == "mine"
    assert not (finished.output / "features" / "999999.h5").exists()


def test_force_keeps_results_if_input_is_refused(predicted, tmp_path, finished):
    before = tables(finished.output)
    bad = tmp_path / "reads.fq"
    bad.write_text("@r\nACGT\n+\nII\n")
    with pytest.raises(InputError, match="2 qualities"):
        predicted(bad, force=True)
    with pytest.raises(UsageError, match="in the folder that --force clears"):
        predicted(finished.output / "viral.fasta", force=True)
    assert tables(finished.output) == before


def test_folder_may_be_input_and_output(make_config, tiny, contigs, tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    shutil.copyfile(contigs, folder / "contigs.fa")
    summary = run_inline(make_config(folder, output=folder), tiny.head)
    assert summary.records.n_records == 40
    assert (folder / "viral.fasta").stat().st_size
    again = run_inline(make_config(folder, output=folder, resume=True), tiny.head)
    assert (again.records.n_records, again.n_tokens) == (40, 0)  # viral.fasta is no input
    assert (folder / "contigs.fa").read_bytes() == contigs.read_bytes()


@pytest.mark.parametrize("change", ["append", "edit", "header", "cut"])
def test_input_changed_during_the_run_is_refused(make_config, tiny, contigs, change):
    config = make_config(contigs)
    text = contigs.read_text()
    changed = {
        "append": f"{text}>late\n{'GCA' * 100}\n",
        "edit": text.replace("TAAATAAATAACTTAATTAG", "TAAATAAATAACTTAATTAC", 1),
        "header": text.replace(">contig1 of", ">contig1 on"),
        "cut": text.replace(text.split("\n")[5], text.split("\n")[5][:60]),
    }[change]

    def touch(event):
        if isinstance(event, ShardDone) and event.shard.index == 0:
            contigs.write_text(changed)

    with pytest.raises(InputError, match="changed during"):
        run_inline(config, tiny.head, touch)
    assert not (config.output / "predictions.tsv").exists()


def test_refused_added_input_is_not_in_the_run(predicted, contigs, tmp_path, finished):
    before = tables(tmp_path / "run")
    bad = tmp_path / "bad.fa"
    bad.write_text(">contig1\nACGT\n")
    with pytest.raises(InputError, match="occurs twice"):
        predicted(contigs, bad, resume=True, add=True)
    predicted(contigs, resume=True, add=True)
    assert tables(tmp_path / "run") == before


def test_refused_input_leaves_the_folder_free(predicted, contigs, tmp_path):
    bad = tmp_path / "bad.fa"
    bad.write_text(f">a\n{'GCA' * 100}\n>a\nACGT\n")
    with pytest.raises(InputError, match="occurs twice"):
        predicted(bad)
    (tmp_path / "run" / "inputs").mkdir()
    (tmp_path / "run" / "inputs" / "0123456789abcdef.fa").write_text(">half")
    predicted(contigs)


@pytest.mark.parametrize(
    "edit",
    [
        lambda run: run["inputs"][0].update(path=[1]),
        lambda run: run["inputs"][0].update(generation="x"),
        lambda run: run["inputs"][0].update(generation=-1),
        lambda run: run["inputs"][0].update(generation=10**12),
        lambda run: run.update(replaced=[["a"]]),
        lambda run: run["recipe"]["encoders"][0].pop("layer"),
        lambda run: run["recipe"]["encoders"][0].update(reads="genomes"),
        lambda run: run["recipe"].update(chunk_size="x"),
        lambda run: run["recipe"].update(chunk_size=5),
        lambda run: run["recipe"].update(genetic_code=15),  # not what its fingerprint says
    ],
)
def test_run_json_of_another_shape_is_refused(predicted, contigs, edit, finished):
    stored = json.loads((finished.output / "run.json").read_text())
    edit(stored)
    write_run_json(finished.output, stored)
    with pytest.raises(ResumeError, match=r"run\.json is damaged"):
        predicted(contigs, resume=True)


def test_model_by_another_name_is_the_same_model(make_config, tiny, contigs, finished):
    resumed = make_config(contigs, resume=True, model="renamed")
    assert run_inline(resumed, tiny.head).n_tokens == 0


def test_run_without_frames_has_an_empty_index(predicted, tmp_path):
    fasta = tmp_path / "closed.fa"
    fasta.write_text(">closed\n" + "TAAATAAATAACTTAATTAGTTAGCTAGCTAACTAGTCATCACTATTA" * 4 + "\n")
    output = predicted(fasta)
    with h5py.File(output / "features.h5") as h5:
        assert len(h5["ids"]) == len(h5["embeddings"]) == len(h5["lengths"]) == 0


@pytest.mark.parametrize(
    "name", ["viral.fasta", "shards", "shards/000001.fna", "inputs", "inputs/mine.fa"]
)
def test_folder_with_other_files_is_refused(make_config, tiny, contigs, name):
    config = make_config(contigs, force=True)
    (config.output / name).parent.mkdir(parents=True)
    (config.output / name).write_text("precious")
    with pytest.raises(OutputError, match=f"{name.partition('/')[0]}, but no run"):
        run_inline(config, tiny.head)
    assert (config.output / name).read_text() == "precious"


@pytest.mark.parametrize("name", ["logs", ".mine.tmp"])
def test_other_files_stay_in_the_output_folder(make_config, tiny, contigs, name):
    config = make_config(contigs)
    config.output.mkdir()
    (config.output / name).write_text("precious")
    run_inline(config, tiny.head)
    assert (config.output / name).read_text() == "precious"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 500}, "--chunk-size was 300, now 500"),
        ({"precision": "bf16"}, "--precision was fp32, now bf16"),
        ({"sha256": "1" * 64}, r"the SHA-256 of the model was [0-9a-f]{12}\.\.\., now 1{12}\.\.\."),
        ({"head_sha256": "2" * 64}, r"the SHA-256 of the head was none, now 2{12}\.\.\."),
        ({"command": "extract"}, "command was predict, now extract"),
        ({"layer": 1}, "--layer was 2, now 1"),
        ({"min_length": 5}, "--min-length was 0, now 5"),
    ],
)
def test_changed_recipe_is_named(make_config, tiny, contigs, undisturbed, changes, message):
    config = make_config(contigs, resume=True, **changes)
    shutil.copytree(undisturbed, config.output)
    with pytest.raises(ResumeError, match=message):
        run_inline(config, tiny.head)


def test_changed_input_is_refused_and_named(predicted, contigs):
    predicted(contigs)
    contigs.write_text(contigs.read_text() + ">more\nACGTACGTAC\n")
    with pytest.raises(ResumeError, match=r"contigs\.fa changed") as caught:
        predicted(contigs, resume=True)
    assert "--force" in caught.value.hint


def test_only_used_copies_of_a_pipe_are_kept(predicted, contigs, tmp_path):
    """Here the pipe is a file in the run folder, which is copied as well."""
    given = tmp_path / "run" / "given.fa"
    given.parent.mkdir()
    given.write_bytes(contigs.read_bytes())
    predicted(given)
    kept = (tmp_path / "run" / "inputs").iterdir
    assert [copy.read_bytes() for copy in kept()] == [contigs.read_bytes()]
    given.write_text(">added\nACGT\nno sequence\n>\n")
    with pytest.raises(InputError, match="the header has no id"):
        predicted(given, resume=True, add=True)
    undisturbed = contigs.rename(tmp_path / "given.fa")
    predicted(undisturbed, output=tmp_path / "undisturbed")
    contigs.write_bytes(undisturbed.read_bytes())
    given.write_bytes(contigs.read_bytes())
    predicted(given, resume=True, add=True)
    assert [copy.read_bytes() for copy in kept()] == [contigs.read_bytes()]
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")
    predicted(contigs, force=True)
    assert not (tmp_path / "run" / "inputs").exists()


def test_inputs_may_be_added_on_resume(predicted, contigs, tmp_path):
    rng = np.random.default_rng(3)
    more = tmp_path / "more.fa"
    more.write_text("".join(f">more{i}\n{open_dna(600, rng)}\n" for i in range(10)))
    output = predicted(contigs)
    before = {path.stem for path in (output / "features").glob("*.h5")}
    events = []
    predicted(contigs, more, resume=True, add=True, on_event=events.append)
    assert before.isdisjoint(map(shard_name, done_shards(events)))
    assert f"WARNING added to this run: {more}" in (output / "virnucpro.log").read_text()
    predicted(contigs, more, output=tmp_path / "both")
    assert tables(output) == tables(tmp_path / "both")


def test_moved_input_and_folder_are_the_same_run(predicted, contigs, tmp_path, finished):
    expected = tables(finished.output)
    moved = contigs.rename(tmp_path / "elsewhere.fa")
    folder = finished.output.rename(tmp_path / "moved")
    assert vectors(folder)
    events = []
    predicted(moved, output=folder, resume=True, on_event=events.append)
    assert not done_shards(events)
    assert tables(folder) == expected
    assert json.loads((folder / "run.json").read_text())["inputs"][0]["path"] == str(moved)


def test_proteins_are_scored_one_by_one(predicted, tmp_path):
    fasta = tmp_path / "proteins.faa"
    fasta.write_text(">a\nMKVLEFPQIL*\n>b\nmkvlefpqil\n>c\nMK*LEFPQ-XBZJ\n>d\n*\n>e\nMK1\n")
    output = predicted(fasta)
    assert list(statuses(output).values()) == ["scored"] * 3 + ["invalid"] * 2
    found = vectors(output)
    assert np.array_equal(found["a"], found["b"])
    assert json.loads((output / "run.json").read_text())["recipe"]["chunk_size"] == 0


def test_protein_scores_do_not_depend_on_others(predicted, tiny, tmp_path):
    """There are more proteins than are scored at once."""
    fasta = tmp_path / "proteins.faa"
    texts = islice(permutations("ACDEFGHIKLMNPQRS", 3), 2_100)
    fasta.write_text("".join(f">p{i}\n{''.join(text)}\n" for i, text in enumerate(texts)))
    output = predicted(fasta, residues_per_shard=100_000)
    found = vectors(output)
    table = rows(output / "predictions.tsv")
    assert len(table) == 2_100
    for row in table:
        assert tiny.head.classify(found[row["record"]][None])[0] == float(row["virus_score"])


@pytest.mark.parametrize(
    "unread", [{"region_model": Path("none.json")}, {"genetic_code": 4}, {"chunk_size": 400}]
)
def test_options_without_effect_on_proteins(make_config, tiny, tmp_path, unread):
    fasta = tmp_path / "proteins.faa"
    fasta.write_text(">a\nMKVLEFPQIL*\n")
    config = make_config(fasta)
    with pytest.raises(UsageError, match=r"--(region-model|genetic-code|chunk-size): .*proteins"):
        run_inline(again(config, **unread), tiny.head)
    assert not open_run_dir(config.output).manifest.exists()
    assert run_inline(config, tiny.head).exit_code == 0, "nothing in its way"


def test_extract_gives_the_vectors_of_predict(make_config, contigs, undisturbed):
    config = make_config(contigs, command="extract")
    summary = run_inline(config, None)
    with h5py.File(config.output / "features" / "000000.h5") as h5:
        assert h5["ids"].dtype == h5py.string_dtype("utf-8")
        assert h5["embeddings"].shape == (len(h5["ids"]), 32)
        assert h5["embeddings"].dtype == np.float32
        assert h5["lengths"].dtype == np.int32
        assert h5.attrs["model"] == "tiny"
        assert h5.attrs["pooling"] == "mean"
        assert h5.attrs["precision"] == "fp32"
        assert h5.attrs["layer"] == 2
        assert h5.attrs["virnucpro_version"] == __version__
        assert h5.attrs["fingerprint"]
    assert statuses(config.output, "records.tsv")["contig2"] == "embedded"
    assert summary.records.n_frames == len(vectors(config.output))
    assert_same_vectors(vectors(config.output), vectors(undisturbed))
    assert not (config.output / "predictions.tsv").exists()


def test_calls_use_bfloat16_vectors_as_stored(predicted, make_config, tiny, contigs, tmp_path):
    cache = tmp_path / "cache"
    full = predicted(contigs, cache=cache)
    config = make_config(contigs, output=tmp_path / "half", store="bfloat16", cache=cache)
    events: list[object] = []
    run_inline(config, tiny.head, events.append)
    assert not any(isinstance(event, BatchDone) for event in events), "all are in the cache"
    stored = vectors(config.output)
    expected = vectors(full)
    assert stored.keys() == expected.keys()
    for name, vector in stored.items():
        assert np.array_equal(vector, torch.from_numpy(expected[name]).bfloat16().float().numpy())
    before = tables(config.output)
    (config.output / "features" / "000001.h5").unlink()
    run_inline(again(config, resume=True), tiny.head)
    assert tables(config.output) == before
    with pytest.raises(ResumeError, match="--store was bfloat16, now float32"):
        predicted(contigs, output=config.output, resume=True)


def test_intermediate_files_are_kept_on_request(predicted, contigs, undisturbed, tmp_path):
    assert not (undisturbed / "shards").exists()
    assert not (undisturbed / "chunks.fa").exists()
    output = predicted(contigs, output=tmp_path / "kept", keep_intermediate=True)
    assert_same_run(output, undisturbed)
    faa = (output / "shards" / "000000.faa").read_text().splitlines()
    name, *fields = faa[0][1:].split(" ")
    assert name in vectors(output)
    assert [field.split("=")[0] for field in fields] == [
        "chunk",
        "record",
        "start",
        "end",
        "strand",
        "bases",
    ]
    bases = fields[-1].removeprefix("bases=")
    fna = (output / "shards" / "000000.fna").read_text().splitlines()
    assert fna[:2] == [f">{name}", bases]
    assert (output / "chunks.fa").read_text().startswith(">contig0_chunk_1\n")


def test_chunks_of_fewer_inputs_are_remade(predicted, contigs, tmp_path):
    """An input was added without ``--keep-intermediate``, and that run was killed."""
    more = tmp_path / "more.fa"
    more.write_text(">more\n" + "GCA" * 150 + "\n")
    output = predicted(contigs, keep_intermediate=True)

    def stop(event) -> None:
        if isinstance(event, EmbeddingStarted):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predicted(contigs, more, resume=True, add=True, on_event=stop)
    predicted(contigs, more, resume=True, add=True, keep_intermediate=True)
    assert ">more_chunk_1\n" in (output / "chunks.fa").read_text()


def test_other_files_next_to_shards_are_kept(make_config, tiny, contigs):
    config = make_config(contigs)

    def leave(event) -> None:
        (config.output / "shards").mkdir(exist_ok=True)
        (config.output / "shards" / "notes.txt").write_text("precious")

    run_inline(config, tiny.head, leave)
    shards = config.output / "shards"
    assert {path.name: path.read_text() for path in shards.iterdir()} == {"notes.txt": "precious"}


def test_run_json_has_the_provenance(make_config, tiny, contigs):
    config = make_config(contigs, argv=("virnucpro", "predict"))
    summary = run_inline(config, tiny.head)
    stored = json.loads((config.output / "run.json").read_text())
    assert stored["state"] == "complete"
    assert stored["argv"] == ["virnucpro", "predict"]
    assert stored["virnucpro_version"] == __version__
    assert stored["recipe"]["encoders"][0]["sha256"] == hash_weights(tiny.model)
    assert stored["inputs"][0]["path"] == str(contigs)
    assert len(stored["inputs"][0]["sha256"]) == 64
    assert stored["resources"]["devices"] == ["cpu"]
    assert stored["counts"]["statuses"] == summary.records.statuses
    assert set(stored["counts"]["seconds"]) >= {"reading", "embedding", "writing tables"}
    (worker,) = stored["counts"]["workers"]
    assert worker.startswith(("cpu, fp32, attend_compiled, ", "cpu, fp32, attend_runs, "))


@pytest.mark.parametrize("harm", ["a flipped bit", "missing", "swapped", "a copy of another"])
def test_status_finds_damaged_or_misplaced_features(predicted, contigs, finished, tmp_path, harm):
    folder = finished.output
    n_files = len(list((folder / "features").glob("*.h5")))
    n_outputs = len(json.loads((folder / "run.json").read_text())["outputs"]) - n_files
    lines, n_damaged = inspect_run(folder, verify=True)
    whole = f"{n_files} feature files, {n_outputs} outputs, 1 input"
    assert lines[-1] == f"verified  intact: {whole}"
    assert n_damaged == 0
    one, two = (folder / "features" / f"{i:06d}.h5" for i in (1, 2))
    match harm:
        case "a flipped bit":
            flip_bit(one)
        case "missing":
            one.unlink()
        case "swapped":
            one.rename(tmp_path / "aside")
            two.rename(one)
            (tmp_path / "aside").rename(two)
        case "a copy of another":
            one.write_bytes(two.read_bytes())
    lines, n_damaged = inspect_run(folder, verify=True)
    changed = [one, two] if harm == "swapped" else [one]
    assert n_damaged == len(changed)
    for path, line in zip(changed, lines[-n_damaged:], strict=True):
        assert str(path) in line
    for path in changed:  # as the message says
        path.unlink(missing_ok=True)
    predicted(contigs, resume=True)
    assert inspect_run(folder, verify=True)[1] == 0


def test_status_finds_swapped_files_by_the_plan(predicted, contigs, tmp_path):
    output = predicted(contigs, keep_intermediate=True)
    (output / "features.h5").unlink()
    forget_hashes(output)
    one, two = (output / "features" / f"{i:06d}.h5" for i in (1, 2))
    lines, _ = inspect_run(output, verify=True)
    assert lines[-1].startswith(
        "verified  intact: 7 feature files, 1 input; outputs were not verified"
    )
    assert "was not checked" not in lines[-1]
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    lines, n_damaged = inspect_run(output, verify=True)
    assert n_damaged == 2
    for path, line in zip((one, two), lines[-2:], strict=True):
        assert f"{path} has shard_sha256 " in line


def test_status_reports_a_damaged_plan(predicted, contigs):
    output = predicted(contigs, keep_intermediate=True)
    (output / "shards" / "plan.json").write_text('{"series": 5}')
    lines, _ = inspect_run(output, verify=True)
    assert any("the plan is damaged" in line for line in lines)
    predicted(contigs, keep_intermediate=True, resume=True)
    assert inspect_run(output, verify=True)[1] == 0
