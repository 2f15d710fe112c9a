"""Find viral sequences in FASTA and FASTQ, and embed sequences with ESM-2.

>>> import virnucpro
>>> for call in virnucpro.predict("contigs.fa"):  # doctest: +SKIP
...     print(call.record_id, call.virus_score, call.is_virus)

``__all__`` lists the public interface, which is stable, as described in ``virnucpro.api``. Each
name is loaded on first use. The first model that computes in this process loads torch.
"""

from importlib import import_module

from virnucpro._version import __version__ as __version__

TYPE_CHECKING = False  # as in typing, which takes a while to load

if TYPE_CHECKING:
    from virnucpro.api import (
        Embedded,
        Embedder,
        Extraction,
        RecordStatus,
        embed,
        extract,
        iter_features,
        open,
        predict,
        read_features,
        read_predictions,
    )
    from virnucpro.core.errors import VirnucproError
    from virnucpro.core.events import Progress
    from virnucpro.store.vectors import Vectors
    from virnucpro.viral.types import Call, Identity, Region

_HOMES = {  # public name -> module, for names defined outside ``virnucpro.api``
    "Call": "virnucpro.viral.types",
    "Identity": "virnucpro.viral.types",
    "Progress": "virnucpro.core.events",
    "Region": "virnucpro.viral.types",
    "Vectors": "virnucpro.store.vectors",
    "VirnucproError": "virnucpro.core.errors",
}
__all__ = [
    "Call",
    "Embedded",
    "Embedder",
    "Extraction",
    "Identity",
    "Progress",
    "RecordStatus",
    "Region",
    "Vectors",
    "VirnucproError",
    "embed",
    "extract",
    "iter_features",
    "open",
    "predict",
    "read_features",
    "read_predictions",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "virnucpro.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
