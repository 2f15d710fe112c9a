"""The settings that change the numbers of a run.

``Recipe`` holds all of them. A run is resumed only with a recipe of the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal

from virnucpro.core.errors import UsageError
from virnucpro.core.option_text import with_options

InputType = Literal["nucleotide", "protein"]
Precision = Literal["fp32", "bf16", "fp16", "bf16x2", "fp8"]  # bf16x2: numbers in two bf16 parts
Pooling = Literal["mean", "bos", "none"]
FeatureFormat = Literal["h5", "npz", "pt", "parquet"]
Store = Literal["float32", "bfloat16"]  # numbers on disk; bfloat16: the nearest, ties to even
Command = Literal["predict", "extract"]
EmbeddingRule = Literal[
    "all", "viral", "uncertain"
]  # each asks for all that the next one does, and more

Status = Literal["scored", "embedded", "too_short", "no_orf", "invalid", "failed"]  # of a record
STATUSES: Mapping[Status, str] = {  # and what it means
    "scored": "with a score and a call",
    "embedded": "with vectors",  # in extract, instead of scored
    "too_short": "shorter than the minimum length",
    "no_orf": "with nothing that can be scored: no frame without a stop, or no known base",
    "invalid": "empty, or with letters that are neither bases nor residues",
    "failed": "with no vector: every try failed",
}

_DEFAULT_STORE: Store = (
    "float32"  # left out of fingerprints, so that those of older runs stay valid
)
USUAL_CHUNK_SIZE = 500  # bases
RESIDUES_PER_SHARD = 250_000  # of the largest shards
_RESIDUES_PER_SHARD_PER_RESIDUE = 125_000  # the same, where each residue has a vector
SHARD_FORMAT = 8
BYTES_PER_SLICE = 2**23  # of uncompressed input that is planned and called together


class Alphabet(StrEnum):
    """What an encoder reads: the protein or the bases of a frame, or a whole chunk."""

    PROTEIN = "protein"
    DNA = "dna"
    CHUNK = "chunk"

    @property
    def unit(self) -> str:
        """What has a vector of its own."""
        return "chunk" if self is Alphabet.CHUNK else "frame"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A model, and how it turns sequences into vectors."""

    family: str = "esm2"  # a name in ``encoders.families.FAMILIES``
    model: str  # name in messages
    sha256: str  # hash of the weights
    layer: int
    pooling: Pooling
    precision: Precision
    dim: int  # length of a vector
    reads: Alphabet = Alphabet.PROTEIN
    store: Store = _DEFAULT_STORE

    implied: ClassVar = ("model", "dim", "reads")  # follow from the other fields

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", Alphabet(self.reads))  # of JSON

    @property
    def facts(self) -> dict[str, Any]:
        """The fields that change the vectors, without their storage format."""
        left_out = (*self.implied, "store")
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @property
    def per_residue(self) -> bool:
        """True if each residue has a vector, False if each sequence has one."""
        return self.pooling == "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings that change the numbers of a run. A resume compares their fingerprint."""

    command: Command
    input_type: InputType
    chunk_size: int  # bases; 0 for proteins, which are not cut
    min_length: int  # bases, or residues of a protein
    encoders: tuple[EncoderSpec, ...]  # none: nothing is embedded
    head_sha256: str = ""
    genetic_code: int = 11  # NCBI's number; unused for proteins
    scorer_sha256: str = ""  # of the scorer, which calls or chooses what is embedded
    known_sha256: str = ""  # of the index of known viruses, if it may change calls
    residues_per_shard: int = RESIDUES_PER_SHARD
    bytes_per_slice: int = BYTES_PER_SLICE
    shard_format: int = SHARD_FORMAT

    def __post_init__(self) -> None:
        if self.input_type == "nucleotide" and self.chunk_size < 30:
            raise UsageError(
                with_options(
                    "{chunk_size} is {value} bases; the shortest useful one is 30",
                    value=self.chunk_size,
                ),
                hint="use 500 or 300, or what the head was trained for",
                option="chunk_size",
            )
        for encoder in self.encoders:
            if encoder.reads is not Alphabet.PROTEIN and self.input_type == "protein":
                raise UsageError(
                    f"{encoder.model} reads nucleotides; the input holds proteins",
                    hint="give the nucleotide sequences, or name a model that reads proteins",
                )

    @property
    def largest_shard(self) -> int:
        """Residues of the largest shards. All vectors of a shard are in memory at once."""
        per_residue = any(encoder.per_residue for encoder in self.encoders)
        limit = _RESIDUES_PER_SHARD_PER_RESIDUE if per_residue else self.residues_per_shard
        return min(limit, self.residues_per_shard)

    @property
    def alphabets(self) -> tuple[Alphabet, ...]:
        """What the encoders read, in alphabetical order."""
        return tuple(sorted({encoder.reads for encoder in self.encoders}))

    @property
    def has_chunks(self) -> bool:
        """True if records are cut into chunks."""
        return bool(self.encoders) and self.input_type == "nucleotide"

    def count_chunks(self, length: int) -> int:
        """The number of chunks of a record of this length."""
        return -(-length // self.chunk_size) if self.input_type == "nucleotide" else 1

    @property
    def reader(self) -> str:
        """The encoders, or the scorer, by name."""
        models = " and ".join(encoder.model for encoder in self.encoders)
        return f"the model {models}" if models else "the scorer"

    @property
    def fingerprint(self) -> str:
        """A hash of the recipe, the same on every machine."""
        encoders = [
            each.facts | ({} if each.store == _DEFAULT_STORE else {"store": each.store})
            for each in self.encoders
        ]
        facts = {**asdict(self), "encoders": encoders}
        if not self.known_sha256:  # as in runs of versions without the index
            del facts["known_sha256"]
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory that a model needs. Devices, workers and batch sizes depend on it."""

    n_parameters: int
    file_bytes: int
    converted_bytes: int = 0  # of the converted copy on disk; 0: the file is used as it is
    bytes_per_parameter: float = 2  # on a device; half precision
    bytes_per_token: int  # peak of all activations on a device, with room to spare
    filling_tokens: int  # tokens of a batch that keeps a GPU busy

    fewest_tokens: ClassVar = 2048  # of a batch on a GPU with hardly any free memory

    def weight_bytes(self, precision: Precision) -> int:
        """Bytes of the weights on a device."""
        n_bytes = self.bytes_per_parameter
        if precision == "fp8":
            n_bytes /= 2
        elif precision == "fp32":
            n_bytes = max(n_bytes, 4)
        return round(n_bytes * self.n_parameters)

    def gpu_memory(self, n_tokens: int | None = None) -> int:
        """Bytes for the weights in half precision and two batches of ``n_tokens``.

        None: batches that keep a GPU busy.
        """
        n_tokens = self.filling_tokens if n_tokens is None else n_tokens
        return self.weight_bytes("bf16") + 2 * n_tokens * self.bytes_per_token


def join_footprints(footprints: Sequence[Footprint]) -> Footprint:
    """The memory of models that are loaded together and run one after the other."""
    n_parameters = sum(each.n_parameters for each in footprints)
    weight_bytes = sum(each.weight_bytes("bf16") for each in footprints)
    return Footprint(
        n_parameters=n_parameters,
        file_bytes=sum(each.file_bytes for each in footprints),
        converted_bytes=sum(each.converted_bytes for each in footprints),
        bytes_per_parameter=weight_bytes / max(n_parameters, 1),
        bytes_per_token=max(each.bytes_per_token for each in footprints),
        filling_tokens=min(each.filling_tokens for each in footprints),
    )
