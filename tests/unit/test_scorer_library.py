"""The C library computes the same as plain Python, and a missing library is reported."""

from __future__ import annotations

import ctypes
import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from feature_extraction import featurize_pieces
from hypothesis import example, given
from hypothesis import strategies as st
from scorer_reference import (
    CODES,
    PIECE,
    common_words,
    features_of,
    kept_of,
    layout_of,
    letters_of,
    longest_open,
    owner_of,
    random_text,
    table_of,
    terminal_repeats,
)

from virnucpro.core import native as library
from virnucpro.core.errors import UnavailableError
from virnucpro.core.types import reverse_complement
from virnucpro.sequences import open_codes
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.sequences.open_codes import encode
from virnucpro.viral import host_markers as landmarks
from virnucpro.viral.features import (
    WindowFeatures,
    layout_features,
)
from virnucpro.viral.hmm import RegionModel, viral_path
from virnucpro.viral.taxonomy import topologies
from virnucpro.viral.windows import Windows, find_reversed, find_stretches, is_reverse_first

ROOTS = range(WindowFeatures.PALINDROMES.start)
EXACT = [
    *ROOTS,
    *range(WindowFeatures.GC, WindowFeatures.GC + 3),
]  # columns without a logarithm that C and Python may round apart


# of both strands, one shorter than a gene, with a stop in each frame between them
GENES = "TAGTTAATTAACTAA".join(
    ("CAG" * 70, "ATGGCCCAG" * 40, "CTGGGCCAT" * 30, "ATGGCC" * 20, "GCC" * 10)
)
MODEL = RegionModel.load()


@given(st.lists(PIECE, min_size=1, max_size=3), CODES)
@example([""], STANDARD)
@example(["A", "AC", "ACG", "ACGT", "ACGTA", "N", "NN", "TAATAATAA"], STANDARD)
@example(["N" * 700, "A" * 2500, "TAA" * 300, "TCA" * 300, "GC" * 900], STANDARD)
def test_features_equal_plain_python(texts: list[str], code) -> None:
    features, is_blank = featurize_pieces(Windows.from_sequences(texts), table_of(texts), code)
    expected = np.stack([features_of(text, code, owner_of) for text in texts])
    # roots and shares: rounded to float32 twice and once; 6e-8 each time, of 1 at most
    np.testing.assert_allclose(features[:, EXACT], expected[:, EXACT], rtol=1.2e-7, atol=0)
    # logarithms are of values below 2^16, so below 16: half an ulp of float32 there is 5e-7
    np.testing.assert_allclose(features, expected, rtol=0, atol=5e-7)
    assert is_blank.tolist() == [not set(letters_of(text)) & set("ACGT") for text in texts]


@given(st.lists(PIECE, min_size=1, max_size=3), CODES)
@example(["", "A", "GC" * 2000, GENES], STANDARD)
def test_layout_equals_plain_python(texts: list[str], code) -> None:
    found = layout_features(Windows.from_sequences(texts), code)
    # float64 sums of at most 60 values below 2^16
    expected = [layout_of(text, code) for text in texts]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@given(PIECE, CODES, st.integers(1, 40))
def test_kept_stretches_equal_plain_python(text: str, code, shortest: int) -> None:
    piece, strand, start, n_codons = find_stretches(
        Windows.from_sequences(["TAGTTAACC", text]), code, shortest
    )
    kept, _ = kept_of(letters_of(text), code, shortest)
    rows = zip(n_codons[piece == 1], strand[piece == 1], start[piece == 1], strict=True)
    assert [tuple(map(int, row)) for row in rows] == kept


@given(st.integers(0, 20), st.integers(0, 900), st.integers(0, 900))
def test_piece_features_ignore_its_position(seed: int, before: int, behind: int) -> None:
    text = random_text(600, seed, 0.02)
    around = random_text(before, 1, 0.0) + text + random_text(behind, 2, 0.0)
    place = Windows(encode(around), np.array([before]), np.array([600]))
    words = table_of([text])
    inside, alone = (
        featurize_pieces(pieces, words)[0] for pieces in (place, Windows.from_sequences([text]))
    )
    np.testing.assert_array_equal(inside, alone)
    assert inside.shape == (1, WindowFeatures.N_FEATURES)
    assert inside[0, :64].any()


@given(PIECE, CODES, st.integers(1, 400), st.integers(1, 400))
def test_piece_features_ignore_earlier_pieces(text: str, code, size: int, other_size: int) -> None:
    row = Windows.from_sequences([text])
    words = table_of([text])

    def cut_into(pieces: Windows, size: int) -> Windows:
        starts = np.arange(0, len(text), size, dtype=np.int64)
        return pieces.select(starts, np.minimum(size, len(text) - starts))

    featurize_pieces(cut_into(row, other_size), words, code)
    featurize_pieces(cut_into(row, other_size), table_of([]), code)
    found, _ = featurize_pieces(cut_into(row, size), words, code)
    alone, _ = featurize_pieces(cut_into(Windows.from_sequences([text]), size), words, code)
    np.testing.assert_array_equal(found, alone)
    rising = cut_into(row, size)
    falling = row.select(rising.starts[::-1].copy(), rising.lengths[::-1].copy())
    np.testing.assert_array_equal(featurize_pieces(falling, words, code)[0], alone[::-1])


