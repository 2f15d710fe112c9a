"""Shards list their ORFs in order, and each protein to embed once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from virnucpro.core.recipe import Alphabet, EncoderSpec, Recipe
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Orf
from virnucpro.sequences.orfs import Orfs
from virnucpro.sequences.translate import Chunk, Chunks, translate_chunks, translate_six_frames
from virnucpro.store.shard_files import ShardWriter, digests_of, read_shard, shard_size

READS = st.sampled_from([(Alphabet.PROTEIN,), (Alphabet.DNA,), (Alphabet.DNA, Alphabet.PROTEIN)])
names = st.text("aé|_=1", min_size=1, max_size=6)
texts = st.lists(st.tuples(names, st.text("ACGTacgN", min_size=3, max_size=60)), max_size=9)


def chunks_of(pairs: Sequence[tuple[str, str]]) -> list[Chunk]:
    return [Chunk(f"{name}_chunk_1", name, 10 * i, text) for i, (name, text) in enumerate(pairs)]


def make_writer(folder: Path, reads: Sequence[Alphabet]) -> ShardWriter:
    encoder = {"sha256": "", "layer": 1, "pooling": "mean", "precision": "fp32", "dim": 4}
    recipe = Recipe(
        command="extract",
        input_type="nucleotide",
        chunk_size=500,
        min_length=0,
        encoders=tuple(EncoderSpec(model=name, reads=name, **encoder) for name in reads),
        residues_per_shard=40,
    )
    return ShardWriter(SafeDir(folder), folder, recipe)


# A second implementation of the rules, one ORF at a time.


def naive_text(orf: Orf, reads: Sequence[Alphabet]) -> str:
    return " ".join(orf.text(alphabet) for alphabet in reads)


def naive_shards(orfs: Sequence[Orf], reads: Sequence[Alphabet]) -> list[list[Orf]]:
    """Return the ORFs of each shard, with the numbers of originals."""
    originals: dict[str, int] = {}
    shards: list[list[Orf]] = [[]]
    n_residues = [0, 0]  # of the open shard's ORFs to embed, and of its copies
    for orf in orfs:
        text = naive_text(orf, reads)
        original = originals.get(text)
        originals.setdefault(text, len(originals))
        shards[-1].append(orf._replace(copy_of=original))
        n_residues[original is not None] += len(orf.protein)
        if max(n_residues) >= shard_size(len(shards) - 1, 40):
            shards.append([])
            n_residues = [0, 0]
    return list(filter(None, shards))


def naive_entry(orf: Orf) -> str:
    copy = "" if orf.copy_of is None else f" copy={orf.copy_of}"
    bases = f" bases={orf.bases}" if orf.bases else ""
    return (
        f">{orf.id} chunk={orf.chunk_id} record={orf.record_id} start={orf.start} end={orf.end} "
        f"strand={orf.strand}{bases}{copy}\n{orf.protein}\n"
    )


@given(texts, st.integers(0, 9), READS)
@settings(deadline=None)
def test_shards_have_their_orfs_in_order(pairs, n_first, reads):
    chunks = chunks_of(pairs + pairs[::2])  # with copies
    orfs = translate_six_frames(chunks)
    with TemporaryDirectory() as folder:
        writer = make_writer(Path(folder), reads)
        for part in (chunks[:n_first], chunks[n_first:]):
            writer.add_orfs(translate_chunks(Chunks.from_chunks(part)))
        writer.flush()
        expected = naive_shards(orfs, reads)
        assert [shard.path.read_text() for shard in writer.shards] == [
            "".join(map(naive_entry, shard)) for shard in expected
        ]
        assert [read_shard(shard) for shard in writer.shards] == expected
        assert [shard.n_embedded for shard in writer.shards] == [
            sum(orf.copy_of is None for orf in shard) for shard in expected
        ]
        copies = [orf for shard in expected for orf in shard if orf.copy_of is not None]
        assert writer.n_copies == len(copies)
        assert writer.n_copied_residues == sum(len(orf.protein) for orf in copies)


@given(st.lists(st.text("ACDEFGHIKLMNPQRSTVWYX", max_size=300), max_size=5))
@settings(deadline=None)
def test_digests_of_proteins(proteins):
    orfs = Orfs.from_proteins([str(i) for i in range(len(proteins))], proteins)
    digests = digests_of(orfs, [Alphabet.PROTEIN]).astype("<u8").tobytes()
    assert digests == b"".join(hash_text(protein) for protein in proteins)


@given(texts, READS)
@settings(deadline=None)
def test_digests_of_frames(pairs, reads):
    orfs = translate_chunks(Chunks.from_chunks(chunks_of(pairs)))
    expected = [hash_text(naive_text(orf, reads)) for orf in orfs.to_list()]
    assert digests_of(orfs, reads).astype("<u8").tobytes() == b"".join(expected)


def hash_text(text: str) -> bytes:
    return hashlib.blake2s(text.encode()).digest()[:16]


def test_proteins_as_columns():
    orfs = Orfs.from_proteins(["a", "b é"], ["MK", ""])
    assert orfs.to_list() == [
        Orf("a", "a", "a", 0, 2, ".", "MK"),
        Orf("b é", "b é", "b é", 0, 0, ".", ""),
    ]
    assert np.array_equal(orfs.proteins.lengths, [2, 0])
