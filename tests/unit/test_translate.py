"""Chunks and frames equal those of the original VirNucPro, byte by byte, and locate their bases."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnucpro.core.recipe import Recipe
from virnucpro.core.types import FastaRecord, Orf, Records
from virnucpro.sequences.fasta import read_fasta, write_record
from virnucpro.sequences.genetic_code import GENETIC_CODES, GeneticCode
from virnucpro.sequences.orfs import FRAMES, Texts
from virnucpro.sequences.screen import reject_reason, reject_reasons
from virnucpro.sequences.translate import Chunk, translate_six_frames

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = pytest.mark.parametrize("case", ["random", "edge_format", "no_orf"])
SIZES = pytest.mark.parametrize("size", [300, 500])

# The standard genetic code as NCBI prints it: the codons in the order TTT TTC TTA TTG TCT ...
NCBI_ORDER = [a + b + c for a in "TCAG" for b in "TCAG" for c in "TCAG"]
NCBI_CODE = "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
CODE = dict(zip(NCBI_ORDER, NCBI_CODE, strict=True))
OPEN_CODONS = [codon for codon, letter in CODE.items() if letter != "*"]

any_letters = st.text("ACGTNacgtnRYSWKMBDHVrywkUu-*", max_size=400)
open_frames = st.lists(st.sampled_from(OPEN_CODONS), max_size=130).map("".join)
sequences = st.one_of(any_letters, open_frames, st.tuples(open_frames, any_letters).map("".join))
chunk_sizes = st.integers(30, 150)


def cut(record: FastaRecord, size: int) -> list[Chunk]:
    return list(Chunk.from_record(record, size))


def golden(case: str, size: int) -> tuple[list[Chunk], list[Orf]]:
    records = read_fasta(GOLDEN / case / "input.fa")
    chunks = [chunk for record in records for chunk in Chunk.from_record(record, size)]
    return chunks, translate_six_frames(chunks)


def fasta(path: Path) -> list[tuple[str, str]]:
    """Return the ids and sequences of a file by the original, with one line for each."""
    lines = path.read_text().splitlines()
    return [(name[1:], text) for name, text in zip(lines[::2], lines[1::2], strict=True)]


def frames_of_dna(chunks: list[Chunk]) -> Callable[[str], bool]:
    """Return True if a frame comes from a chunk without U, whose codons the original loses."""
    rna = {
        f"{chunk.id}{frame}"
        for chunk in chunks
        if "U" in chunk.sequence.upper()
        for frame in FRAMES
    }
    return lambda frame_id: frame_id not in rna


# A second implementation of the rules, one base at a time, from their description.


def naive_overlaps(length: int, size: int) -> list[int]:
    """Return how many bases each chunk shares with the next."""
    n_chunks = -(-length // size)
    if n_chunks == 0:
        return []
    spare = n_chunks * size - length
    narrow = spare // n_chunks
    n_wide = spare - narrow * (n_chunks - 1)
    return [narrow + 1 if i < n_wide else narrow for i in range(n_chunks - 1)]


def naive_chunks(sequence: str, size: int) -> list[str]:
    overlaps = naive_overlaps(len(sequence), size)
    starts = [i * size - sum(overlaps[:i]) for i in range(len(overlaps) + 1)]
    return [sequence[start : min(len(sequence), start + size)] for start in starts if sequence]


def naive_reverse(sequence: str) -> str:
    complement = {"A": "T", "C": "G", "G": "C", "T": "A", "U": "A"}
    return "".join(complement.get(base, base) for base in reversed(sequence.upper()))


def naive_translate(bases: str, code: Mapping[str, str] = CODE) -> str:
    codons = (bases[i : i + 3] for i in range(0, len(bases) - 2, 3))
    return "".join(code.get(codon.replace("U", "T"), "") for codon in codons)


def naive_frames(chunk: Chunk, code: Mapping[str, str] = CODE) -> list[Orf]:
    """Return the frames that are kept, with T for U."""
    kept = []
    sequence = chunk.sequence.upper().replace("U", "T")
    for sign, strand in (("+", sequence), ("-", naive_reverse(sequence))):
        for offset in range(3):
            protein = naive_translate(strand[offset:], code)
            if protein and "*" not in protein:
                frame_id = f"{chunk.id}{'F' if sign == '+' else 'R'}{offset + 1}"
                n_bases = 3 * (len(strand[offset:]) // 3)
                first = offset if sign == "+" else len(strand) - offset - n_bases
                start = chunk.start + first
                bases = strand[offset : offset + 1 + 3 * len(protein)]
                kept.append(
                    Orf(
                        *(frame_id, chunk.id, chunk.record_id, start, start + n_bases),
                        *(sign, protein, bases),
                    )
                )
    return kept


@CASES
@SIZES
def test_chunks_equal_the_original(case: str, size: int) -> None:
    chunks, _ = golden(case, size)
    out = io.StringIO()
    for chunk in chunks:
        write_record(out, chunk.id, chunk.sequence)
    assert out.getvalue().encode() == (GOLDEN / case / f"c{size}" / "chunked.fa").read_bytes()


@CASES
@SIZES
def test_proteins_equal_the_original(case: str, size: int) -> None:
    chunks, orfs = golden(case, size)
    dna = frames_of_dna(chunks)
    found = [orf for orf in orfs if dna(orf.id)]
    for name, texts in (
        ("identified_protein.faa", [(orf.id, orf.protein) for orf in found]),
        ("identified_nucleotide.fa", [(orf.id, orf.bases) for orf in found]),
    ):
        expected = fasta(GOLDEN / case / f"c{size}" / name)
        assert texts == [entry for entry in expected if dna(entry[0])]


@given(sequences, chunk_sizes)
@settings(deadline=None)
def test_chunk_rules_hold_for_any_sequence(sequence: str, size: int) -> None:
    chunks = cut(FastaRecord("r", "r", sequence), size)
    assert [chunk.sequence for chunk in chunks] == naive_chunks(sequence, size)
    assert all(chunk.sequence == sequence[chunk.start : chunk.end] for chunk in chunks)
    assert [chunk.id for chunk in chunks] == [f"r_chunk_{i + 1}" for i in range(len(chunks))]


@given(
    st.lists(st.tuples(sequences, st.integers(0, 2**40)), max_size=4),
    st.sampled_from(GENETIC_CODES),
)
@settings(deadline=None)
def test_frames_follow_the_rules(texts: list[tuple[str, int]], number: int) -> None:
    code = GeneticCode.from_number(number)
    chunks = [Chunk(f"c{i}", f"r{i}", start, text) for i, (text, start) in enumerate(texts)]
    expected = [orf for chunk in chunks for orf in naive_frames(chunk, code.meanings)]
    assert translate_six_frames(chunks, code) == expected


@given(st.text("ACGTNacgtuRYK", max_size=10))
def test_frames_of_short_chunks(sequence: str) -> None:
    chunk = Chunk("c", "r", 7, sequence)
    assert translate_six_frames([chunk]) == naive_frames(chunk)


@given(st.lists(sequences, max_size=6), st.data())
@settings(deadline=None)
def test_chunk_ignores_its_neighbours(texts: list[str], data: st.DataObject) -> None:
    chunks = [Chunk(f"c{i}", "r", 100 * i, text) for i, text in enumerate(texts)]
    place = data.draw(st.integers(0, len(chunks)))
    alone = [orf for chunk in chunks for orf in translate_six_frames([chunk])]
    assert translate_six_frames(chunks) == alone
    assert translate_six_frames(chunks[:place]) + translate_six_frames(chunks[place:]) == alone


@given(sequences, chunk_sizes)
@settings(deadline=None)
def test_frame_coordinates_find_its_bases(sequence: str, size: int) -> None:
    sequence = sequence * 3  # several chunks
    for orf in translate_six_frames(cut(FastaRecord("r", "r", sequence), size)):
        span = sequence[orf.start : orf.end].upper()
        assert orf.record_id == "r" and 0 <= orf.start < orf.end <= len(sequence)
        assert len(span) % 3 == 0
        assert naive_translate(naive_reverse(span) if orf.strand == "-" else span) == orf.protein
        assert naive_translate(orf.coding_sequence(sequence).upper()) == orf.protein


def test_ids_are_never_parsed() -> None:
    (chunk,) = cut(FastaRecord("a_chunk_3F1", "a_chunk_3F1", "ATGGCTAGC"), 300)
    orf = translate_six_frames([chunk])[0]
    assert (orf.id, orf.chunk_id, orf.record_id) == (
        "a_chunk_3F1_chunk_1F1",
        "a_chunk_3F1_chunk_1",
        "a_chunk_3F1",
    )


@pytest.mark.parametrize("letters", ["ACGTN", "ACGT*!"])  # no letter is wrong; some may be
@given(data=st.data())
@settings(max_examples=25)
def test_record_is_skipped_alone_and_in_a_block(letters, data):
    texts = data.draw(st.lists(st.text(letters, max_size=9), max_size=5))
    records = [FastaRecord(f"r{i}", f"r{i}", text) for i, text in enumerate(texts)]
    recipe = Recipe(
        command="predict", input_type="nucleotide", chunk_size=500, min_length=5, encoders=()
    )
    alone = {place: reject_reason(record, recipe) for place, record in enumerate(records)}
    left_out = {place: found for place, found in alone.items() if found[0] is not None}
    assert reject_reasons(Records.from_records(records), recipe) == left_out


@pytest.mark.parametrize("lengths", [[3, 3], [4], [6, -1], []])
def test_letters_of_other_lengths_are_no_texts(lengths: list[int]) -> None:
    letters = np.frombuffer(b"MKLVA", dtype=np.uint8)
    assert Texts.from_lengths(letters, np.array([2, 0, 3])).to_strings() == ["MK", "", "LVA"]
    with pytest.raises(ValueError, match="5 letters"):
        Texts.from_lengths(letters, np.array(lengths, dtype=np.int32))