@given(PIECE, st.text("ACGTN", max_size=40), st.sampled_from(["", "same", "other"]), st.integers())
@example("ACGTTGCAAGTCCATGGACTAAC", "", "same", 3)
@example("acgttgcaagUccaUggacTaacgtattgc", "ACNNT" * 9, "other", 0)
@example("ACGT" * 5, "A", "", 0)
def test_terminal_repeats_equal_plain_python(text: str, inner: str, end: str, changed: int) -> None:
    last = {"": "", "same": text, "other": reverse_complement(text)}[end]
    if last:
        place = changed % len(last)
        last = last[:place] + "A" + last[place + 1 :]
    sequence = text + inner + last
    direct, inverted = terminal_repeats(sequence)
    expected = "DTR" if direct else "ITR" if inverted else "linear"
    found = topologies(Windows.from_sequences([sequence] * 3), [False, True, None])
    assert found == [(expected, direct or inverted), ("circular", direct), ("", 0)]


@given(st.lists(PIECE, min_size=1, max_size=3))
@example(["TGATAGTAA" * 100, "TCACTATTA" * 100, "A", ""])
@example(["TA" * 11 + "C" * 18, "TA" * 10 + "C" * 20])  # 45 %, and half
def test_open_stretches_equal_plain_python(
    texts: list[str],
) -> None:
    counts, longest = open_codes._longest_open(texts)
    stops = [("TAA", "TAG", "TGA"), ("TAA", "TAG"), ("TAA", "TGA"), ("TGA",)]
    for text, found in zip(texts, longest.tolist(), strict=True):
        n_gc = sum(map(letters_of(text).count, "CG"))
        is_read = 20 * (n_gc - 1) <= 9 * len(text)
        assert found == [longest_open(text, of) if is_read else 0 for of in stops]
    assert counts.tolist() == [[*map(letters_of(text).count, "ACGT")] for text in texts]


def test_record_without_pieces_has_an_empty_path() -> None:
    nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
    assert [len(column) for column in viral_path(*nothing, MODEL)] == [0, 0]


@given(st.text("ACN", max_size=150), st.text("ACN", max_size=150), st.integers(0, 60))
def test_common_words_equal_plain_python(left: str, right: str, n_shared: int) -> None:
    shared = random_text(n_shared, n_shared, 0.0)
    left, right = left + shared + "C" + left[:9], right[:40] + shared + "G" + right[40:]
    found = landmarks._common_words(encode(left), encode(right)).tolist()
    assert list(map(tuple, found)) == common_words(left, right, 12, 301)


@given(
    st.text("AC", max_size=300),
    st.lists(st.text("AC", min_size=12, max_size=14), max_size=5),
)
def test_word_counts_equal_python(text: str, words: list[str]) -> None:
    text = "A" * 50 + text + "".join(words) * 2
    words += [*map(reverse_complement, words), "A" * 12]  # does not lie on itself
    counts = landmarks.RecordText(text).count_around(words, 0)[0].tolist()
    assert counts == [text.count(word) for word in words]


