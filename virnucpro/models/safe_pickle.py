"""Read ``torch.save`` files without running code from them.

A pickle may name any code. This reader allows only tensors and the classes that the caller lists.
It rejects all else before anything runs.
"""

from __future__ import annotations

import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from virnucpro.core.atomic_io import open_regular_file
from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.models.base import DAMAGE

_Allowed = Callable[..., object] | tuple[Callable[..., object], str]


def read_pt(path: Path, kind: str, allowed: Sequence[_Allowed] = ()) -> object:
    """Load a ``torch.save`` file, mapped into memory where possible.

    Args:
        path: the file.
        kind: the expected content, for messages: "an ESM-2 checkpoint".
        allowed: classes that the file may name besides tensors, or pairs with our class and the
            name in the file.

    Raises:
        UnavailableError: the file is of another kind, is damaged, or names anything else.
    """
    magic = (b"PK", b"\x80")  # a zip archive, or a bare pickle from older versions
    # Errors raised by torch.load for a damaged file.
    damage = (*DAMAGE, EOFError, AssertionError, struct.error, zipfile.BadZipFile)
    try:
        with open_regular_file(path) as handle:
            if not handle.read(2).startswith(magic):
                raise _unknown_format_error(path, kind, "neither a .pt file nor a model folder")
        is_archive = zipfile.is_zipfile(path)
        if is_archive and _is_compressed(path):
            raise _unknown_format_error(path, kind, "it is compressed")
        with torch.serialization.safe_globals(list(allowed)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about pickles, which are rejected here
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except pickle.UnpicklingError as error:
        raise UnavailableError(
            f"{printable(path)} contains more than tensors, or is damaged: it was not loaded",
            hint="use the published file, or one in the format safetensors",
        ) from error
    except damage as error:
        raise UnavailableError(
            f"{printable(path)} cannot be read: {printable(error)}",
            hint="the file is damaged or not a checkpoint: download it again",
        ) from error


def _is_compressed(path: Path) -> bool:
    """Return True if a member is compressed, because it could unpack to any size.

    torch itself compresses none.
    """
    with zipfile.ZipFile(path) as archive:
        return any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())


def _unknown_format_error(path: Path, kind: str, why: str) -> UnavailableError:
    return UnavailableError(
        f"{printable(path)} is not {kind}: {why}",
        hint="if it should be one, copy or download it again; `virnucpro models list` shows names",
    )


def check_plain(tensor: Tensor) -> None:
    """Reject a tensor that is not plain floats. With strides, a few bytes can claim any size.

    Raises:
        ValueError: the tensor is not dense floats on the CPU, or repeats stored numbers.
    """
    is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_plain or not tensor.is_floating_point():
        raise ValueError(f"a tensor of {tensor.layout}, {tensor.dtype} on {tensor.device}")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} repeats what is stored")
