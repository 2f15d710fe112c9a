"""Read the installed PyTorch build without importing it, because that takes seconds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import NamedTuple

from virnucpro.core.errors import UnavailableError
from virnucpro.core.option_text import with_options


class TorchBuild(NamedTuple):
    """The installed torch."""

    version: str
    cuda: str | None  # None: built without CUDA


def torch_is_missing() -> UnavailableError:
    """Make the error for a command that needs PyTorch, which is not installed."""
    return UnavailableError(
        "PyTorch is not installed, and models need it",
        hint=with_options(
            "pip install torch; `virnucpro predict` without {model} calls viruses without PyTorch"
        ),
    )


def require_torch() -> TorchBuild:
    """Read the installed torch, which is required.

    Raises:
        UnavailableError: PyTorch is not installed.
    """
    build = torch_build()
    if build is None:
        raise torch_is_missing()
    return build


def torch_build() -> TorchBuild | None:
    """Read the installed torch version from ``version.py``, without importing torch.

    Returns:
        The build, or None if torch is not installed.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:  # no origin: a folder with this name
        return None
    facts = run_path(str(Path(torch.origin).with_name("version.py")))
    return TorchBuild(facts["__version__"], facts["cuda"])