@given(
    st.text("ACN", max_size=300),
    st.lists(st.text("AC", min_size=12, max_size=14), min_size=1, max_size=5),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_indexed_word_counts_equal_python(
    text: str, words: list[str], first: int, n_behind: int
) -> None:
    """The last counts are from an index of the text, the others are not."""
    text = "A" * 50 + text + "".join(words) * 2
    words += [*map(reverse_complement, words), "A" * 12]
    end = len(text) - n_behind
    letters = np.frombuffer(text.encode(), np.uint8)
    block = landmarks._LetterBlock(letters)
    expected = [text.count(word, first, end) for word in words]
    while block.index is None:
        assert block.count(words, first, end).tolist() == expected
    assert block.count(words, first, end).tolist() == expected
    read_often = landmarks._LetterBlock(letters, n_expected=100)
    assert read_often.count(words, first, end).tolist() == expected
    assert read_often.index is not None


@given(st.text("ACGTN", min_size=1, max_size=40))
def test_paired_digits_equal_plain_python(text: str) -> None:
    pairs = {"AT", "TA", "CG", "GC"}
    axes = [i + j for i, one in enumerate(text) for j, two in enumerate(text) if one + two in pairs]
    n_paired = np.empty(1, dtype=np.int64)
    library.call("paired_digits", encode(text), len(text), n_paired)
    assert n_paired[0] == max(map(axes.count, axes), default=0)


def test_words_are_counted_in_bounded_memory() -> None:
    """The bases around a candidate are few, however long the record is."""
    n_around = landmarks._SEARCHED_BASES
    word = "GATTACAGATTACA"
    other = "CCCCGGGGTTTT"
    unit = "A" * 9_000
    text = f"{unit}{word}" * (5 * n_around // 9_014)
    record = landmarks.RecordText(text)
    tracemalloc.start()
    for middle in range(0, len(text), n_around // 3):
        counts, n_bases = record.count_around([word, other], middle)
        first = max(0, min(middle - n_around // 2, len(text) - n_around))
        assert n_bases == n_around
        assert counts.tolist() == [text.count(word, first, first + n_around), 0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4.1 * n_around, "two blocks as text and as letters"


def test_host_genes_in_a_part_are_those_of_its_bases() -> None:
    """They may cross the blocks that are read at once, but not the ends of the part."""
    word = landmarks.RIBOSOMAL_RNA[0]
    at_once = landmarks._BASES_AT_ONCE
    text = random_text(3_000, 3_000, 0.0) + "A" * (2 * at_once)
    places = [40, 1_000, 2_970, at_once + 30, at_once + 3_000]
    for place in places:
        text = f"{text[:place]}{word}{text[place + len(word) :]}"
    for part in (slice(None), slice(41, 2_980), slice(40, at_once + 40), slice(45, None)):
        start, end, _ = part.indices(len(text))
        expected = [n for n in places if start <= n and n + len(word) <= end]
        assert landmarks.ribosomal_rna(text, part) == expected
        shifted = [(start + a, start + b) for a, b in landmarks.host_genes(text[part])]
        assert landmarks.host_genes(text, part=part) == shifted


def test_long_reverse_complement_is_that_of_its_parts() -> None:
    text = random_text(5_000, 5_000, 0.01).upper() * 450
    pairs = {"A": "T", "C": "G", "G": "C", "T": "A", "U": "A"}
    expected = "".join(pairs.get(base, base) for base in reversed(text))
    assert len(text) > 2 * 2**20
    tracemalloc.start()
    reverse = reverse_complement(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reverse_complement(text.lower()) == reverse == expected
    assert peak < len(text) + 4 * 2**20, "only parts are copied"


def test_library_is_built_from_the_sources() -> None:
    """If this fails, build it: ``pip install -e .``"""
    package = library.LIBRARY.parents[1]
    sources = [*package.rglob("*.c"), *package.rglob("*.h")]
    if not sources:
        pytest.skip("the sources are not part of an installed package")
    loaded = library.load_library(library.LIBRARY)
    built_from = (ctypes.c_char * 65).in_dll(loaded, "source_sha256").value
    content = b"".join(source.read_bytes() for source in sorted(sources))
    assert built_from.decode() == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("content", [None, b"no library"])
def test_missing_library_names_the_build(content: bytes | None, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "libvirnucpro.so")
    if content:
        (tmp_path / "libvirnucpro.so").write_bytes(content)
    with pytest.raises(UnavailableError, match=r"libvirnucpro\.so") as caught:
        featurize_pieces(Windows.from_sequences(["ACGT"]), table_of([]))
    assert "pip install -e ." in str(caught.value.hint)


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    """Copy the C sources of the package, without a compiled library. -> the package folder"""
    package = library.LIBRARY.parents[1]
    for source in package.rglob("*.[ch]"):
        copy = tmp_path / "virnucpro" / source.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    return tmp_path / "virnucpro"


def test_source_tree_uses_installed_library(source_tree: Path) -> None:
    missing = source_tree / "core" / library.LIBRARY.name
    assert library.find_library(missing, source_tree, library.LIBRARY) == library.LIBRARY


@pytest.mark.parametrize("changed", ["models/attention.c", "viral/native/common.h"])
@pytest.mark.parametrize("is_installed", [True, False])
def test_library_of_other_sources_is_refused(
    source_tree: Path, is_installed: bool, changed: str
) -> None:
    missing = source_tree / "core" / library.LIBRARY.name
    with (source_tree / changed).open("a") as source:
        source.write("\n")
    with pytest.raises(UnavailableError, match="has no compiled library") as caught:
        library.find_library(missing, source_tree, library.LIBRARY if is_installed else None)
    assert ("other sources" in str(caught.value)) == is_installed
    assert "start Python in another folder" in caught.value.hint


def test_ctrl_c_during_a_call(monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(library._Arrays, "from_param", interrupted)
    with pytest.raises(KeyboardInterrupt):
        encode("ACGT")


@given(st.lists(st.text("ACGTNacgtu", max_size=9), max_size=5))
def test_reversed_windows(texts):
    digits = str.maketrans("ACGTN", "01234")
    reads = [(text.upper().replace("U", "T"), reverse_complement(text)) for text in texts]
    expected = [other.translate(digits) < text.translate(digits) for text, other in reads]
    assert find_reversed(Windows.from_sequences(texts)) == expected
    assert list(map(is_reverse_first, texts)) == expected
