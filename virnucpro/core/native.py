"""Call the C library with arrays, without the GIL.

The build compiles every ``.c`` file of the package to ``libvirnucpro.so`` (``hatch_build.py``).
``viral.windows`` defines the base digits. Codon tables have one byte for each of 125 codes.
"""

from __future__ import annotations

import hashlib
from ctypes import CDLL, addressof, c_char, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable

LIBRARY = Path(__file__).with_name("libvirnucpro.so")


class _Arrays:
    """Argument type for contiguous arrays of one dtype, passed by address.

    ``numpy.ctypeslib.ndpointer`` does the same in almost three times the time.
    """

    def __init__(self, kind: type[Any]) -> None:
        self._kind = np.dtype(kind)

    def from_param(self, array: NDArray[Any]) -> c_void_p:
        if array.dtype != self._kind or not array.flags.c_contiguous:
            raise TypeError(f"not a contiguous array of {self._kind}, but one of {array.dtype}")
        if array.size and array.flags.writeable:
            return c_void_p(addressof(c_char.from_buffer(array.data)))
        return c_void_p(array.ctypes.data)


class _Functions:
    """Argument types of each library function. Names with an underscore are parts of several."""

    _bytes = _Arrays(np.uint8)
    _counts = _Arrays(np.int64)
    _floats = _Arrays(np.float32)
    _values = _Arrays(np.float64)
    _digests = _Arrays(np.uint64)
    _texts = (_bytes, _counts)  # texts in one buffer, and the bounds of each
    # n digits, the output of `read_bases` for them, and starts and lengths of n pieces
    _read = (_bytes, _bytes, _Arrays(np.int32), _counts)
    _pieces = (_bytes, c_int64, *_read, _counts, _counts, c_int64)
    # bucket hints, entries per bucket, first entry of each bucket group, n entries
    _kmer_table = (_bytes, _bytes, _Arrays(np.int32), _Arrays(np.uint16), c_int64)
    # nets: mean and scale of n features, number of features, number of nets, sizes of each net,
    # weights, start of each sum, and the value of one unit in it
    _nets = (
        _floats,
        _floats,
        c_int64,
        c_int64,
        _counts,
        _Arrays(np.int8),
        _Arrays(np.int32),
        _floats,
    )
    # what `attention.c` and `attention_bf16.c` read after the projected tokens, and what they write
    _attention = (c_void_p, c_void_p, _counts, c_int64, c_int64, c_int64, c_void_p)
    # for n pieces: log-odds, GC, gene figures
    _figures = (_values, _values, _values, c_int64)
    # for n items: figures and starts, bases per host and per virus, and how often a record starts
    # viral
    _items = (_values, _counts, c_int64, c_double, c_double, c_double)
    # what `known.c` reads: pieces with their windows, residues of codons, and the index
    _known = (
        _bytes,
        _counts,
        _counts,
        _counts,
        c_int64,
        _bytes,
        c_uint64,
        _Arrays(np.int32),
        _bytes,
        _bytes,
        _bytes,
        _Arrays(np.uint64),
        c_int64,
    )

    encode_bases = (_bytes, c_int64, _bytes)
    read_bases = (_bytes, c_int64, _bytes, *_read)
    piece_features = (*_pieces, _bytes, *_kmer_table, _bytes, _floats, _bytes)
    mean_features = (*_pieces, _bytes, *_kmer_table, _bytes, _counts, c_int64, c_int64, _values)
    piece_log_odds = (
        *_pieces,
        _bytes,
        *_kmer_table,
        _bytes,
        *_nets,
        _values,
        _values,
        _counts,
        c_int64,
        _floats,
        _counts,
        _values,
        _counts,
    )
    layout_features = (*_pieces, _values)
    kept_stretches = (*_pieces, c_int64, _counts, _counts)
    # for n pieces: stops and kinds of starts by codon code, whether each piece has binding sites,
    # the shortest gene; the number of genes of each piece, and rows and scores of genes
    find_genes = (
        *_pieces,
        _bytes,
        _bytes,
        _bytes,
        c_int64,
        _counts,
        _counts,
        _values,
    )
    # codon codes, rows of n genes, letters by codon code, and letters of all proteins
    translate_genes = (_bytes, _counts, c_int64, _bytes, _bytes)
    # digits, starts, lengths and number of windows for n pieces, codon residues, the highest hash,
    # the table, the owner of each node, and one row per window
    known_hits = (*_known, _Arrays(np.uint16), _counts)
    # residues, lengths and number of windows for n proteins, then the same from the highest hash on
    known_protein_hits = (
        _bytes,
        _counts,
        _counts,
        c_int64,
        *_known[6:],
        _Arrays(np.uint16),
        _counts,
    )
    # the same, then k-mers of each piece, rows of piece, node and hits, and the number of rows
    known_nodes = (*_known, _counts, _Arrays(np.int32), _counts)
    known_filters = (_bytes, _bytes, _bytes, _Arrays(np.uint64))
    first_rotation = (_bytes, c_int64, _counts)
    reverse_first = (_bytes, _counts, _counts, c_int64, _bytes)
    terminal_repeats = (_bytes, _counts, _counts, c_int64, _counts, _counts)
    longest_open = (
        _bytes,
        _counts,
        _counts,
        c_int64,
        _bytes,
        _bytes,
        c_int64,
        c_double,
        _counts,
        _counts,
    )
    net_log_odds = (_floats, c_int64, *_nets, _values, _values)
    whole_log_odds = (_values, _counts, _values, _counts, c_int64, *_nets, _values, _values)
    linear_layer = (_values, c_int64, c_int64, c_int64, _values, _values, _values)
    host_figures = (*_figures, _values)
    piece_signal = (*_figures, _values, c_int64, c_double, _values)
    chain_step = (c_int64, c_double, c_double, _values)
    viral_path = (*_items, _bytes, _values)
    log_likelihoods = (*_items, _values, c_int64, c_double, c_double, _values)
    common_words = (_bytes, c_int64, _bytes, c_int64, c_int64, c_int64, _counts, _counts)
    count_words = (_bytes, c_int64, _bytes, _counts, c_int64, _counts)
    # text; first place of each hash, and places by hash
    index_text = (_bytes, c_int64, _Arrays(np.int32), _Arrays(np.int32))
    count_indexed = (
        _bytes,
        c_int64,
        c_int64,
        _Arrays(np.int32),
        _Arrays(np.int32),
        _bytes,
        _counts,
        c_int64,
        _counts,
    )
    paired_digits = (_bytes, c_int64, _counts)
    equal_words = (_bytes, c_int64, _bytes, c_int64, c_int64, _counts)
    find_peptides = (_bytes, c_int64, _bytes, c_int64, c_int64, _counts, _counts)
    index_kmer_table = (_bytes, _Arrays(np.uint16), c_int64, _Arrays(np.int32), _bytes, _counts)
    classes_of_kmers = (_counts, c_int64, *_kmer_table, _bytes)
    protein_composition = (_bytes, _counts, c_int64, _bytes, _floats)
    protein_windows = (
        _bytes,
        _counts,
        c_int64,
        _counts,
        c_int64,
        c_int64,
        c_int64,
        c_int64,
        _counts,
        _counts,
    )
    protein_shared = (
        _bytes,
        _counts,
        c_int64,
        *_kmer_table,
        _Arrays(np.int8),
        _Arrays(np.int8),
        _Arrays(np.int8),
        _Arrays(np.int8),
        c_double,
        _floats,
    )
    # texts that end with a zero, and their bytes; their digests
    id_digests = (_bytes, c_int64, _digests)
    # n chunks as text, their lengths, tables of the code; columns, proteins and bases of n frames
    translate_frames = (_bytes, _counts, c_int64, _bytes, _counts, _bytes, _bytes, _counts)
    # n numbers; their upper halves, rounded
    to_bfloat16 = (_floats, c_int64, _Arrays(np.uint16))
    # n frames as text, their lengths, digits of letters; shares of codons and other words
    frame_composition = (_bytes, _counts, c_int64, _bytes, _floats)
    # n texts or pairs of texts, 1 or 2, n; digests of two words
    digest_texts = (*_texts, *_texts, c_int64, c_int64, _digests)
    # digests, n, two hash tables, slots of each, the most digests in one; state and originals
    find_originals = (_digests, c_int64, _digests, c_int64, c_int64, _counts, _counts)
    # ids of chunks and records; chunk, frame, start and end of n ORFs, proteins, bases and
    # originals; entries of a shard and their ends
    write_entries = (
        *_texts,
        *_texts,
        _counts,
        _bytes,
        _counts,
        _counts,
        *_texts,
        *_texts,
        _counts,
        c_int64,
        _bytes,
        _counts,
    )
    # tables: n rows, n columns, column kinds, column addresses, and the text before each field
    write_rows = (c_int64, c_int64, _counts, _Arrays(np.uintp), _bytes, _bytes, _counts)
    split_fields = (_bytes, c_int64, c_int64, _counts, _counts)
    read_numbers = (_bytes, _counts, _counts, c_int64, _values, _counts)
    find_changes = (_bytes, _counts, _counts, c_int64, _bytes)
    # a batch, by tensor addresses: queries, keys and values, 1 for bf16; cosines, sines;
    # sequence runs, heads, head dimension, the result
    attend = (c_void_p, c_int, *_attention)
    # the same for bf16
    attend_bf16 = (c_void_p, *_attention)
    multiplies_bf16 = ()
    # rows, by tensor addresses: stream, branch or 0, its factor, weight, bias or 0, epsilon; rows,
    # columns; the sums if there is a branch, the result, 1 if that is bf16
    add_and_norm = (
        c_void_p,
        c_void_p,
        c_double,
        c_void_p,
        c_void_p,
        c_double,
        c_int64,
        c_int64,
        c_void_p,
        c_void_p,
        c_int,
    )
    # rows, by tensor addresses; 1 for bf16, 1 for GELU, rows, columns; the rounded rows, scales
    round_to_int8 = (c_void_p, c_int, c_int, c_int64, c_int64, c_void_p, c_void_p)
    # a product, by tensor addresses; scales of rows and columns, bias or 0; rows, columns, result
    restore_int8 = (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p)


