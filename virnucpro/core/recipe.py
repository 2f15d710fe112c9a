"""Define the settings that change the numbers of a run.

``Recipe`` contains all of them. A run is resumed only with a recipe of the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal

from virnucpro.core.errors import UsageError
from virnucpro.core.model_outputs import (
    HeadOutput,
    OutputSpec,
    parse_vector_name,
    vector_output,
)

# Other packages import these two names from this module.
from virnucpro.core.model_outputs import Pooling as Pooling
from virnucpro.core.model_outputs import Store as Store
from virnucpro.core.option_text import with_options

InputType = Literal["nucleotide", "protein"]
Precision = Literal[
    "fp32", "bf16", "fp16", "bf16x2", "fp8", "int8"
]  # bf16x2: each number as two bf16 parts
FeatureFormat = Literal["h5", "npz", "pt", "parquet"]
ExportFormatName = Literal[
    "uniprot-h5", "safetensors", "parquet", "anndata", "skbio", "npz", "pt"
]  # keys of ``store.export_formats.FORMATS``
Command = Literal["predict", "extract"]
EmbeddingRule = Literal["all", "viral", "uncertain"]  # from least to most restrictive

Status = Literal["scored", "embedded", "too_short", "no_orf", "invalid", "failed"]  # of a record
STATUSES: Mapping[Status, str] = {  # descriptions for users
    "scored": "with a score and a call",
    "embedded": "with vectors",  # in extract, instead of scored
    "too_short": "shorter than the minimum length",
    "no_orf": "with nothing that can be scored: no frame without a stop, or no known base",
    "invalid": "empty, or with letters that are neither bases nor residues",
    "failed": "with no vector: every try failed",
}

# omitted from fingerprints, so that fingerprints of older runs stay valid
_DEFAULT_STORE: Store = "float32"
USUAL_CHUNK_SIZE = 500  # bases
RESIDUES_PER_SHARD = 250_000  # maximum
SHARD_FORMAT = 10


class Alphabet(StrEnum):
    """What an encoder reads: a frame's protein, or a frame's bases."""

    PROTEIN = "protein"
    DNA = "dna"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A model and the way it turns sequences into vectors."""

    family: str = "esm2"  # a key of ``models.registry.FAMILIES``
    model: str  # name in messages
    sha256: str  # hash of the weights
    layer: int
    pooling: Pooling
    precision: Precision
    dim: int  # vector length
    reads: Alphabet = Alphabet.PROTEIN
    store: Store = _DEFAULT_STORE
    extra: tuple[OutputSpec, ...] = ()  # outputs besides the vectors of ``layer`` and ``pooling``
    heads_sha256: str = ""  # hash of the heads that outputs need, see ``heads.hash_heads``

    implied: ClassVar = ("model", "dim", "reads")  # determined by the other fields

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", Alphabet(self.reads))  # a plain string in JSON
        extra = (
            output if isinstance(output, OutputSpec) else OutputSpec(**output)
            for output in self.extra
        )
        object.__setattr__(self, "extra", tuple(extra))  # a list of dictionaries in JSON

    @property
    def outputs(self) -> tuple[OutputSpec, ...]:
        """Return all outputs. The first one is the array ``embeddings`` of the feature files."""
        return (vector_output(self.pooling, self.layer, self.dim, self.store), *self.extra)

    @property
    def needs_head(self) -> bool:
        """Return True if an output needs a head, and with it all layers of the model."""
        return any(parse_vector_name(output.name) is None for output in self.extra)

    @property
    def masks_residues(self) -> bool:
        """Return True if each residue is masked once, in a row of its own."""
        return any(output.name == HeadOutput.PERPLEXITY for output in self.extra)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the fields that change the vectors, without their storage format."""
        left_out = (*self.implied, "store", "extra", "heads_sha256")
        facts = {name: value for name, value in asdict(self).items() if name not in left_out}
        if self.extra:  # otherwise as in runs by versions with one output
            facts["extra"] = [output.name for output in self.extra]
        if self.heads_sha256:
            facts["heads_sha256"] = self.heads_sha256
        return facts

    @property
    def per_residue(self) -> bool:
        """Return True if each residue has a vector, False if each sequence has one."""
        return self.pooling == "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings that change the numbers of a run. Resuming compares their fingerprint."""

    command: Command
    input_type: InputType
    chunk_size: int  # bases; 0 for proteins, which are not cut
    min_length: int  # bases, or residues of a protein
    encoders: tuple[EncoderSpec, ...]  # empty: nothing is embedded
    head_sha256: str = ""
    genetic_code: int = 11  # NCBI's number; unused for proteins
    scorer_sha256: str = ""  # of the scorer, which calls records or selects those to embed
    known_sha256: str = ""  # of the index of known viruses, if it can change calls
    residues_per_shard: int = RESIDUES_PER_SHARD
    bytes_per_slice: int = 2**23  # uncompressed input that is planned and called together
    shard_format: int = SHARD_FORMAT
    keep_vectors: bool = True  # False: only the scores of a head are kept

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
                    f"{encoder.model} reads nucleotides; the input contains proteins",
                    hint="give the nucleotide sequences, or name a model that reads proteins",
                )

    @property
    def largest_shard(self) -> int:
        """Return the maximum number of residues per shard.

        All vectors of a shard are in memory at once.
        """
        vectors_per_shard = 8  # vectors per sequence; more of them make shards smaller
        residues_per_shard_pairwise = 31_250  # maximum with one number per pair of residues
        residues_per_shard_per_residue = 125_000  # maximum with one vector per residue
        kinds = [output.kind for encoder in self.encoders for output in encoder.outputs]
        limit = self.residues_per_shard // max(1, kinds.count("per_sequence") // vectors_per_shard)
        if n_arrays := kinds.count("per_residue"):
            limit = min(limit, residues_per_shard_per_residue // n_arrays)
        if "pairwise" in kinds:
            limit = min(limit, residues_per_shard_pairwise)
        return limit

    @property
    def alphabets(self) -> tuple[Alphabet, ...]:
        """Return the alphabets in which copies are identical, in alphabetical order.

        The vectors of copies are identical if everything that the encoders read is. A head may also
        read the bases of a frame, so their scores are identical if both texts are.
        """
        if not self.keep_vectors:
            return tuple(sorted(Alphabet))
        return tuple(sorted({encoder.reads for encoder in self.encoders}))

    @property
    def has_chunks(self) -> bool:
        """Return True if records are cut into chunks."""
        return bool(self.encoders) and self.input_type == "nucleotide"

    def count_chunks(self, length: int) -> int:
        """Return how many chunks a record with ``length`` bases or residues has."""
        return -(-length // self.chunk_size) if self.input_type == "nucleotide" else 1

    @property
    def reader(self) -> str:
        """Return the names of the encoders, or of the scorer."""
        models = " and ".join(encoder.model for encoder in self.encoders)
        return f"the model {models}" if models else "the scorer"

    @property
    def fingerprint(self) -> str:
        """Return a hash of the recipe that is the same on every machine."""
        encoders = []
        for encoder in self.encoders:
            encoder_facts = encoder.facts
            if encoder.store != _DEFAULT_STORE:
                encoder_facts["store"] = encoder.store
            encoders.append(encoder_facts)
        facts = {**asdict(self), "encoders": encoders}
        if not self.known_sha256:  # as in runs by versions without the index
            del facts["known_sha256"]
        if self.keep_vectors:  # as in runs by versions that always kept them
            del facts["keep_vectors"]
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory that a model needs. Devices, workers and batch sizes depend on it."""

    n_parameters: int
    file_bytes: int
    converted_bytes: int = 0  # of the converted copy on disk; 0: the file is used unconverted
    bytes_per_parameter: float = 2  # on a device, in half precision
    bytes_per_token: int  # peak activation memory on a device, with a margin
    filling_tokens: int  # tokens per batch that keep a GPU busy

    min_tokens: ClassVar = 2048  # per batch on a GPU with hardly any free memory

    def weight_bytes(self, precision: Precision) -> int:
        """Return the size of the weights on a device, in bytes."""
        n_bytes = self.bytes_per_parameter
        if precision in ("fp8", "int8"):
            n_bytes /= 2
        elif precision == "fp32":
            n_bytes = max(n_bytes, 4)
        return round(n_bytes * self.n_parameters)

    def gpu_memory(self, n_tokens: int | None = None) -> int:
        """Return the bytes for the weights in half precision and two batches of ``n_tokens``.

        The default, None, means batches that keep a GPU busy.
        """
        n_tokens = self.filling_tokens if n_tokens is None else n_tokens
        return self.weight_bytes("bf16") + 2 * n_tokens * self.bytes_per_token


def join_footprints(footprints: Sequence[Footprint]) -> Footprint:
    """Return the memory needed by models that are loaded together and run in turn."""
    n_parameters = sum(footprint.n_parameters for footprint in footprints)
    weight_bytes = sum(footprint.weight_bytes("bf16") for footprint in footprints)
    return Footprint(
        n_parameters=n_parameters,
        file_bytes=sum(footprint.file_bytes for footprint in footprints),
        converted_bytes=sum(footprint.converted_bytes for footprint in footprints),
        bytes_per_parameter=weight_bytes / max(n_parameters, 1),
        bytes_per_token=max(footprint.bytes_per_token for footprint in footprints),
        filling_tokens=min(footprint.filling_tokens for footprint in footprints),
    )
