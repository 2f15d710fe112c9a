"""ESM-2 checkpoints, recognised by names, shapes and first rows of tensors; and ESM-2's tokens.

Folders need torch only for number types that numpy lacks (bf16).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from virnucpro.core.atomic_io import HEAD_FILE, LEARNED_FILE, hash_file, read_json
from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import Precision
from virnucpro.models.base import check_header

CLS, PAD, EOS, UNK, MASK = 0, 1, 2, 3, 32
N_TOKENS = 33
EXTRA_TOKENS = 2  # <cls> and <eos> of each protein
RESIDUES = "LAGVSERTIDPKQNFYMHWCXBUZO.-"  # tokens 4 to 30; 31 is <null_1>
_FIRST_RESIDUE = 4
AMINO_ACID_TOKENS = np.arange(_FIRST_RESIDUE, _FIRST_RESIDUE + 20)  # of the 20 usual amino acids

_TOKEN_OF_BYTE = np.full(256, UNK, dtype=np.int64)
for _token, _letter in enumerate(RESIDUES, start=_FIRST_RESIDUE):
    _TOKEN_OF_BYTE[[ord(_letter), ord(_letter.lower())]] = _token
_TOKEN_OF_BYTE[[ord("<"), ord(">")]] = CLS, EOS

LAYER_NORM_EPS = 1e-5
ROPE_THETA = 10000.0
KIND = "an ESM-2 checkpoint"
_BESIDE = {HEAD_FILE, LEARNED_FILE}
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers?\.(\d+)\.")
# our name of a module -> Hugging Face's; {} is the number of the layer
HUGGING_FACE = {
    "embedding": "embeddings.word_embeddings",
    "final_norm": "encoder.emb_layer_norm_after",
    "inv_freq": "encoder.layer.0.attention.self.rotary_embeddings.inv_freq",
    "attention_norm": "encoder.layer.{}.attention.LayerNorm",
    "q": "encoder.layer.{}.attention.self.query",
    "k": "encoder.layer.{}.attention.self.key",
    "v": "encoder.layer.{}.attention.self.value",
    "attention_out": "encoder.layer.{}.attention.output.dense",
    "mlp_norm": "encoder.layer.{}.LayerNorm",
    "up": "encoder.layer.{}.intermediate.dense",
    "down": "encoder.layer.{}.output.dense",
}
# errors from tensors and figures that fit no model
_NONSENSE = (TypeError, ValueError, IndexError, ArithmeticError, RuntimeError, SafetensorError)
_MATRICES = ("q", "k", "v", "attention_out", "up", "down")
_NORMS = ("attention_norm", "mlp_norm")
# largest finite number of the type that matrix products are computed in, by precision
_LARGEST: Mapping[str, float] = {
    "fp32": float(np.finfo(np.float32).max),
    "fp16": float(np.finfo(np.float16).max),
    "bf16": (2 - 2**-7) * 2.0**127,
    "fp8": (2 - 2**-7) * 2.0**127,  # weights are scaled to 8 bits from bf16
}
_NUMPY_HAS = {"F64", "F32", "F16", "I64"}  # a folder may also have positions, as whole numbers


@dataclass(frozen=True, slots=True)
class ESM2Shape:
    """The dimensions of an ESM-2."""

    n_layers: int
    dim: int
    n_heads: int
    token_dropout: bool = True

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the encoder, without LM and contact heads."""
        per_layer = 12 * self.dim**2 + 13 * self.dim
        return self.n_layers * per_layer + (N_TOKENS + 2) * self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The tensors of a checkpoint, read on demand."""

    path: Path
    names: frozenset[str]
    scheme: Mapping[str, str]  # our name of a module -> its name in the checkpoint
    n_heads: Any  # from its configuration, if that has it
    token_dropout: bool
    read: Callable[[str, int | None], Any]  # as ``get``

    def get(self, name: str, n_rows: int | None = None) -> Any:  # noqa: ANN401 - of numpy or torch
        """Read the first rows, or all, of a tensor, by its name in the checkpoint.

        Raises:
            UnavailableError: the tensor is missing, or does not hold numbers.
        """
        if name not in self.names:
            raise not_esm2_error(self.path, f"no tensor {name}")
        try:
            return self.read(name, n_rows)
        except _NONSENSE as error:
            raise not_esm2_error(self.path, error) from error


def infer_shape(tensors: Tensors) -> ESM2Shape:
    """The dimensions of the ESM-2 with these tensors.

    Raises:
        UnavailableError: it is not an ESM-2, or damaged.
    """
    path, scheme = tensors.path, tensors.scheme
    try:
        numbers = {int(match[1]) for name in tensors.names if (match := _LAYER_NUMBER.search(name))}
        embedding = tensors.get(f"{scheme['embedding']}.weight")
        if len(embedding) != N_TOKENS or numbers != set(range(len(numbers))) or not numbers:
            raise not_esm2_error(path, f"{len(embedding)} tokens and {len(numbers)} layers")
        dim = embedding.shape[1]
        n_heads = int(tensors.n_heads or 0) or dim // (2 * len(tensors.get(scheme["inv_freq"])))
        if n_heads < 1 or not dim or dim % (2 * n_heads):
            raise not_esm2_error(path, f"{n_heads} heads in {dim} dimensions")
    except _NONSENSE as error:
        raise not_esm2_error(path, error) from error
    shape, n_bytes = ESM2Shape(len(numbers), dim, n_heads, tensors.token_dropout), count_bytes(path)
    if shape.n_parameters > n_bytes:
        raise not_esm2_error(path, f"{n_bytes} bytes cannot hold {shape.n_parameters} parameters")
    return shape


def check_numbers(name: str, shape: ESM2Shape, tensors: Tensors, precision: Precision) -> None:
    """Read every number of an ESM-2, and refuse it if one is not finite in a run.

    Matrices of the layers are converted to the type of the precision. Everything else stays in
    float32.

    Raises:
        UnavailableError: a number is NaN or infinite, or too large for the precision.
    """
    scheme = tensors.scheme
    parts: list[tuple[str, Precision]] = [(f"{scheme['embedding']}.weight", "fp32")]
    parts += [(f"{scheme['final_norm']}.{kind}", "fp32") for kind in ("weight", "bias")]
    if scheme["inv_freq"] in tensors.names:
        parts.append((scheme["inv_freq"], "fp32"))
    for layer in range(shape.n_layers):
        for module in (*_MATRICES, *_NORMS):
            number_type: Precision = precision if module in _MATRICES else "fp32"
            stored = scheme[module].format(layer)
            parts += [(f"{stored}.{kind}", number_type) for kind in ("weight", "bias")]
    for tensor, number_type in parts:
        peak = float(abs(tensors.get(tensor)).max())
        if not peak <= _LARGEST[number_type]:  # also if it is NaN
            raise _unusable_number(name, tensors.path, tensor, peak, number_type)


def _unusable_number(
    name: str, path: Path, tensor: str, peak: float, precision: str
) -> UnavailableError:
    """The error for a tensor whose largest number is NaN, infinite, or too large."""
    if peak <= _LARGEST["fp32"]:
        possible = "bf16 or fp32" if peak <= _LARGEST["bf16"] else "fp32"
        return UnavailableError(
            f"the model {printable(name)} cannot run in {precision}: {printable(tensor)} contains "
            f"the number {peak:.3g}, and the largest number of {precision} is "
            f"{_LARGEST[precision]:.3g}",
            hint=with_options("set {precision} to {possible}", possible=possible),
        )
    return UnavailableError(
        f"the model {printable(name)} is damaged: {printable(tensor)} in {printable(path)} "
        "contains numbers that are not finite",
        hint="get the file again, and check it with `virnucpro models verify`",
    )


def identify(shape: ESM2Shape, tensors: Tensors) -> str:
    """Hash the embedding, the last norm, and the first row of every matrix.

    This distinguishes a fine-tuned model from its original without reading gigabytes.
    """
    digest = hashlib.sha256(repr(shape).encode())
    scheme = tensors.scheme
    parts = [tensors.get(f"{scheme[name]}.weight") for name in ("embedding", "final_norm")]
    for layer in range(shape.n_layers):
        names = [f"{scheme[name].format(layer)}.weight" for name in _MATRICES]
        parts += [tensors.get(name, n_rows=1) for name in names]
    for part in parts:
        values = part if isinstance(part, np.ndarray) else part.float().numpy()
        digest.update(values.astype(np.float32).tobytes())
    return digest.hexdigest()[:16]


def open_folder(path: Path, framework: Literal["np", "pt"]) -> Tensors:
    """The tensors of a Hugging Face folder; torch reads the types that numpy lacks.

    Raises:
        UnavailableError: it is not an ESM-2, or damaged.
    """
    try:
        settings = read_json(path / "config.json")
        parts: dict[str, Any] = {}  # slices of tensors, read on demand
        for file in weight_files(path):
            check_header(file)
            handle = safe_open(file, framework=framework)
            for name in handle.keys():  # type: ignore[no-untyped-call] # noqa: SIM118
                parts[_published_name(name)] = handle.get_slice(name)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, SafetensorError) as error:
        raise UnavailableError(
            f"{printable(path)} cannot be read: {printable(error)}",
            hint="a model folder holds config.json and *.safetensors files",
        ) from error
    if not isinstance(settings, dict) or settings.get("model_type") != "esm":
        raise not_esm2_error(path, "config.json of another kind of model")
    if settings.get("position_embedding_type") != "rotary" or settings.get("emb_layer_norm_before"):
        raise not_esm2_error(path, "config.json of an ESM-1 model")
    if settings.get("rope_theta", ROPE_THETA) != ROPE_THETA:
        raise not_esm2_error(path, f"rope_theta is {settings['rope_theta']}")
    if settings.get("layer_norm_eps", LAYER_NORM_EPS) != LAYER_NORM_EPS:
        raise not_esm2_error(path, f"layer_norm_eps is {settings['layer_norm_eps']}")
    if framework == "np" and {part.get_dtype() for part in parts.values()} - _NUMPY_HAS:
        return open_folder(path, "pt")

    def read(name: str, n_rows: int | None) -> Any:  # noqa: ANN401 - of numpy or torch
        if not parts[name].get_dtype().startswith(("F", "BF")):
            raise ValueError(f"a tensor of {parts[name].get_dtype()}")
        return parts[name][:n_rows]

    return Tensors(
        path=path,
        names=frozenset(parts),
        scheme=HUGGING_FACE,
        n_heads=settings.get("num_attention_heads"),
        token_dropout=bool(settings.get("token_dropout", True)),
        read=read,
    )


def _published_name(stored_name: str) -> str:
    """The usual name of a tensor; versions of transformers differ."""
    name = stored_name.removeprefix("esm.")
    if name.endswith("rotary_embeddings.inv_freq"):  # in each layer, in "*", or in the model
        return HUGGING_FACE["inv_freq"]
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def weight_files(path: Path) -> list[Path]:
    """The files with weights; the folder of a trained model also has other files.

    Raises:
        UnavailableError: the folder has none.
    """
    if path.is_file():
        return [path]
    files = sorted(file for file in path.glob("*.safetensors") if file.name not in _BESIDE)
    if not files:
        raise UnavailableError(
            f"{printable(path)}: no *.safetensors file in this folder",
            hint="save the model with safetensors: model.save_pretrained(folder)",
        )
    return files


def hash_weights(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """The SHA-256 of the file, or of the hashes of a folder's weight files in order."""
    files = weight_files(path)
    if len(files) == 1:
        return hash_file(files[0], on_bytes)
    before, digests = 0, []
    for file in files:
        digests.append(hash_file(file, lambda n, before=before: on_bytes(before + n)))  # type: ignore[misc]
        before += file.stat().st_size
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def count_bytes(path: Path) -> int:
    """Size of the weights."""
    return sum(file.stat().st_size for file in weight_files(path))


def not_esm2_error(path: Path, why: object) -> UnavailableError:
    return UnavailableError(
        f"{printable(path)} is not {KIND}: {printable(why)}", hint="see `virnucpro models list`"
    )


def tokenize(proteins: list[str]) -> NDArray[np.int64]:
    """Lay the proteins end to end, each as ``<cls> residues <eos>``.

    The tokens are fair-esm's "ESM-1b". Lower case counts as upper case. A letter without a token
    (``J``, an inner ``*``) becomes ``<unk>``. n proteins -> (n_residues + 2 n,)
    """
    text = "".join([f"<{protein}>" for protein in proteins]).encode("ascii", "replace")
    tokens: NDArray[np.int64] = _TOKEN_OF_BYTE[np.frombuffer(text, dtype=np.uint8)]
    return tokens