def call(name: str, *arguments: NDArray[Any] | float) -> None:
    """Call a library function.

    Raises:
        UnavailableError: the library is missing or does not fit this machine.
        MemoryError: out of memory.
    """
    # converted here, because ctypes would turn a Ctrl-C during conversion into its own error
    converted = [
        kind.from_param(argument)
        for kind, argument in zip(getattr(_Functions, name), arguments, strict=True)
    ]
    if getattr(load_library(LIBRARY), name)(*converted):
        raise MemoryError(f"no memory is left for {name} of the scorer")


def multiplies_bf16() -> bool:
    """Return True if ``attend_bf16`` is compiled, and runs on this processor.

    Raises:
        UnavailableError: the library is missing or does not fit this machine.
    """
    return bool(load_library(LIBRARY).multiplies_bf16())


def find_library(library: Path, package: Path, installed: Path | None) -> Path:
    """Find the compiled library for a package folder.

    A source tree has no library after ``pip install .``, which compiles it into the installed
    package. If Python starts in the source tree, it imports that tree. The installed library is
    then used, provided that it was built from the same sources.

    Args:
        library: the package's own library.
        package: folder with the sources. An installed package has no sources.
        installed: the installed distribution's library, or None without a distribution.

    Raises:
        UnavailableError: the source tree has no library, and the installed one has other sources.
    """
    if library.exists():
        return library
    digest = hash_sources(package)
    if not digest:
        return library
    if installed is not None and installed.exists() and _embedded_source_hash(installed) == digest:
        return installed
    built = "has no compiled library: libvirnucpro.so"
    if installed is not None and installed.exists():
        built += "; that of the installed VirNucPro was built from other sources"
    raise UnavailableError(
        f"the source tree {printable(package.parent)} {built}",
        hint="to use the installed VirNucPro, start Python in another folder; to use the source "
        "tree, run `pip install -e .` there",
    )


