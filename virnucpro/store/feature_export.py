"""Export vectors to NumPy, Parquet and PyTorch formats."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.model_outputs import OutputSpec
from virnucpro.core.recipe import Alphabet, EncoderSpec, FeatureFormat
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Embeddings, OutputArray
from virnucpro.store.feature_file import id_text


def export(
    path: Path, embeddings: Embeddings, layout: FeatureFormat, encoder: EncoderSpec, tree: SafeDir
) -> None:
    """Write the content of a feature file next to it in another format. For h5, do nothing.

    Raises:
        OutputError, StorageError: the file cannot be written.
    """
    path = path.with_suffix(f".{layout}")
    match layout:
        case "npz":
            save_npz(path, embeddings, tree)
        case "parquet":
            save_parquet(path, embeddings, encoder, tree)
        case "pt":
            save_pt(path, embeddings.ids, split_rows(embeddings), encoder.reads, tree)


def save_npz(path: Path, embeddings: Embeddings, tree: SafeDir) -> None:
    """Write ``ids``, ``lengths``, ``embeddings`` and further outputs, for ``numpy.load``.

    No pickle is needed.
    """
    arrays: dict[str, Any] = {
        "ids": np.array(embeddings.ids, dtype=np.str_),
        "lengths": embeddings.lengths,
        "embeddings": embeddings.vectors,
    }
    arrays |= {array.spec.name: shaped_values(array) for array in embeddings.extra}
    with tree.atomic_write(path) as out:
        np.savez(out, **arrays)


def save_parquet(path: Path, embeddings: Embeddings, encoder: EncoderSpec, tree: SafeDir) -> None:
    """Write one row per ORF: ``id``, ``length``, ``embedding``. The metadata name the encoder.

    An embedding is a list of ``dim`` float32 or, per residue, a list of such lists. Further outputs
    are columns with their names. Contacts are a list of all pairs, row by row. Parquet text is
    UTF-8, so any other byte in an id becomes four characters, such as ``\\xff``. With byte-stream
    splitting and compression, vectors stored as bfloat16 take half the disk space here too.
    """
    import pyarrow as pa
    from pyarrow import parquet

    first, *_ = encoder.outputs
    arrays = [OutputArray(first, embeddings.vectors), *embeddings.extra]
    names = ["embedding", *(array.spec.name for array in embeddings.extra)]
    columns = {
        "id": pa.array([id_text(orf_id) for orf_id in embeddings.ids], pa.string()),
        "length": pa.array(embeddings.lengths),
    }
    for name, array in zip(names, arrays, strict=True):
        columns[name] = _to_column(array, embeddings.lengths)
    about = {name: str(value) for name, value in asdict(encoder).items()}
    if not encoder.extra:  # as in files by versions with one output
        del about["extra"], about["heads_sha256"]
    table = pa.table(columns, metadata=about)
    image = io.BytesIO()
    numbers = [
        name + ".list.element" * _count_lists(array.spec)
        for name, array in zip(names, arrays, strict=True)
    ]
    split = {"use_dictionary": False, "use_byte_stream_split": numbers}
    parquet.write_table(table, image, compression="zstd", **split)
    tree.write_file(path, image.getvalue())


def _count_lists(spec: OutputSpec) -> int:
    """Count the levels of lists in a column."""
    return int(spec.has_vectors) + (not spec.has_one_row)


def _to_column(array: OutputArray, lengths: NDArray[np.int32]) -> Any:  # noqa: ANN401 - of Arrow
    """Convert the rows of an output to a column with one entry per ORF."""
    import pyarrow as pa

    column = pa.array(array.values.ravel())
    if array.spec.has_vectors:
        column = pa.FixedSizeListArray.from_arrays(column, array.spec.width)
    if not array.spec.has_one_row:
        bounds = np.concatenate([[0], np.cumsum(array.spec.count_rows(lengths))])
        column = pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), column)
    return column


def save_pt(
    path: Path,
    ids: Iterable[str],
    vectors: Iterable[NDArray[np.float32]],
    reads: Alphabet,
    tree: SafeDir,
) -> None:
    """Write the original VirNucPro's layout of ``_ESM.pt`` or ``_DNABERT_S.pt``.

    Protein files contain ``proteins`` (ids) and ``data`` (one tensor each). Base files contain
    ``nucleotide`` (ids) and ``data``, in which each entry has an id and a list of numbers that
    torch converts back to the same float32.
    """
    import torch

    names = list(ids)
    content: dict[str, object]
    if reads is Alphabet.PROTEIN:
        tensors = [torch.from_numpy(np.array(vector)) for vector in vectors]
        content = {"proteins": names, "data": tensors}
    else:
        data = [
            {"label": name, "mean_representation": vector.tolist()}
            for name, vector in zip(names, vectors, strict=True)
        ]
        content = {"nucleotide": names, "data": data}
    image = io.BytesIO()  # given a path, torch would store its name in the archive
    torch.save(content, image)
    tree.write_file(path, image.getvalue())


def shaped_values(array: OutputArray) -> NDArray[np.float32]:
    """Return the rows of an output: (n_rows, width), or (n_rows,) for single numbers."""
    return array.values if array.spec.has_vectors else array.values[:, 0]


def split_rows(embeddings: Embeddings) -> list[NDArray[np.float32]]:
    """Split into the rows of each ORF: (dim,), or (length, dim) with a vector per residue."""
    if embeddings.per_residue:
        return np.split(embeddings.vectors, np.cumsum(embeddings.lengths))[:-1]
    return list(embeddings.vectors)


def split_output(array: OutputArray, lengths: NDArray[np.int32]) -> list[NDArray[np.float32]]:
    """Split an output into the rows of each ORF.

    (width,) per sequence, (length, width) per residue, (length, length) for pairs, () for scalars.
    """
    values = shaped_values(array)
    if array.spec.has_one_row:
        return list(values)
    parts = np.split(values, np.cumsum(array.spec.count_rows(lengths))[:-1])
    if array.spec.kind == "per_residue":
        return parts
    return [part.reshape(n, n) for part, n in zip(parts, lengths.tolist(), strict=True)]
