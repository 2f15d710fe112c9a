"""An input file is opened few times, however it is packed."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from open_counter import counted_opens

from virnucpro.core.atomic_io import zstd
from virnucpro.sequences.input_scan import InputScan
from virnucpro.sequences.inputs import InputFile

PACKS: dict[str, Callable[[bytes], bytes]] = {
    ".fa": bytes,
    ".fa.gz": gzip.compress,
    ".fa.bz2": bz2.compress,
    ".fa.zst": zstd.compress,
}


@pytest.fixture(params=PACKS)
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"in{request.param}"
    path.write_bytes(PACKS[request.param](b">a x\nACGT\n>b\nGGTT\n"))
    return path


def hashed(path: Path) -> InputFile:
    survey = InputScan(is_strict=True)
    [file] = survey.hash_texts(survey.hash([InputFile(str(path), sample="in")], lambda _: None))
    return file


def test_reading_opens_a_file_once(packed: Path) -> None:
    file = hashed(packed)
    with counted_opens() as opens:
        assert [record.id for record in file.read()] == ["a", "b"]
    assert opens[str(packed)] == 1


def test_survey_opens_a_file_once(packed: Path, tmp_path: Path) -> None:
    """One pass hashes it on disk and decompressed, and reads ids and letters."""
    other = tmp_path / "other.fa"
    other.write_bytes(b">c\nACGT\n")
    files = [InputFile(str(path), sample=path.name) for path in (packed, other)]
    survey = InputScan()
    with counted_opens() as opens:
        files = survey.run(survey.hash(files, lambda _: None, reads_records=True))
        assert survey.decide_type(files) == ("nucleotide", files)
        files = survey.hash_texts(files)
    assert opens[str(packed)] == opens[str(other)] == 1
    assert files[0] == replace(hashed(packed), sample=packed.name)
    assert (len(survey.digests), survey.n_letters) == (3, 12)