def hash_sources(package: Path) -> str:
    """Return the SHA-256 of a package's C sources and headers, or "" without sources."""
    sources = sorted(package.rglob("*.[ch]"))
    if not sources:
        return ""
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _embedded_source_hash(library: Path) -> str:
    """Return the SHA-256 of the sources that a library was built from, or "" if unknown."""
    try:
        return bytes((c_char * 65).in_dll(CDLL(str(library)), "source_sha256").value).decode()
    except (OSError, ValueError):  # not a library, or not VirNucPro's
        return ""


def _installed_library() -> Path | None:
    """Return the installed distribution's library, wherever this module was imported from."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        installed = distribution("virnucpro")
    except PackageNotFoundError:
        return None
    return Path(str(installed.locate_file(f"virnucpro/core/{LIBRARY.name}")))


@cache
def load_library(path: Path) -> CDLL:
    """Load the compiled library, once per path.

    Raises:
        UnavailableError: the library is missing, or does not fit this machine.
    """
    installed = None if path.exists() else _installed_library()
    package = Path(__file__).parents[1]
    try:
        library = CDLL(str(find_library(path, package, installed)))
        for name in vars(_Functions):
            if not name.startswith("_"):
                getattr(library, name).restype = c_int
    except (OSError, AttributeError) as error:  # AttributeError: older than its sources
        raise UnavailableError(
            f"the compiled part of the scorer cannot be loaded: {printable(error)}",
            hint="build it by installing VirNucPro again: `pip install -e .` in its source folder, "
            "or `pip install --force-reinstall --no-deps virnucpro`",
        ) from error
    return library
