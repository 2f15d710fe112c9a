"""The interface of embedding models, on disk and loaded, and the functions that load them.

``families`` lists the model families. The family code imports torch. This module does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from virnucpro.core.model_outputs import Include
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import Alphabet, EncoderSpec, Footprint, Pooling, Precision
from virnucpro.models.registry import (
    FAMILIES,
    REMOVED_FILES,
    Family,
    find_family,
    installed_families,
    removed_model_hint,
)

if TYPE_CHECKING:
    import torch

Rows = NDArray[np.float32]
# errors raised by reading a damaged file
DAMAGE = (
    OSError,
    SafetensorError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model on disk, inspected but not loaded."""

    path: Path
    name: str  # for messages
    family: str  # key of ``FAMILIES``, or entry point name
    reads: Alphabet
    encoder_id: str  # weight hash, by which a head names its encoder
    n_layers: int = 1  # largest value of ``--layer``
    dim: int  # vector length
    poolings: tuple[Pooling, ...] = ("mean",)  # supported ``--pooling`` values
    includes: tuple[Include, ...] = ()  # supported ``--include`` values, by the heads on disk
    n_tokens: int = 0  # numbers per row of logits, if there are any
    footprint: Footprint
    # copied by `models import`, weights first; empty: the model is used from its original path
    files: Sequence[Path] = ()
    companions: Sequence[Path] = ()  # further files next to a model file, named after it
    head: Path | None = None  # shipped with the model
    notice: str = ""  # shown to every user of the model

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", Alphabet(self.reads))  # another package may pass a string

    def precision_on(self, kind: str, precision: Precision) -> Precision:
        """Return this model's precision in a run in ``precision``. ``kind``: "cuda" or "cpu"."""
        return precision

    def describe(self, spec: EncoderSpec) -> str:
        """Describe the model and its vector settings for the announcement."""
        unit = " of bases" if self.reads is Alphabet.DNA else ""
        text = (
            f"{self.n_layers} layers, {self.dim} dimensions, "
            f"{self.footprint.n_parameters / 1e6:.1f} M parameters; layer {spec.layer}, "
            f"{spec.pooling} pooling{unit}, {spec.precision}"
        )
        max_named = 6  # outputs in the announcement
        if spec.extra:
            names = [output.name for output in spec.extra]
            more = ", ..." if len(names) > max_named else ""
            text += f"; also {', '.join(names[:max_named])}{more}"
        if spec.precision == "fp16":
            text += ", fp32 for proteins with numbers too large for fp16"
        return text

    def spec(self, **chosen: Any) -> EncoderSpec:  # noqa: ANN401 - fields of EncoderSpec
        """Make the encoder spec for a run, by default with the first pooling on the last layer."""
        usual: Any = {"layer": self.n_layers, "pooling": self.poolings[0], "dim": self.dim}
        return EncoderSpec(family=self.family, reads=self.reads, model=self.name, **usual | chosen)

    def prepare(self, precision: Precision, on_event: EventHandler) -> tuple[Path, str]:
        """Return the file or folder for ``load``, and the SHA-256 of the weights.

        The default suits a small file: it is not converted, and its id is its SHA-256.

        Raises:
            UnavailableError: the weights differ from the published model with that name.
        """
        return self.path, self.encoder_id

    def prepare_heads(self, spec: EncoderSpec, weights: Path) -> tuple[Path, str]:
        """Prepare the heads that ``spec`` needs, for workers that load ``weights``.

        Returns:
            The file or folder for ``load``, and the hash of the heads.

        Raises:
            UnavailableError: a head is damaged.
        """
        raise AssertionError("a model without heads has one output")

    def explain_missing(self, include: Include) -> str:
        """Return a hint for a model that lacks the head for a value of ``--include``."""
        return f"name a model that has {include}, such as a Hugging Face folder of an ESM-2"

    def verify(self) -> str:
        """Read every weight and return their SHA-256.

        By default, inspection has already read them.

        Raises:
            UnavailableError: the model is damaged.
        """
        return self.encoder_id


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A batch in progress on the device. Both functions wait for it."""

    rows: Callable[[], Rows]  # of the first output: (n_rows, width), see ``OutputSpec``
    extra: Callable[[], tuple[Rows, ...]] = tuple  # the same for ``EncoderSpec.extra``, in order

    def outputs(self) -> tuple[Rows, ...]:
        """Wait for the batch, and return the rows of each output."""
        return (self.rows(), *self.extra())


class Encoder(Protocol):
    """A loaded model that embeds sequences on one device."""

    spec: EncoderSpec

    @property
    def kernel(self) -> str:
        """Name the attention kernel, for messages."""

    def count_tokens(self, lengths: Sequence[int]) -> int:
        """Count the tokens in a batch of sequences with these lengths."""

    def count_flop(self, lengths: Sequence[int]) -> float:
        """Count the floating-point operations for sequences with these lengths in one batch."""

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        """Group the indices of ``lengths`` into batches. Every index occurs once.

        A sequence longer than ``tokens_per_batch`` gets its own batch.
        """

    def start(self, sequences: Sequence[str]) -> Pending:
        """Start a batch. A GPU may still be computing the previous one.

        Raises:
            torch.OutOfMemoryError: the batch is too large for the device.
        """


def identify_model(path: Path, on_event: EventHandler) -> Model:
    """Inspect a model file or folder. Families from other packages are tried last.

    Raises:
        UnavailableError: no family recognises the model, VirNucPro no longer has it, or it is
            damaged.
    """
    for entry, name in REMOVED_FILES.items():
        if has_prefix(path, entry):
            raise UnavailableError(
                f"{printable(path)} is {name}, a model that VirNucPro no longer has",
                hint=removed_model_hint(),
            )
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
    """Return True for a safetensors file whose first metadata entry is this, even if damaged."""
    head_bytes = 256  # at the start of a file, enough for the first metadata entry
    if not path.is_file():  # reading a pipe would block
        return False
    with suppress(OSError), path.open("rb") as handle:
        return entry.encode() in handle.read(head_bytes)
    return False


def check_header(path: Path) -> None:
    """Reject a safetensors file that claims an implausibly long header.

    Raises:
        OSError: the path is not a regular file.
        ValueError: the header is longer than that of any model.
    """
    longest_header = 1 << 22  # bytes, enough for 30,000 tensors
    with open_regular_file(path) as handle:
        n_bytes = int.from_bytes(handle.read(8), "little")
    # safetensors itself rejects a header longer than the file.
    if longest_header < n_bytes < path.stat().st_size:
        raise ValueError(f"it claims a header of {n_bytes:,} bytes")


def read_tensors(path: Path, entry: str, framework: str) -> tuple[Any, dict[str, Any]]:
    """Read a JSON metadata entry and the tensors of a safetensors file.

    Raises:
        one of DAMAGE: the file is damaged or contains anything else.
    """
    check_header(path)
    with safe_open(path, framework=framework) as handle:
        facts = parse_json((handle.metadata() or {})[entry])
        return facts, {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118


@contextmanager
def check_intact(path: Path, kind: str, hint: str) -> Iterator[None]:
    """Convert reading errors in the block into an error that names the file.

    Raises:
        UnavailableError: the block finds a damaged file, or a file of another kind.
    """
    try:
        yield
    except DAMAGE as error:
        raise UnavailableError(
            f"{printable(path)} is not {kind}: {printable(error)}", hint=hint
        ) from error


def not_published(path: Path, name: str, why: object) -> UnavailableError:
    """Make the error for weights that differ from the published model with that name."""
    return UnavailableError(
        f"{printable(path)} is not the published {name}: {why}",
        hint="delete it to fetch it again; name a model of your own by its path, "
        "or give it a name with `virnucpro models import PATH --name NAME`",
    )


def progress_of(stage: str, n_bytes: int, on_event: EventHandler) -> Callable[[int], None]:
    """Make a callback that reports the number of processed bytes as progress."""
    return lambda done: on_event(Progress(stage, done, n_bytes, "bytes"))


def load_encoder(spec: EncoderSpec, weights: Path, device: torch.device) -> Encoder:
    """Load a recipe's encoder on a device.

    Raises:
        UnavailableError: the weights are unusable, or the family's package is missing.
    """
    encoder: Encoder = find_family(spec.family).implementation.load(spec, weights, device)
    return encoder


def check_unchanged(spec: EncoderSpec, weights: Path, digest: str) -> None:
    """Reject weights that were replaced after the run began, for example by a package update.

    Without this check, a replacement worker would continue with the new weights.

    Raises:
        UnavailableError: the recipe has a hash, and the weights do not match it.
    """
    if spec.sha256 not in ("", digest):
        raise UnavailableError(
            with_options(
                "{weights} was replaced since the run began: put the old file back, or start "
                "again with {force}",
                weights=printable(weights),
            ),
            hint=with_options("with the old file in place, run the same command with {resume}"),
        )
