"""The report: its content, that it belongs to the run, and that no user text becomes code."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
from pathlib import Path

import faulty_workers
import numpy as np
import pytest
from html_parser import EVIL, EXAMPLE, Page, call, write_table
from jinja2 import UndefinedError
from run_helpers import again, execute, rows, run_inline, within, write_run_json

from virnucpro.core.errors import InputError, InputMissingError, ResumeError
from virnucpro.core.events import (
    STAGES,
    BatchDone,
    BatchSizeReduced,
    Memory,
    ShardDone,
    ShardFailed,
    WorkerLost,
    WorkerReady,
)
from virnucpro.core.types import Shard
from virnucpro.engine.device_timeline import DeviceTimeline
from virnucpro.engine.local import InlineExecutor
from virnucpro.engine.progress import EmbeddingProgress
from virnucpro.models.names import TINY_MODEL
from virnucpro.results.outputs import open_run_dir
from virnucpro.results.report.html import MAX_BYTES, render
from virnucpro.results.report.run_report import report_folder
from virnucpro.results.table_blocks import split_table
from virnucpro.training.evaluation.metrics import MEASURES
from virnucpro.training.reports import write_evaluation_page, write_training_page
from virnucpro.viral.types import Call
from virnucpro.workflows.predict_options import PredictOptions


def predict(to: Path, *inputs: Path, **changes: object) -> Path:
    given = {"model": TINY_MODEL, "device": "cpu", **changes}
    options = PredictOptions(input=inputs, output_dir=to, **given)
    execute(options, lambda _: None, lambda _: InlineExecutor())
    return open_run_dir(to).report


# Content


def test_report_command_equals_predict(tmp_path):
    """It has every record with its values."""
    path = predict(tmp_path / "run", EXAMPLE)
    before = path.read_bytes()
    assert report_folder(tmp_path / "run") == path
    assert path.read_bytes() == before
    page = Page(path)
    table = rows(tmp_path / "run/predictions.tsv")
    columns = page.data["columns"]
    assert page.ids == [row["record"] for row in table] and len(table) == 16
    for name, figure in {
        "length": lambda row: int(row["length"]),
        "viral": lambda row: row["call"] == "virus",
        "score": lambda row: round(1e6 * float(row["virus_score"])),
        "fdr": lambda row: round(1e4 * float(row["fdr"])),
    }.items():
        assert columns[name] == list(map(figure, table)), name
    assert "16 in = 16 scored the counts add up" in page.words
    assert "8 records called virus, of 16 with a score (50 %)" in page.words


def test_page_reports_a_table_that_does_not_add_up(tmp_path):
    counts = {"statuses": {"scored": 2, "too_short": 1}}
    page = Page(report_folder(write_table(tmp_path / "run", [call("a", 0.5)], counts=counts)))
    assert "1 in = 1 scored the counts do not add up" in page.words
    assert "The table has 1 records, but the run counted 3" in page.words


@pytest.mark.parametrize(
    ("others", "exit_code", "title"), [(">a\nMKVLEFPQIL\n", 2, "PARTIAL: "), ("", 1, "FAILED: ")]
)
def test_title_says_that_a_run_is_partial(make_config, tiny, tmp_path, others, exit_code, title):
    (tmp_path / "in.faa").write_text(f"{others}>poison\nMKVLEFPQIL{faulty_workers.POISON}\n")
    config = make_config(tmp_path / "in.faa", input_type="protein")
    executor = InlineExecutor(worker=faulty_workers.NanWorker)
    assert run_inline(config, tiny.head, executor=executor).exit_code == exit_code
    page = Page(open_run_dir(config.output).report)
    assert page.title.startswith(f"{title}in")
    assert "1 frame without a vector: see failed_files.txt" in page.words
    assert ("a", {"href": "failed_sequences.fa"}) in page.elements


def test_title_says_that_a_run_is_unfinished(tmp_path, caplog):
    folder = write_table(tmp_path / "run", [], state="unfinished")
    (folder / "predictions.tsv").unlink()
    (folder / "virnucpro.log").write_text(
        "2026-01-01 10:00:00,000 INFO    virnucpro 0.1.0: predict\n"
        "2026-01-01 10:00:01,000 WARNING an old one\n"
        "2026-01-01 11:00:00,000 INFO    virnucpro 0.1.0: predict --resume\n"
        "2026-01-01 11:00:01,000 ERROR   the run ended: /data: <b>full</b>\n"
    )
    page = Page(report_folder(folder))
    assert caplog.messages == ["The run is not finished: continue with --resume."]
    assert page.title.startswith("UNFINISHED: ")
    assert "the run ended: /data: <b>full</b>" in page.words
    assert "an old one" not in page.words


def test_run_of_an_older_version_has_a_page(tmp_path):
    """It lacks later columns and data."""
    write_run_json(tmp_path, {"state": "complete", "recipe": 3, "inputs": 0})
    (tmp_path / "predictions.tsv").write_text(
        "record\tlength\tstatus\tcall\tvirus_score\na\t700\tscored\tvirus\t0.990000\n"
    )
    page = Page(report_folder(tmp_path))
    assert page.ids == ["a"]
    assert "1 record called virus, of 1 with a score" in page.words


def test_run_without_a_record_has_a_page(tmp_path):
    page = Page(report_folder(write_table(tmp_path / "run", [])))
    assert "0 in = 0 scored the counts add up" in page.words
    assert "The input has no records." in page.words


def test_hidden_notes_are_counted(tmp_path):
    noted = [call(f"r{i}", 0.9, note=f"note {i}") for i in range(10)]
    short = [Call(f"s{n}", n, "too_short", note=f"{n} of at least 150") for n in range(10, 20)]
    page = Page(report_folder(write_table(tmp_path / "run", noted + short)))
    assert "1 record with the note: note 0" in page.words
    assert "and 2 more notes: see the column note of predictions.tsv." in page.words
    assert "of at least" not in page.words


def test_page_cites_what_the_run_used(tmp_path):
    folder = write_table(tmp_path / "run", [])
    stored = json.loads((folder / "run.json").read_text())
    for families, is_cited in (([], False), (["esm2"], True)):
        stored["recipe"] = {"encoders": [{"family": family} for family in families]}
        write_run_json(folder, stored)
        page = report_folder(folder).read_text()
        assert ("lin2023esm2" in page) == ("10.1126/science.ade2574" in page) == is_cited
        assert "li2025virnucpro" in page and "zhou2025dnaberts" not in page


def test_numbers_by_file_and_by_length_add_up(tmp_path):
    calls = [
        call("a", 0.95, 250, sample="one", false_discovery_rate=0.4),
        call("b", 0.93, 4000, sample="one", false_discovery_rate=0.1),
        call("c", 0.2, 4000, sample="two", false_discovery_rate=0.9),
        Call("d", 10, "too_short", "two"),
    ]
    page = Page(report_folder(write_table(tmp_path / "run", calls)))
    assert "4 in = 3 scored + 1 too_short the counts add up" in page.words
    assert "one 2 2 0 2 two 2 1 1 0" in page.words
    assert "0 to 299 2 1 1 250 0.9500 40 % weak" in page.words
    assert "3,000 to 9,999 2 2 1 4,000 0.9300 10 %" in page.words


REGIONS = (
    "region\trecord\tfile\textent\tstart\tend\tlength\tposterior\tcall\tvirus_score\tvirus\tnote"
    "\tevidence\n"
)


def region(record: str, extent: str, start: int, end: int, *words: str) -> str:
    """Make a row in the table of regions, in a run of the files ``contigs``.

    ``words`` are its virus, note and evidence.
    """
    place = f"{extent}\t{start}\t{end}\t{end - start + 1}\t0.9\tother\t0.1"
    last = "\t".join([*words, "", "", ""][:3])
    return f"{record}|{extent}_{start}_{end}\t{record}\tcontigs\t{place}\t{last}\n"


def track(*rows: tuple[str, int, int, str, float]) -> bytes:
    lines = ["\t".join(map(str, row)) for row in rows]
    return gzip.compress(
        "\n".join(["record\tstart\tend\tlog_odds\tposterior", *lines, ""]).encode()
    )


def test_region_is_listed_with_a_map(tmp_path):
    calls = [call("host", 0.1, 10_000), call("other", 0.95, 20_000)]
    folder = write_table(tmp_path / "run", calls, counts={"n_proviruses": 1})
    name = "host|provirus_2001_3000"
    (folder / "regions.tsv").write_text(
        REGIONS
        + region("host", "provirus", 2001, 3000, name, "", "trna=yes;viral_genes=2/3")
        + region("host", "provirus", 9, 90)
    )
    pieces = [("host", 1, 1000, "-1.0", 0.0), ("host", 2001, 3000, "2.26", 1.0)]
    (folder / "tracks.tsv.gz").write_bytes(track(*pieces, ("other", 1, 1000, "1.0", 0.5)))
    page = Page(report_folder(folder))
    assert "1 provirus in other records, among 2 virus-like regions there" in page.words
    assert "host contigs provirus 2,001 3,000 0.9000 trna=yes;viral_genes=2/3" in page.words
    columns = page.data["regions"]["columns"]
    assert (columns["start"], columns["end"]) == ([2001, 9], [3000, 90])
    assert (columns["verdict"], columns["score"]) == ([1, 0], [100_000] * 2)
    assert columns["evidence"] == "trna=yes;viral_genes=2/3\n"
    [drawn] = page.data["tracks"]
    assert (drawn["record"], drawn["length"]) == ("host", 10_000)
    assert drawn["posterior"] == [0, None, 100, *[None] * 7]
    assert drawn["odds"] == [-2, None, 5, *[None] * 7]
    assert [one["start"] for one in drawn["regions"]] == [9, 2001]
    assert page.data["columns"]["regions"] == [2, 0]


TRACK = "record\tstart\tend\tlog_odds\tposterior\nhost\t1\t1000\t-1.0\t0.5\n"


@pytest.mark.parametrize(
    ("table", "right", "wrong"),
    [
        ("tracks.tsv.gz", "\tposterior", ""),
        ("tracks.tsv.gz", "record", "\ufeffrecord"),
        *(("tracks.tsv.gz", "0.5", wrong) for wrong in ("", "-0.5", "2")),
        ("tracks.tsv.gz", "\t1\t", "\t-1\t"),
        ("regions.tsv", "\t90\t", "\t" + 400 * "9" + "\t"),
        ("regions.tsv", "\t9\t", "\t0\t"),
        *(("regions.tsv", "0.9", wrong) for wrong in ("inf", "7")),
    ],
)
def test_damaged_regions_and_tracks_are_reported(tmp_path, table, right, wrong):
    folder = write_table(tmp_path / "run", [call("host", 0.1, 10_000)])
    regions = REGIONS + region("host", "provirus", 9, 90)
    (folder / "regions.tsv").write_text(regions)
    (folder / "tracks.tsv.gz").write_bytes(gzip.compress(TRACK.encode()))
    report_folder(folder)
    content = (regions if table == "regions.tsv" else TRACK).replace(right, wrong).encode()
    (folder / table).write_bytes(content if table == "regions.tsv" else gzip.compress(content))
    with pytest.raises(InputError, match=re.escape(f"{table} is damaged")):
        report_folder(folder)


def test_tracks_that_end_too_early_are_reported(tmp_path):
    folder = write_table(tmp_path / "run", [call("host", 0.1, 10_000)])
    (folder / "regions.tsv").write_text(REGIONS + region("host", "provirus", 9, 90))
    (folder / "tracks.tsv.gz").write_bytes(gzip.compress(TRACK.encode())[:-9])
    with pytest.raises(InputError, match=r"tracks\.tsv\.gz is damaged"):
        report_folder(folder)


def test_whole_record_region_is_not_drawn(tmp_path):
    folder = write_table(tmp_path / "run", [call("a", 0.95, 20_000), call("b", 0.95, 20_000)])
    (folder / "regions.tsv").write_text(
        REGIONS + region("a", "whole", 1, 20_000, "a") + region("b", "whole", 501, 20_000, "b|x")
    )
    data = Page(report_folder(folder)).data
    assert data["regions"]["columns"]["record"] == "b"
    assert [drawn["record"] for drawn in data["tracks"]] == ["b"]


def test_whole_record_provirus_is_listed(tmp_path):
    folder = write_table(tmp_path / "run", [call("a", 0.4, 20_000)])
    (folder / "regions.tsv").write_text(REGIONS + region("a", "provirus", 1, 20_000, "a|x"))
    columns = Page(report_folder(folder)).data["regions"]["columns"]
    assert (columns["record"], columns["verdict"]) == ("a", [1])


def test_region_over_the_origin_is_counted_once(tmp_path):
    folder = write_table(tmp_path / "run", [call("circle", 0.1, 20_000)])
    note = "crosses the origin"
    (folder / "regions.tsv").write_text(
        REGIONS
        + region("circle", "provirus", 1, 5_000, "", note)
        + region("circle", "provirus", 16_001, 20_000, "", note)
    )
    pieces = [("circle", 1, 1000, "-1.0", 0.0), ("circle", 19_501, 500, "2.0", 1.0)]
    (folder / "tracks.tsv.gz").write_bytes(track(*pieces))
    page = Page(report_folder(folder))
    assert "among 1 virus-like region there" in page.words
    assert page.data["columns"]["regions"] == [1]
    [drawn] = page.data["tracks"]
    assert drawn["posterior"] == [0, *[None] * 18, 100]


def test_map_of_a_long_record_has_bounded_size(tmp_path):
    length = 300_000_000
    folder = write_table(tmp_path / "run", [call("chr1", 0.1, length)])
    (folder / "regions.tsv").write_text(REGIONS + region("chr1", "provirus", 9_001, 19_900))
    pieces = [("chr1", 1, 1000, "", 0.0), ("chr1", length - 999, length, "2.0", 1.0)]
    (folder / "tracks.tsv.gz").write_bytes(track(*pieces))
    [drawn] = Page(report_folder(folder)).data["tracks"]
    assert len(drawn["posterior"]) == 10_000
    assert (drawn["odds"][0], drawn["posterior"][-1]) == (None, 100)


# Samples


def test_page_has_every_sample_of_many(tmp_path):
    calls = [call(f"r{i}", 0.95, sample=f"s{i}") for i in range(1_000)]
    folder = write_table(tmp_path / "run", calls)
    write_samples(folder, [(f"s{i}", "complete", 1, i % 7) for i in range(1_000)])
    page = Page(report_folder(folder))
    columns = {column["name"]: column["values"] for column in page.data["samples"]["columns"]}
    assert columns["file"] == [f"s{i}" for i in range(1_000)]
    assert columns["virus"] == [i % 7 for i in range(1_000)]
    assert "path" not in columns


def test_damaged_table_of_samples_is_reported(tmp_path):
    folder = write_table(tmp_path / "run", [])
    write_samples(folder, [("a", "complete", 1, 2), ("b", "complete", 1, "many")])
    with pytest.raises(InputError, match=r"samples\.tsv is damaged"):
        report_folder(folder)


def test_page_has_samples_without_the_table(tmp_path):
    folder = write_table(tmp_path / "run", [])
    write_samples(folder, [("a", "complete", 1, 2), ("b", "complete", 1, 3)])
    (folder / "predictions.tsv").unlink()
    columns = Page(report_folder(folder)).data["samples"]["columns"]
    assert columns[0]["values"] == ["a", "b"]


def write_samples(folder: Path, rows: list[tuple[object, ...]]) -> None:
    names = "file\tstatus\tn_records\tn_virus\n"
    lines = ("\t".join(map(str, row)) + "\n" for row in rows)
    (folder / "samples.tsv").write_text(names + "".join(lines))


# More records than fit a page


def test_page_shows_viral_records_and_a_sample(tmp_path):
    calls = (call(f"contig{i}", 0.95 if i % 100 == 0 else 0.1) for i in range(210_000))
    page = Page(report_folder(write_table(tmp_path / "run", calls)))
    places = np.array([int(name.removeprefix("contig")) for name in page.ids])
    assert len(set(places.tolist())) == len(places) == 100_000
    assert set(range(0, 210_000, 100)) <= set(places.tolist())
    others = places[places % 100 > 0]
    assert len(others) == 97_900
    gaps = np.diff(others)
    assert gaps.min() > 1 and gaps.max() < 6  # 2.1 on average
    assert np.cumsum(page.data["columns"]["gap"]).tolist() == (places + 1).tolist()
    shown = "This page shows 100,000 of 210,000 records: all 2,100 viral records and an even sample"
    assert shown in page.words
    assert "210,000 in = 210,000 scored" in page.words


def test_page_has_the_best_of_many_viral_records(tmp_path):
    rank = np.random.default_rng(1).permutation(210_000)
    scores = 0.9 + np.maximum(rank - 109_999, 0) / 1_000_000  # the best have one each
    calls = (call(f"contig{i}", score) for i, score in enumerate(scores.tolist()))
    page = Page(report_folder(write_table(tmp_path / "run", calls)))
    best = np.sort(np.argsort(-scores)[:100_000])
    assert page.ids == [f"contig{i}" for i in best.tolist()]
    assert "This page shows 100,000 of 210,000 records: the 100,000 best viral" in page.words


def test_page_size_is_limited(tmp_path):
    rng = np.random.default_rng(1)
    names = (rng.bytes(140).hex() for _ in range(20_000))
    path = report_folder(write_table(tmp_path / "run", (call(name, 0.5) for name in names)))
    assert 2_400_000 < path.stat().st_size <= MAX_BYTES == 3_000_000
    assert re.search(r"shows [\d,]+ of 20,000 records", Page(path).words)


# User text

TEMPLATE_CODE = ("{{ 7*7 }}", "{% raw %}", "{% endblock %}", "{# a", "{{ script }}", "-%}")


@pytest.mark.parametrize(
    "name",
    [
        *(EVIL, "</script><script>bad()</script>", "x" * 5_000),
        *("küssen-噬菌体", "a\u202eb", *TEMPLATE_CODE),
    ],
)
def test_id_is_text_and_never_markup(tmp_path, name):
    folder = write_table(tmp_path / "run", [call(name, 0.99, note=name, sample=name)])
    page = Page(report_folder(folder))
    plain = Page(report_folder(write_table(tmp_path / "plain", [])))
    tags = {tag for tag, _ in page.elements}
    assert "img" not in tags
    assert sum(tag == "script" for tag, _ in page.elements) == 2
    assert page.source.count("<script") == plain.source.count("<script")
    (shown,) = page.ids
    assert shown == (name if len(name) < 200 and name.isprintable() else shown)
    assert shown in page.text
    assert len(shown) <= 310 and shown.isprintable()


@pytest.mark.parametrize("name", ["</script>", "</title>", *TEMPLATE_CODE])
def test_template_code_in_names_is_text(tmp_path, name):
    """In all places where the template writes a name: title, viral records, table of files."""
    calls = [call(name, 0.99, note=name, sample=name)]
    page = Page(report_folder(write_table(tmp_path / "run", calls, inputs=[{"sample": name}])))
    assert page.title == f"{name}, VirNucPro"
    for cell in ("record", "file", "note"):
        assert f" {name} " in page.text, cell
    assert page.text.count(name) >= 6
    assert "49" not in page.title


def test_template_name_without_value_is_an_error():
    with pytest.raises(UndefinedError, match="'charts' is undefined"):
        render("training.html", {"tables": [], "complaints": [], "provenance": []}, {})


def test_text_of_a_page_is_escaped():
    content = {"charts": [], "tables": [], "complaints": [], "provenance": [("a", "<&>\"'")]}
    page = render("training.html", content, {}).decode()
    assert "<dt>a</dt><dd>&lt;&amp;&gt;&#34;&#39;</dd>" in page


def test_page_names_hosts_without_markup(tmp_path):
    folder = write_table(tmp_path / "run", [call("a", 0.99)])
    facts = json.loads((folder / "run.json").read_text())
    host = {"n_shards": 1234, "tokens_per_second": 56789.4, "n_failed": 3}
    facts["hosts"] = [{"host": "<img src=x>\x1b[2J", **host}, {"host": "node7"}, "damaged"]
    facts["recipe"]["encoders"] = [{"family": "esm2"}]
    write_run_json(folder, facts)
    page = Page(report_folder(folder))
    assert "img" not in {tag for tag, _ in page.elements}
    assert r"<img src=x>\x1b[2J" in page.text and "node7" in page.text
    assert "1,234" in page.text and "56,789" in page.text


def test_id_that_is_not_utf_8_is_in_the_page(tmp_path):
    folder = write_table(tmp_path / "run", [call("a", 0.99)])
    table = folder / "predictions.tsv"
    table.write_bytes(table.read_bytes().replace(b"\na\t", b"\na\xff\t"))
    assert Page(report_folder(folder)).ids == [r"a\udcff"]


def test_page_policy_allows_only_its_own_code(tmp_path):
    page = Page(report_folder(write_table(tmp_path / "run", [call("a", 0.99)])))
    (policy,) = (
        attributes["content"]
        for tag, attributes in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    (script,) = re.findall(r"<script>(.*?)</script>", page.source, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL)
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (script, style)
    ]
    assert policy.split("; ") == [
        "default-src 'none'",
        f"script-src 'sha256-{hashes[0]}'",
        f"style-src 'sha256-{hashes[1]}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    for tag, attributes in page.elements:
        assert not attributes.keys() & {"src", "style", "onclick"}, tag
        assert not (attributes.get("href") or "").startswith(("http", "/")), tag


# Pages of other runs


def test_no_report_deletes_an_old_one(tmp_path):
    path = predict(tmp_path / "run", EXAMPLE)
    assert path.exists()
    predict(tmp_path / "run", EXAMPLE, resume=True, report=False)
    assert not path.exists()


def test_page_and_device_record_belong_to_the_run(predicted, contigs):
    output = predicted(contigs)
    rundir = open_run_dir(output)
    assert {rundir.report.name, rundir.machine.name} <= set(rundir.own_names)
    assert rundir.report.exists() and rundir.machine.exists()
    rundir.delete_results()
    assert not rundir.report.exists() and not rundir.machine.exists()


def test_evaluation_run_is_named_by_its_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(InputMissingError, match="contains no run") as caught:
        report_folder(tmp_path)
    assert caught.value.hint == f"did you mean {tmp_path / 'run'}?"


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_damaged_run_json_is_reported(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ResumeError, match=r"run\.json is damaged"):
        report_folder(tmp_path)


@pytest.mark.parametrize(
    "row",
    [
        "b",
        "b\tc\tmany\tscored" + 8 * "\t",
        "b\tc\t7\tgood" + 8 * "\t",
        f"b\tc\t{10**30}\tscored" + 8 * "\t",
        f"b\tc\t{2**62}\tscored\tvirus\t0.9" + 6 * "\t",
        "b\tc\t700\tscored\tvirus\t0.9\tinf" + 5 * "\t",
        "b\tc\t-700\tscored" + 8 * "\t",
        "b\tc\t700\tscored\tvirus\t-0.9" + 6 * "\t",
    ],
)
def test_damaged_table_is_reported(tmp_path, row):
    folder = write_table(tmp_path / "run", [call("a", 0.99)])
    with (folder / "predictions.tsv").open("a") as out:
        out.write(row + "\n")
    with pytest.raises(InputError, match=r"predictions\.tsv is damaged"):
        report_folder(folder)


# Trainings and evaluations


def test_table_fields_are_read_as_in_python(tmp_path):
    rows = [
        ["", "", "virus", "a\ttab"],
        ["0.123456", "7", "virus", "\u00e9\udcff"],
        ["1.", "123456789012345", "other", "\u00e9\udcff"],
        ["-0.3", "0", "virus ", ""],
    ]
    lines = "\n".join(["score\tlength\tcall\tnote", *map("\t".join, rows)])  # no last line end
    (tmp_path / "table.tsv").write_bytes(lines.encode("utf-8", "surrogateescape"))
    [block] = [span.read() for span in split_table(tmp_path / "table.tsv")]
    columns = dict(zip(("score", "length", "call", "note"), zip(*rows, strict=True), strict=True))
    for name, fields in columns.items():
        distinct, places = block.codes(name)
        assert block.texts(name) == [distinct[place] for place in places] == list(fields)
        assert len(distinct) == len(set(fields))
    for name in ("score", "length"):
        numbers = [float(text or "nan") for text in columns[name]]
        assert np.array_equal(block.numbers(name), numbers, equal_nan=True)
    assert block.has_columns("call", b"virus").tolist() == [True, True, False, False]
    assert block.texts("none") == [""] * 4
    for wrong in ("1e3", "--1", "-", "1.2.3", ".5", "x", "1234567890123456"):
        (tmp_path / "table.tsv").write_text(f"score\n1\n{wrong}\n")
        [block] = [span.read() for span in split_table(tmp_path / "table.tsv")]
        with pytest.raises(ValueError, match=f"score {wrong} is not a number"):
            block.numbers("score")


def test_training_page_has_curves_and_tables(tmp_path):
    """A value that is no number is a gap in its curve."""
    (tmp_path / "training.json").write_text(json.dumps({"manifest": EVIL, "settings": {"lr": 0.1}}))
    (tmp_path / "epochs.tsv").write_text(
        "seed\tepoch\tlr\tloss\tvalidation_loss\tauroc\n"
        "0\t1\t0.1\t0.7\t0.6\tn/a\n0\t2\t0.1\t0.5\t0.55\t0.9\n0\t3\t0.1\tnan\tinf\t0.9\n"
    )
    (tmp_path / "held_out.tsv").write_text(f"split\tnetwork\tauroc\ntest\t{EVIL}\t0.8125\n")
    write_training_page(tmp_path)
    page = Page(tmp_path / "report.html")
    charts = page.data["charts"]
    assert charts["loss"]["x"] == [1, 2, 3]
    assert [line["y"] for line in charts["loss"]["series"]] == [[0.7, 0.5, None], [0.6, 0.55, None]]
    assert [line["y"] for line in charts["figures"]["series"]] == [[None, 0.9, 0.9]]
    assert f"split network auroc test {EVIL} 0.8125" in page.words
    assert "img" not in {tag for tag, _ in page.elements}
    (tmp_path / "epochs.tsv").write_text("")
    with pytest.raises(InputError, match=r"epochs\.tsv is empty"):
        write_training_page(tmp_path)


def test_evaluation_page_has_figures_and_curves(tmp_path):
    kind = {"unit": "record", "length": "500"}
    facts = {**kind, "subset": "all", "kingdom": ""}
    counts = {"n": 30, "n_virus": 10, "n_groups": 7, "n_no_orf": 4}
    row = {
        **facts,
        **counts,
        "scored": {"auroc": 0.99},
        "no_orf_as_0": {**dict.fromkeys(MEASURES), "auroc": 0.875, "recall": 0.5},
        "no_orf_as_0_low": {"auroc": 0.75},
        "no_orf_as_0_high": {"auroc": 1.0},
    }
    content = {
        **dict.fromkeys(("split", "head", "scorer")),
        "virnucpro_version": "1",
        "data": {"path": EVIL, "sha256": "0"},
        "cutting": {},
        "cut": "preset default",
        "n_records": 30,
        "n_trained_records": 2,
        "rows": [row, {**row, "subset": "virus", "kingdom": EVIL}],
        "roc": [{**kind, "true_positives": [0.5, 1.0], "false_positives": [0.0, 1.0]}],
        "reliability": [{**kind, "mean_score": [0.1], "share_of_viruses": [0.2]}],
        "scores": [{**kind, "virus": [1, 9], "other": [1200, 0], "lowest_called": 0.75}],
    }
    write_evaluation_page(tmp_path, content)
    page = Page(tmp_path / "report.html")
    assert page.title.startswith("WITH TRAINING DATA: ")
    assert "500 bases 30 10 7 4 0.875 0.750 to 1.000 0.500" in page.words
    assert f"{EVIL} viruses" in page.words
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page.source)
    assert captions == ["ROC", "Precision and recall", "Reliability", "Scores of 500 bases"]
    assert "virus (10) other (1,200) lowest score called virus" in page.words


# Device record


def test_device_timeline_merges_its_bins(tmp_path):
    seconds = iter(np.arange(0, 5_000, 0.5).tolist())
    embedding = EmbeddingProgress()
    shard = Shard(0, tmp_path, 1, 1, 10, "")

    def update(event):
        embedding.update(event, next(seconds))

    update(WorkerReady("cuda:0", "a GPU", Memory(10, 80)))
    for i in range(9_000):
        update(BatchDone("cuda:0", shard, (i,), 7, Memory(20 + i % 3, 80)))
    update(ShardDone("cuda:0", shard, 1.0, 0))
    update(WorkerLost("cuda:0", "it died", shard))
    update(WorkerLost("cuda:1", "it did not start", is_final=True))
    update(ShardFailed("cuda:0", shard, "bad"))
    for n_tokens in range(120):
        update(BatchSizeReduced("cuda:0", n_tokens))
    embedding.timeline.append_to(tmp_path / "machine.json")
    (start,) = DeviceTimeline.read_all(tmp_path / "machine.json")
    assert start.seconds_per_bin == 32  # 4,500 seconds in 240 bins at most
    series = start.devices["cuda:0"]
    assert sum(series.tokens) == 63_000
    assert set(series.tokens[1:-1]) == {64 * 7}
    assert max(series.memory) == 22
    assert series.n_shards == 1
    assert (start.n_losses, start.n_failed_shards, start.n_reductions) == (2, 1, 120)
    assert start.lost_devices == ["cuda:1 was taken out of the run: it did not start"]
    for _ in range(20):
        DeviceTimeline().append_to(tmp_path / "machine.json")
    assert [start.devices for start in DeviceTimeline.read_all(tmp_path / "machine.json")] == [
        {}
    ] * 20


def test_report_names_lost_devices(tmp_path):
    recipe = {"command": "predict", "encoders": [{"model": "esm2"}]}
    folder = write_table(tmp_path / "run", [call("a", 0.99)], recipe=recipe)
    embedding = EmbeddingProgress()
    embedding.update(WorkerLost("cuda:0", "it was replaced"), 1.0)
    embedding.update(WorkerLost("cuda:1", EVIL, is_final=True), 2.0)
    embedding.timeline.append_to(folder / "machine.json")
    DeviceTimeline().append_to(folder / "machine.json")  # a resume without losses
    [line] = embedding.lost_devices
    page = Page(report_folder(folder))
    assert f"workers lost 2 device lost {line} batches" in page.words
    assert EVIL in line and EVIL not in page.source


def test_every_start_of_a_run_is_shown(make_config, tiny, contigs):
    config = make_config(contigs)
    run_inline(config, tiny.head)
    rundir = open_run_dir(config.output)
    for path in rundir.features.iterdir():
        path.unlink()
    run_inline(again(config, resume=True), tiny.head)
    starts = DeviceTimeline.read_all(rundir.machine)
    assert len(starts) == 2
    n_tokens = json.loads(rundir.manifest.read_text())["counts"]["n_tokens"]
    assert [sum(start.devices["cpu"].tokens) for start in starts] == [n_tokens] * 2
    assert {"speed0", "memory0", "speed1", "memory1"} == Page(rundir.report).data["charts"].keys()


def test_infinite_figures_are_left_out(tmp_path):
    folder = write_table(tmp_path / "run", [call("a", 0.99)])
    stored = json.loads((folder / "run.json").read_text())
    seconds = {STAGES[0]: 10**400, STAGES[2]: float("inf")}
    cut_scores = [[float("inf"), 0.5], [10**400, 0.5], [500, float("nan")]]
    counts = {**stored.get("counts", {}), "seconds": seconds, "cut_scores": cut_scores}
    write_run_json(folder, {**stored, "counts": counts})
    assert Page(report_folder(folder)).words


def test_pipe_in_place_of_a_log_is_not_read(tmp_path):
    folder = write_table(tmp_path / "run", [call("a", 0.99)])
    for name in ("virnucpro.log", "machine.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    with within(10):
        assert Page(report_folder(folder)).words


def start_with(tokens: str) -> str:
    """Write a device record with one start of one device."""
    device = f'"description": "", "n_shards": 1, "tokens": {tokens}'
    zeros = '"n_losses": 0, "n_reductions": 0, "n_failed_shards": 0'
    start = f'"seconds_per_bin": 1, "seconds": 1, "devices": {{"cpu": {{{device}, "memory": [1]}}}}'
    return f'{{"starts": [{{{start}, {zeros}}}]}}'


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"starts": [{"seconds_per_bin": 0}]}', '{"starts": 1}'),
        *map(start_with, ["[Infinity]", "[NaN]", "[-1]", f"[{10**400}]", "[1, 2]"]),
    ],
)
def test_damaged_device_record_is_ignored(tmp_path, text):
    folder = write_table(
        tmp_path / "run",
        [call("a", 0.99)],
        recipe={"command": "predict", "encoders": [{"model": "esm2"}]},
    )
    (folder / "machine.json").write_text(start_with("[7]"))
    assert DeviceTimeline.read_all(folder / "machine.json")[0].devices["cpu"].tokens == [7]
    (folder / "machine.json").write_text(text)
    assert "This run kept no record of its devices." in Page(report_folder(folder)).words
