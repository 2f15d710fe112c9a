"""The door of the encoders: a family is one module and one line, and a run can have several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import run_inline, vectors

from virnucpro.config import EncoderSpec, RunConfig
from virnucpro.encoders.base import FAMILIES, Family
from virnucpro.engine.events import ShardDone
from virnucpro.errors import UsageError
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.translate import chunk_record, translate_six_frames

TOY = EncoderSpec(
    family="toy",
    model="counts",
    sha256="1" * 64,
    layer=1,
    pooling="mean",
    precision="fp32",
    dim=4,
    reads="dna",
)


@pytest.fixture
def toy_config(make_config, monkeypatch) -> Callable[..., RunConfig]:
    """An extraction by the toy encoder alone."""
    monkeypatch.setitem(FAMILIES, "toy", Family("toy_encoder", reads="dna", extra_tokens=0))

    def make(*inputs: Path, **changes: object) -> RunConfig:
        config = make_config(*inputs, command="extract", **changes)
        return replace(config, recipe=replace(config.recipe, encoders=(TOY,)))

    return make


def bases_by_frame(fasta: Path) -> dict[str, str]:
    frames = {}
    for record in read_fasta(fasta):
        if set(record.sequence) <= set("ACGT"):
            chunks = list(chunk_record(record, 300))
            frames |= {orf.id: orf.bases for orf in translate_six_frames(chunks)}
    return frames


def test_an_encoder_of_bases_is_one_class_and_one_line(toy_config, contigs, tmp_path):
    config = toy_config(contigs)
    assert run_inline(config, None).exit_code == 0
    frames = bases_by_frame(contigs)
    counts = {name: [bases.count(base) for base in "ACGT"] for name, bases in frames.items()}
    assert len(counts) > 100
    found = {name: row.tolist() for name, row in vectors(config.output).items()}
    assert found == counts


def test_a_run_of_another_family_is_resumed_where_it_ended(toy_config, contigs):
    run_inline(toy_config(contigs), None)
    run = toy_config(contigs, resume=True)
    before = vectors(run.output)
    (run.output / "features" / "000001.h5").unlink()
    events = []
    run_inline(run, None, events.append)
    assert [event.shard.index for event in events if isinstance(event, ShardDone)] == [1]
    after = vectors(run.output)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_frames_of_one_protein_and_other_bases_are_no_copies_for_an_encoder_of_bases(
    toy_config, make_config, tmp_path
):
    """GCA and GCG are alanine both."""
    fasta = tmp_path / "codons.fa"
    fasta.write_text(f">one\n{'GCA' * 100}\n>two\n{'GCG' * 100}\n>again\n{'GCA' * 100}\n")
    by_bases, by_protein = toy_config(fasta), make_config(fasta, output=tmp_path / "protein")
    n_distinct = len(set(bases_by_frame(fasta).values()))
    assert run_inline(by_bases, None).n_copies == len(vectors(by_bases.output)) - n_distinct
    assert run_inline(by_protein, None).n_copies > len(vectors(by_bases.output)) - n_distinct


def test_an_encoder_of_bases_refuses_proteins(toy_config, tmp_path):
    fasta = tmp_path / "proteins.faa"
    fasta.write_text(">p\nMKVLEFPQIL\n")
    with pytest.raises(UsageError, match="counts reads nucleotides; the input holds proteins"):
        run_inline(toy_config(fasta), None)
