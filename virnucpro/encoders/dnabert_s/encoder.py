"""DNABERT-S as a family of encoders of nucleotides: its models, and packed batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from virnucpro.encoders.base import Pending
from virnucpro.encoders.dnabert_s.model import (
    DNABERT,
    DNABERTShape,
    TokenBatch,
    choose_kernel,
    mean_pool,
)
from virnucpro.encoders.dnabert_s.tokenizer import Tokenizer
from virnucpro.encoders.dnabert_s.weights import (
    CONFIG,
    TOKENIZER,
    inspect_folder,
    is_bert,
    load_dnabert,
    weights_file,
)
from virnucpro.encoders.esm2.packing import plan_batches
from virnucpro.encoders.families import FAMILIES, Published
from virnucpro.encoders.transfer import HostCopy, send
from virnucpro.ground.config import EncoderSpec, Footprint, Pooling, Precision, Reads
from virnucpro.ground.events import OnEvent, Progress
from virnucpro.ground.files import sha256

_FAMILY = FAMILIES["dnabert-s"]
_BYTES_PER_TOKEN_AND_DIM = 128  # peak of all activations of a layer, with room to spare
_BYTES_PER_PARAMETER = 6  # in two bf16 parts, of which one is there twice; float32 takes 4
_FILLING = 65_536 * 768  # tokens times dimensions, in a batch for a GPU


@dataclass(frozen=True, slots=True)
class DNABERTModel:
    """A DNABERT-S on disk, inspected but not loaded; a ``base.Model``."""

    path: Path  # folder
    shape: DNABERTShape
    encoder_id: str
    family: ClassVar[str] = "dnabert-s"
    reads: ClassVar[Reads] = "dna"
    poolings: ClassVar[tuple[Pooling, ...]] = ("mean",)
    head: ClassVar[None] = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def n_layers(self) -> int:
        return self.shape.n_layers

    @property
    def dim(self) -> int:
        return self.shape.dim

    @property
    def width(self) -> str:
        return self.shape.width

    @property
    def footprint(self) -> Footprint:
        n_bytes = weights_file(self.path).stat().st_size
        return _room_for(self.dim, self.shape.n_parameters, n_bytes)

    @property
    def files(self) -> list[Path]:
        return [weights_file(self.path), self.path / TOKENIZER, self.path / CONFIG]

    def precision_on(self, kind: str, precision: Precision) -> Precision:
        """float32, but on tensor cores numbers in two bf16 parts, unless the user wants float32.

        bf16 alone would move the published calls.
        """
        return "bf16x2" if kind == "cuda" and precision in ("bf16", "fp8") else "fp32"

    def describe(self, spec: EncoderSpec) -> str:
        shape = self.shape
        return (
            f"{shape.n_layers} layers, {shape.dim} dimensions, "
            f"{shape.n_parameters / 1e6:.1f} M parameters; layer {spec.layer}, "
            f"{spec.pooling} pooling of bases, {spec.precision}"
        )

    def prepare(
        self, precision: Precision, folder: Path | None, on_event: OnEvent
    ) -> tuple[Path, str]:
        """It is used as it is: workers map its weights. The hash is of weights and tokenizer."""
        file = weights_file(self.path)
        n_bytes = file.stat().st_size
        weights = sha256(
            file, lambda done: on_event(Progress("hashing the model", done, n_bytes, "bytes"))
        )
        both = weights + sha256(self.path / TOKENIZER)
        return self.path, hashlib.sha256(both.encode()).hexdigest()

    def verify(self) -> str:
        load_dnabert(self.path, self.n_layers)
        return self.prepare("fp32", None, lambda _: None)[1]


def _room_for(dim: int, n_parameters: int, file_bytes: int) -> Footprint:
    return Footprint(
        n_parameters=n_parameters,
        file_bytes=file_bytes,
        bytes_per_parameter=_BYTES_PER_PARAMETER,
        bytes_per_token=_BYTES_PER_TOKEN_AND_DIM * dim,
        filling_tokens=_FILLING // dim,
    )


def footprint_of(published: Published) -> Footprint:
    return _room_for(published.dim, published.n_parameters, published.files[0].n_bytes or 0)


def open_published(name: str, published: Published, path: Path) -> DNABERTModel:
    """The model in a folder of the published files. Raises as ``inspect``."""
    return DNABERTModel(path, *inspect_folder(path))


def inspect(path: Path, on_event: OnEvent) -> DNABERTModel | None:
    """
    Raises:
        UnavailableError: it is a BERT, but not a DNABERT-S, or damaged.
    """
    return DNABERTModel(path, *inspect_folder(path)) if is_bert(path) else None


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> _DNABERTEncoder:
    """The first ``spec.layer`` layers of a model.

    Raises:
        UnavailableError: it cannot be used.
    """
    model, tokenizer = load_dnabert(weights, spec.layer)
    model = model.to(device)
    model.kernel = choose_kernel(device, model.shape.n_heads, model.shape.head_dim)
    if spec.precision == "bf16x2":
        model.split_products()
    return _DNABERTEncoder(spec, model, tokenizer, device)


class _DNABERTEncoder:
    """Our DNABERT-S on packed batches; see ``base.Encoder``."""

    def __init__(
        self, spec: EncoderSpec, model: DNABERT, tokenizer: Tokenizer, device: torch.device
    ) -> None:
        self.spec, self.model, self.tokenizer, self.device = spec, model, tokenizer, device
        self.copy = HostCopy(device)

    @property
    def kernel(self) -> str:
        return self.model.kernel.__name__

    def count_tokens(self, lengths: Sequence[int]) -> int:
        """About as many: the tokenizer makes of a letter what its neighbours allow."""
        return sum(map(_tokens_of, lengths)) + _FAMILY.extra_tokens * len(lengths)

    def count_flop(self, lengths: Sequence[int]) -> float:
        shape = self.model.shape
        seqlens = [_tokens_of(length) + _FAMILY.extra_tokens for length in lengths]
        squares = float(sum(seqlen * seqlen for seqlen in seqlens))
        products = 2.0 * shape.layer_products * sum(seqlens)
        return shape.n_layers * (products + 4.0 * squares * shape.dim)

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return plan_batches(list(map(_tokens_of, lengths)), tokens_per_batch)

    def start(self, sequences: Sequence[str]) -> Pending:
        return self.copy.start(self.embed(sequences))

    @torch.inference_mode()
    def embed(self, sequences: Sequence[str]) -> Tensor:
        """The rows of a batch, on the device."""
        batch = TokenBatch.of(self.tokenizer.encode(sequences))
        return mean_pool(self.model(send(batch.tokens, self.device), batch), batch)


def _tokens_of(n_letters: int) -> int:
    """At the most, on average; an unknown letter is a token of its own."""
    return int(-(-n_letters // _FAMILY.letters_per_token))
