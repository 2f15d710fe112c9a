"""Find viral sequences in FASTA: by a fast scorer, or with the protein language model ESM-2.

>>> import virnucpro
>>> for call in virnucpro.predict("contigs.fa"):  # doctest: +SKIP
...     print(call.record_id, call.virus_score, call.is_virus)

What ``__all__`` names is the public interface, and stable: see ``virnucpro.api``. It is loaded
when it is first used, and torch by the first model that computes in this process.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from virnucpro.api import Embedded, embed, predict, read_features, read_predictions
    from virnucpro.errors import VirnucproError
    from virnucpro.records import Call

__version__ = "0.1.0"

_MODULES = {
    "Call": "virnucpro.records",
    "Embedded": "virnucpro.api",
    "VirnucproError": "virnucpro.errors",
    "embed": "virnucpro.api",
    "predict": "virnucpro.api",
    "read_features": "virnucpro.api",
    "read_predictions": "virnucpro.api",
}
__all__ = [
    "Call",
    "Embedded",
    "VirnucproError",
    "embed",
    "predict",
    "read_features",
    "read_predictions",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
