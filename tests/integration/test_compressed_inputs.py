"""Inputs are identified by decompressed content, so they may be compressed between two starts."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_contigs
from run_helpers import again, run_inline, tables, write_run_json
from scorer_run_helpers import many, predict, write

from virnucpro.core.atomic_io import zstd
from virnucpro.core.errors import InputError, ResumeError
from virnucpro.sequences.input_scan import InputScan
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.recorded_inputs import check_recorded, join_inputs
from virnucpro.store.manifest_reader import read_manifest

Pack = Callable[[bytes], bytes]
PACKS: dict[str, Pack] = {
    ".fa": bytes,
    ".fa.gz": lambda text: gzip.compress(text, 1),
    "_again.fa.gz": lambda text: gzip.compress(text, 9),
    "_members.fa.gz": lambda text: gzip.compress(text[:7]) + gzip.compress(text[7:]),
    ".fa.bz2": bz2.compress,
    ".fa.xz": lzma.compress,
    ".fa.zst": zstd.compress,
    "_without_suffix": gzip.compress,
}
PAIRS = [
    (".fa", ".fa.gz"),
    (".fa.gz", ".fa"),
    (".fa.gz", ".fa.xz"),
    (".fa.gz", "_again.fa.gz"),
    ("_without_suffix", ".fa"),
]


def repack(path: Path, before: str, now: str) -> Path:
    """Replace a file by the same content in another compression format."""
    unpack = {".fa": bytes, ".fa.gz": gzip.decompress, "_without_suffix": gzip.decompress}
    text = unpack[before](path.read_bytes())
    path.unlink()
    repacked = path.with_name(f"in{now}")
    repacked.write_bytes(PACKS[now](text))
    return repacked


def hashed(*paths: Path) -> list[InputFile]:
    survey = InputScan(is_strict=True)
    files = [InputFile(str(path), sample=path.name) for path in paths]
    return survey.hash_texts(survey.hash(files, lambda _: None))


def inputs_of(run: Path) -> list[dict[str, object]]:
    return json.loads((run / "run.json").read_text())["inputs"]


def forget_text_hashes(run: Path) -> None:
    """Turn ``run.json`` into that of an earlier version, which only had hashes of files on disk."""
    stored = json.loads((run / "run.json").read_text())
    for file in stored["inputs"]:
        del file["text_sha256"], file["n_text_bytes"]
    write_run_json(run, stored)


# Identity


@pytest.mark.parametrize("suffix", PACKS)
def test_identity_does_not_depend_on_compression(tmp_path, suffix: str) -> None:
    text = b">a\nACGT\n>b\nGGTT\n"
    (tmp_path / "plain.fa").write_bytes(text)
    (tmp_path / f"packed{suffix}").write_bytes(PACKS[suffix](text))
    plain, packed = hashed(tmp_path / "plain.fa", tmp_path / f"packed{suffix}")
    assert packed.identity == plain.identity == plain.sha256
    assert packed.spans(2**20) == plain.spans(2**20)
    assert packed.has_content_of(plain)
    assert plain.text_sha256 == "", "the hash on disk is enough"


def test_other_content_has_another_identity(tmp_path) -> None:
    (tmp_path / "a.fa.gz").write_bytes(gzip.compress(b">a\nACGT\n"))
    (tmp_path / "b.fa.gz").write_bytes(gzip.compress(b">a\nACGA\n"))
    one, other = hashed(tmp_path / "a.fa.gz", tmp_path / "b.fa.gz")
    assert one.identity != other.identity
    assert not one.has_content_of(other)


def test_known_text_hash_is_not_computed_again(tmp_path) -> None:
    path = tmp_path / "a.fa.gz"
    path.write_bytes(gzip.compress(b">a\nACGT\n"))
    (recorded,) = hashed(path)
    (present,) = InputScan(is_strict=True).hash([InputFile(str(path))], lambda _: None)
    assert present.text_sha256 == ""
    seen: list[int] = []
    survey = InputScan(is_strict=True, on_text_bytes=seen.append)
    (known,) = survey.hash_texts([present.with_text_hash_of([recorded])])
    assert known.text_sha256 == recorded.text_sha256
    assert not seen
    survey.hash_texts([present])
    assert seen == [len(b">a\nACGT\n")]


def test_other_format_is_not_decompressed_to_be_hashed(tmp_path) -> None:
    path = tmp_path / "reads.bam"
    path.write_bytes(gzip.compress(b"BAM\1" + bytes(1_000_000)))
    seen: list[int] = []
    survey = InputScan(is_strict=True, on_text_bytes=seen.append)
    (file,) = survey.hash_texts(survey.hash([InputFile(str(path))], lambda _: None))
    assert not seen
    assert file.text_sha256 == ""
    with pytest.raises(InputError, match="this is BAM"):
        list(file.read())


def test_damaged_input_is_refused_by_its_text_hash(tmp_path) -> None:
    path = tmp_path / "a.fa.gz"
    path.write_bytes(gzip.compress(b">a\nACGT\n" * 1000)[:-9])
    with pytest.raises(InputError, match=r"a\.fa\.gz: cannot be decompressed"):
        hashed(path)


def test_repacked_file_at_its_old_path_is_unchanged(tmp_path) -> None:
    path = tmp_path / "a.fa.gz"
    text = b">a\nACGT\n" * 1000
    path.write_bytes(gzip.compress(text, 1))
    (recorded,) = hashed(path)
    path.write_bytes(gzip.compress(text, 9))
    (checked,) = check_recorded([InputFile(**{**vars_of(recorded), "stamp": None})])
    assert checked.sha256 != recorded.sha256
    assert checked.identity == recorded.identity
    path.write_bytes(gzip.compress(text[1:], 9))
    with pytest.raises(ResumeError, match="gone or has changed"):
        check_recorded([InputFile(**{**vars_of(recorded), "stamp": None})])


def vars_of(file: InputFile) -> dict[str, object]:
    return {name: getattr(file, name) for name in InputFile.__dataclass_fields__}


def test_join_reads_the_present_file(tmp_path) -> None:
    text = b">a\nACGT\n"
    for name, pack in (("a.fa", bytes), ("a.fa.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(text))
    plain, packed = hashed(tmp_path / "a.fa", tmp_path / "a.fa.gz")
    (joined,) = join_inputs([plain], [packed])
    assert (joined.path, joined.sha256, joined.sample) == (packed.path, packed.sha256, "a.fa")


# Resume


@pytest.mark.parametrize(("before", "now"), PAIRS)
def test_resume_takes_a_repacked_input(tmp_path, before: str, now: str) -> None:
    path = tmp_path / f"in{before}"
    path.write_bytes(PACKS[before](write(tmp_path / "text.fa", **many()).read_bytes()))
    predict(path, to=tmp_path / "run")
    repacked = repack(path, before, now)
    expected = tmp_path / "expected"
    predict(repacked, to=expected, preset="sensitive")
    predict(repacked, to=tmp_path / "run", preset="sensitive", resume=True)
    before_tables = tables(expected)
    now_tables = tables(tmp_path / "run")
    sample, other = (inputs_of(run)[0]["sample"] for run in (expected, tmp_path / "run"))
    for name, text in before_tables.items():
        renamed = text.replace(f"\t{sample}\t".encode(), f"\t{other}\t".encode())
        assert now_tables[name] == renamed
    log = (tmp_path / "run/virnucpro.log").read_text()
    assert f"{repacked} has the content of {path}, and is read in its place" in log
    assert "not added" not in log and "samples renamed" not in log and "stays in" not in log
    (file,) = inputs_of(tmp_path / "run")
    assert file["path"] == str(repacked)
    assert file["generation"] == 0


def test_compressed_input_keeps_slices_and_vectors(make_config, tiny, tmp_path) -> None:
    plain = write_contigs(tmp_path / "in.fa")
    config = make_config(plain, bytes_per_slice=8_000, keep_intermediate=True)
    first = run_inline(config, tiny.head)
    assert first.n_tokens
    expected = tables(config.output)
    slices = len(list((config.output / "shards").glob("*.plan")))
    assert slices > 1
    packed = repack(plain, ".fa", ".fa.gz")
    second = run_inline(again(config, input=(packed,), resume=True), tiny.head)
    assert second.n_tokens == 0
    assert tables(config.output) == expected
    assert len(list((config.output / "shards").glob("*.plan"))) == slices


def test_plan_of_a_plain_input_serves_a_packed_one(tmp_path) -> None:
    plain = write(tmp_path / "in.fa", **many())
    predict(plain, to=tmp_path / "expected")
    predict(plain, to=tmp_path / "run", plan_only=True)
    predict(repack(plain, ".fa", ".fa.gz"), to=tmp_path / "run", resume=True)
    assert tables(tmp_path / "run") == tables(tmp_path / "expected")


@pytest.mark.parametrize(("before", "now"), [(".fa", ".fa.gz"), (".fa.gz", None), (".fa", None)])
def test_resume_reads_run_json_without_text_hash(tmp_path, before: str, now: str | None) -> None:
    path = tmp_path / f"in{before}"
    path.write_bytes(PACKS[before](write(tmp_path / "text.fa", **many()).read_bytes()))
    predict(path, to=tmp_path / "run")
    expected = tables(tmp_path / "run")
    forget_text_hashes(tmp_path / "run")
    predict(repack(path, before, now) if now else path, to=tmp_path / "run", resume=True)
    assert tables(tmp_path / "run") == expected


@pytest.mark.parametrize(("add", "hint"), [(False, "--add"), (True, "compressed")])
def test_resume_refuses_other_content_when_packed(tmp_path, add: bool, hint: str) -> None:
    records = many()
    plain = write(tmp_path / "in.fa", **records)
    predict(plain, to=tmp_path / "run")
    plain.unlink()
    other = write(tmp_path / "other.fa", **{name: bases[1:] for name, bases in records.items()})
    packed = tmp_path / "in.fa.gz"
    packed.write_bytes(gzip.compress(other.read_bytes()))
    with pytest.raises(ResumeError) as caught:
        predict(packed, to=tmp_path / "run", resume=True, add=add)
    assert hint in caught.value.hint


def test_packed_copy_of_an_input_is_reported(tmp_path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    plain = write(folder / "a.fa", **many())
    (folder / "a.fa.gz").write_bytes(gzip.compress(plain.read_bytes()))
    predict(folder, to=tmp_path / "run")
    log = (tmp_path / "run/virnucpro.log").read_text()
    assert f"{plain} and {plain}.gz have the same content" in log


def test_manifest_keeps_the_text_hash(tmp_path) -> None:
    packed = tmp_path / "in.fa.gz"
    text = write(tmp_path / "text.fa", **many()).read_bytes()
    packed.write_bytes(gzip.compress(text))
    predict(packed, to=tmp_path / "run")
    manifest = read_manifest(tmp_path / "run/run.json", tmp_path / "run/inputs")
    assert manifest is not None
    (file,) = manifest.inputs
    assert file.n_text_bytes == len(text)
    assert file.identity == hashed(tmp_path / "text.fa")[0].sha256
