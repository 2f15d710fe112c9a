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
PACKAGE = Path(__file__).parents[1]


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


_BYTES = _Arrays(np.uint8)
_COUNTS = _Arrays(np.int64)
_FLOATS = _Arrays(np.float32)
_VALUES = _Arrays(np.float64)
_DIGESTS = _Arrays(np.uint64)
_TEXTS = (_BYTES, _COUNTS)  # texts in one buffer, and the bounds of each
# n digits, the output of `read_bases` for them, and starts and lengths of n pieces
_READ = (_BYTES, _BYTES, _Arrays(np.int32), _COUNTS)
_PIECES = (_BYTES, c_int64, *_READ, _COUNTS, _COUNTS, c_int64)
# bucket hints, entries per bucket, first entry of each bucket group, n entries
_KMER_TABLE = (_BYTES, _BYTES, _Arrays(np.int32), _Arrays(np.uint16), c_int64)
# nets: mean and scale of n features, number of features, number of nets, sizes of each net,
# weights, start of each sum, and the value of one unit in it
_NETS = (_FLOATS, _FLOATS, c_int64, c_int64, _COUNTS, _Arrays(np.int8), _Arrays(np.int32), _FLOATS)
# for n pieces: log-odds, GC, gene figures
_FIGURES = (_VALUES, _VALUES, _VALUES, c_int64)
# for n items: figures and starts, bases per host and per virus, and how often a record starts viral
_ITEMS = (_VALUES, _COUNTS, c_int64, c_double, c_double, c_double)
# what `known.c` reads: pieces with their windows, residues of codons, and the index
_KNOWN = (
    _BYTES,
    _COUNTS,
    _COUNTS,
    _COUNTS,
    c_int64,
    _BYTES,
    c_uint64,
    _Arrays(np.int32),
    _BYTES,
    _BYTES,
    _BYTES,
    _Arrays(np.uint64),
    c_int64,
)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "encode_bases": (_BYTES, c_int64, _BYTES),
    "read_bases": (_BYTES, c_int64, _BYTES, *_READ),
    "piece_features": (*_PIECES, _BYTES, *_KMER_TABLE, _BYTES, _FLOATS, _BYTES),
    "mean_features": (*_PIECES, _BYTES, *_KMER_TABLE, _BYTES, _COUNTS, c_int64, c_int64, _VALUES),
    "piece_log_odds": (
        *_PIECES,
        _BYTES,
        *_KMER_TABLE,
        _BYTES,
        *_NETS,
        _VALUES,
        _VALUES,
        _COUNTS,
        c_int64,
        _FLOATS,
        _COUNTS,
        _VALUES,
        _COUNTS,
    ),
    "layout_features": (*_PIECES, _VALUES),
    "kept_stretches": (*_PIECES, c_int64, _COUNTS, _COUNTS),
    # for n pieces: stops and kinds of starts by codon code, whether each piece has binding sites,
    # the shortest gene; the number of genes of each piece, and rows and scores of genes
    "find_genes": (
        *_PIECES,
        _BYTES,
        _BYTES,
        _BYTES,
        c_int64,
        _COUNTS,
        _COUNTS,
        _VALUES,
    ),
    # codon codes, rows of n genes, letters by codon code, and letters of all proteins
    "translate_genes": (_BYTES, _COUNTS, c_int64, _BYTES, _BYTES),
    # digits, starts, lengths and number of windows for n pieces, codon residues, the highest hash,
    # the table, the owner of each node, and one row per window
    "known_hits": (*_KNOWN, _Arrays(np.uint16), _COUNTS),
    # residues, lengths and number of windows for n proteins, then the same from the highest hash on
    "known_protein_hits": (
        _BYTES,
        _COUNTS,
        _COUNTS,
        c_int64,
        *_KNOWN[6:],
        _Arrays(np.uint16),
        _COUNTS,
    ),
    # the same, then k-mers of each piece, rows of piece, node and hits, and the number of rows
    "known_nodes": (*_KNOWN, _COUNTS, _Arrays(np.int32), _COUNTS),
    "known_filters": (_BYTES, _BYTES, _BYTES, _Arrays(np.uint64)),
    "first_rotation": (_BYTES, c_int64, _COUNTS),
    "reverse_first": (_BYTES, _COUNTS, _COUNTS, c_int64, _BYTES),
    "terminal_repeats": (_BYTES, _COUNTS, _COUNTS, c_int64, _COUNTS, _COUNTS),
    "longest_open": (
        _BYTES,
        _COUNTS,
        _COUNTS,
        c_int64,
        _BYTES,
        _BYTES,
        c_int64,
        c_double,
        _COUNTS,
        _COUNTS,
    ),
    "net_log_odds": (_FLOATS, c_int64, *_NETS, _VALUES, _VALUES),
    "whole_log_odds": (_VALUES, _COUNTS, _VALUES, _COUNTS, c_int64, *_NETS, _VALUES, _VALUES),
    "linear_layer": (_VALUES, c_int64, c_int64, c_int64, _VALUES, _VALUES, _VALUES),
    "host_figures": (*_FIGURES, _VALUES),
    "piece_signal": (*_FIGURES, _VALUES, c_int64, c_double, _VALUES),
    "chain_step": (c_int64, c_double, c_double, _VALUES),
    "viral_path": (*_ITEMS, _BYTES, _VALUES),
    "log_likelihoods": (*_ITEMS, _VALUES, c_int64, c_double, c_double, _VALUES),
    "common_words": (_BYTES, c_int64, _BYTES, c_int64, c_int64, c_int64, _COUNTS, _COUNTS),
    "count_words": (_BYTES, c_int64, _BYTES, _COUNTS, c_int64, _COUNTS),
    # text; first place of each hash, and places by hash
    "index_text": (_BYTES, c_int64, _Arrays(np.int32), _Arrays(np.int32)),
    "count_indexed": (
        _BYTES,
        c_int64,
        c_int64,
        _Arrays(np.int32),
        _Arrays(np.int32),
        _BYTES,
        _COUNTS,
        c_int64,
        _COUNTS,
    ),
    "paired_digits": (_BYTES, c_int64, _COUNTS),
    "equal_words": (_BYTES, c_int64, _BYTES, c_int64, c_int64, _COUNTS),
    "find_peptides": (_BYTES, c_int64, _BYTES, c_int64, c_int64, _COUNTS, _COUNTS),
    "index_kmer_table": (_BYTES, _Arrays(np.uint16), c_int64, _Arrays(np.int32), _BYTES, _COUNTS),
    "classes_of_kmers": (_COUNTS, c_int64, *_KMER_TABLE, _BYTES),
    "protein_composition": (_BYTES, _COUNTS, c_int64, _BYTES, _FLOATS),
    "protein_windows": (
        _BYTES,
        _COUNTS,
        c_int64,
        _COUNTS,
        c_int64,
        c_int64,
        c_int64,
        c_int64,
        _COUNTS,
        _COUNTS,
    ),
    "protein_shared": (
        _BYTES,
        _COUNTS,
        c_int64,
        *_KMER_TABLE,
        _Arrays(np.int8),
        _Arrays(np.int8),
        _Arrays(np.int8),
        _Arrays(np.int8),
        c_double,
        _FLOATS,
    ),
    # texts that end with a zero, and their bytes; their digests
    "id_digests": (_BYTES, c_int64, _DIGESTS),
    # n chunks as text, their lengths, tables of the code; columns, proteins and bases of n frames
    "translate_frames": (_BYTES, _COUNTS, c_int64, _BYTES, _COUNTS, _BYTES, _BYTES, _COUNTS),
    # n numbers; their upper halves, rounded
    "to_bfloat16": (_FLOATS, c_int64, _Arrays(np.uint16)),
    # n frames as text, their lengths, digits of letters; shares of codons and other words
    "frame_composition": (_BYTES, _COUNTS, c_int64, _BYTES, _FLOATS),
    # n texts or pairs of texts, 1 or 2, n; digests of two words
    "digest_texts": (*_TEXTS, *_TEXTS, c_int64, c_int64, _DIGESTS),
    # digests, n, two hash tables, slots of each, the most digests in one; state and originals
    "find_originals": (_DIGESTS, c_int64, _DIGESTS, c_int64, c_int64, _COUNTS, _COUNTS),
    # ids of chunks and records; chunk, frame, start and end of n ORFs, proteins, bases and
    # originals; entries of a shard and their ends
    "write_entries": (
        *_TEXTS,
        *_TEXTS,
        _COUNTS,
        _BYTES,
        _COUNTS,
        _COUNTS,
        *_TEXTS,
        *_TEXTS,
        _COUNTS,
        c_int64,
        _BYTES,
        _COUNTS,
    ),
    # tables: n rows, n columns, column kinds, column addresses, and the text before each field
    "write_rows": (c_int64, c_int64, _COUNTS, _Arrays(np.uintp), _BYTES, _BYTES, _COUNTS),
    "split_fields": (_BYTES, c_int64, c_int64, _COUNTS, _COUNTS),
    "read_numbers": (_BYTES, _COUNTS, _COUNTS, c_int64, _VALUES, _COUNTS),
    "find_changes": (_BYTES, _COUNTS, _COUNTS, c_int64, _BYTES),
    # a batch, by tensor addresses: queries, keys and values, 1 for bf16; cosines, sines;
    # sequence runs, heads, head dimension, the result
    "attend": (
        c_void_p,
        c_int,
        c_void_p,
        c_void_p,
        _COUNTS,
        c_int64,
        c_int64,
        c_int64,
        c_void_p,
    ),
    # rows, by tensor addresses; 1 for bf16, 1 for GELU, rows, columns; the rounded rows, scales
    "round_to_int8": (c_void_p, c_int, c_int, c_int64, c_int64, c_void_p, c_void_p),
    # a product, by tensor addresses; scales of rows and columns, bias or 0; rows, columns, result
    "restore_int8": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p),
}


def call(name: str, *arguments: NDArray[Any] | float) -> None:
    """Call a library function.

    Raises:
        UnavailableError: the library is missing or does not fit this machine.
        MemoryError: out of memory.
    """
    # converted here, because ctypes would turn a Ctrl-C during conversion into its own error
    converted = [
        kind.from_param(argument)
        for kind, argument in zip(_SIGNATURES[name], arguments, strict=True)
    ]
    if getattr(load_library(LIBRARY), name)(*converted):
        raise MemoryError(f"no memory is left for {name} of the scorer")


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
    try:
        library = CDLL(str(find_library(path, PACKAGE, installed)))
        for name in _SIGNATURES:
            getattr(library, name).restype = c_int
    except (OSError, AttributeError) as error:  # AttributeError: older than its sources
        raise UnavailableError(
            f"the compiled part of the scorer cannot be loaded: {printable(error)}",
            hint="build it by installing VirNucPro again: `pip install -e .` in its source folder, "
            "or `pip install --force-reinstall --no-deps virnucpro`",
        ) from error
    return library
