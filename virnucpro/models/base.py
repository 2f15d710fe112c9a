"""What a model that makes vectors is, on disk and loaded; the functions that find and load one.

``families`` lists the kinds. This module does not import torch; the code of a family does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from virnucpro.core.atomic_io import open_regular_file, parse_json
from virnucpro.core.errors import UnavailableError
from virnucpro.core.events import EventHandler, Progress
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import Alphabet, EncoderSpec, Footprint, Pooling, Precision
from virnucpro.models.registry import FAMILIES, Family, find_family, installed_families

if TYPE_CHECKING:
    import torch

Rows = NDArray[np.float32]
_HEAD_BYTES = 256  # at the start of a file, with the first entry of its metadata
_LONGEST_HEADER = 1 << 22  # bytes, of 30,000 tensors
_NONSENSE = (LookupError, ValueError, TypeError, AttributeError, RuntimeError)
DAMAGE = (OSError, SafetensorError, *_NONSENSE)  # errors of reading a damaged file


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model on disk, inspected but not loaded."""

    path: Path
    name: str  # for messages
    family: str  # key of ``FAMILIES``, or name of an entry point
    reads: Alphabet
    encoder_id: str  # hash of the weights; a head names its encoder by it
    n_layers: int = 1  # the largest value of ``--layer``
    dim: int  # length of a vector
    poolings: tuple[Pooling, ...] = ("mean",)  # supported values of ``--pooling``
    footprint: Footprint
    # that `models import` copies, weights first; empty: it stays in place
    files: Sequence[Path] = ()
    head: Path | None = None  # that comes with the model
    shortest: int = 0  # bases or residues of the shortest record that it reads
    notice: str = ""  # what every user of the model is told

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", Alphabet(self.reads))  # another package may give the text

    def precision_on(self, kind: str, precision: Precision) -> Precision:
        """Precision of this model in a run in ``precision``; ``kind`` is "cuda" or "cpu"."""
        return precision

    def describe(self, spec: EncoderSpec) -> str:
        """Describe the model and the choices for its vectors, for the announcement."""
        of_what = " of bases" if self.reads is Alphabet.DNA else ""
        text = (
            f"{self.n_layers} layers, {self.dim} dimensions, "
            f"{self.footprint.n_parameters / 1e6:.1f} M parameters; layer {spec.layer}, "
            f"{spec.pooling} pooling{of_what}, {spec.precision}"
        )
        if spec.precision == "fp16":
            text += ", fp32 for proteins with numbers too large for fp16"
        return text

    def spec(self, **chosen: Any) -> EncoderSpec:  # noqa: ANN401 - fields of EncoderSpec
        """The encoder of a run; by default its first pooling, of its last layer."""
        usual: Any = {"layer": self.n_layers, "pooling": self.poolings[0], "dim": self.dim}
        return EncoderSpec(family=self.family, reads=self.reads, model=self.name, **usual | chosen)

    def prepare(self, precision: Precision, on_event: EventHandler) -> tuple[Path, str]:
        """Return the file or folder for ``load``, and the SHA-256 of the weights.

        By default the file is small, is not converted, and its id is its SHA-256.

        Raises:
            UnavailableError: the model is not the one that its name says.
        """
        return self.path, self.encoder_id

    def verify(self) -> str:
        """Read every weight; by default inspection has done so. -> the SHA-256 of the weights

        Raises:
            UnavailableError: the model is damaged.
        """
        return self.encoder_id


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A batch that the device is computing."""

    rows: Callable[[], Rows]  # waits: (n, dim), or (sum of lengths, dim) without pooling


class Encoder(Protocol):
    """A loaded model that turns sequences into vectors, on one device."""

    spec: EncoderSpec

    @property
    def kernel(self) -> str:
        """Name of the attention kernel, for messages."""

    def count_tokens(self, lengths: Sequence[int]) -> int:
        """Number of tokens in a batch of sequences of these lengths."""

    def count_flop(self, lengths: Sequence[int]) -> float:
        """Number of floating point operations for a batch of sequences of these lengths."""

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        """Group the indices of ``lengths`` into batches. Every index occurs once.

        A sequence longer than ``tokens_per_batch`` gets a batch of its own.
        """

    def start(self, sequences: Sequence[str]) -> Pending:
        """Start a batch; a GPU may still be computing the previous one.

        Raises:
            torch.OutOfMemoryError: the batch is too large for the device.
        """


def identify_model(path: Path, on_event: EventHandler) -> Model:
    """Inspect a model file or folder; families of other packages are tried last.

    Raises:
        UnavailableError: no family recognises it, or it is damaged.
    """
    try:
        for family in reversed(FAMILIES.values()):
            if model := _inspect(family, path, on_event):
                return model
        raise AssertionError("the first family takes or refuses what is left")
    except UnavailableError:
        for family in installed_families().values():
            if model := _inspect(family, path, on_event):
                return model
        raise


def _inspect(family: Family, path: Path, on_event: EventHandler) -> Model | None:
    model: Model | None = (
        family.implementation.inspect(path, on_event) if family.has_files else None
    )
    return model


def has_prefix(path: Path, entry: str) -> bool:
    """True for a safetensors file with this entry first in its metadata, even if it is damaged."""
    if not path.is_file():  # a pipe would be waited for
        return False
    with suppress(OSError), path.open("rb") as handle:
        return entry.encode() in handle.read(_HEAD_BYTES)
    return False


def check_header(path: Path) -> None:
    """Refuse a safetensors file that claims a header too long to be read.

    Raises:
        OSError: it is not a plain file.
        ValueError: no model has such a header.
    """
    with open_regular_file(path) as handle:
        n_bytes = int.from_bytes(handle.read(8), "little")
    # safetensors itself refuses a header that is longer than the file
    if _LONGEST_HEADER < n_bytes < path.stat().st_size:
        raise ValueError(f"it claims a header of {n_bytes:,} bytes")


def read_tensors(path: Path, entry: str, framework: str) -> tuple[Any, dict[str, Any]]:
    """The facts in an entry of the metadata of a safetensors file, in JSON, and its tensors.

    Raises:
        one of DAMAGE: it is damaged, or holds anything else.
    """
    check_header(path)
    with safe_open(path, framework=framework) as handle:
        facts = parse_json((handle.metadata() or {})[entry])
        return facts, {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118


@contextmanager
def check_intact(path: Path, kind: str, hint: str) -> Iterator[None]:
    """
    Raises:
        UnavailableError: the block finds a damaged file, or one of another kind.
    """
    try:
        yield
    except DAMAGE as error:
        raise UnavailableError(
            f"{printable(path)} is not {kind}: {printable(error)}", hint=hint
        ) from error


def not_published(path: Path, name: str, why: object) -> UnavailableError:
    """Make the error for weights that differ from the published model of that name."""
    return UnavailableError(
        f"{printable(path)} is not the published {name}: {why}",
        hint="delete it to fetch it again; name a model of your own by its path, "
        "or give it a name with `virnucpro models import PATH --name NAME`",
    )


def progress_of(stage: str, n_bytes: int, on_event: EventHandler) -> Callable[[int], None]:
    """Make a callback that reports the number of bytes done as progress."""
    return lambda done: on_event(Progress(stage, done, n_bytes, "bytes"))


def load_encoder(spec: EncoderSpec, weights: Path, device: torch.device) -> Encoder:
    """Load the encoder of a recipe on a device.

    Raises:
        UnavailableError: the weights are unusable, or the package of the family is missing.
    """
    encoder: Encoder = find_family(spec.family).implementation.load(spec, weights, device)
    return encoder


def check_unchanged(spec: EncoderSpec, weights: Path, digest: str) -> None:
    """Refuse weights that were replaced since the run began, as by an update of the package.

    A worker that takes the place of another would go on with them.

    Raises:
        UnavailableError: the weights are not those of the recipe, if it has their hash.
    """
    if spec.sha256 not in ("", digest):
        raise UnavailableError(
            with_options(
                "{weights} was replaced since the run began: put the old file back, or start "
                "anew with {force}",
                weights=printable(weights),
            ),
            hint=with_options("with the old file in place, run the same command with {resume}"),
        )


def estimate_tokens(encoders: Iterable[EncoderSpec], n_sequences: int, n_residues: int) -> int:
    """Estimate the number of tokens that these encoders read, all together."""
    total = 0.0
    for spec in encoders:
        family = find_family(spec.family)
        n_letters = 3 * n_residues if spec.reads is Alphabet.DNA else n_residues
        total += n_letters / family.letters_per_token + family.extra_tokens * n_sequences
    return round(total)
