"""DNABERT-S encoders for nucleotides: model folders, models, packed batches.

A folder from the Hub contains ``config.json``, ``tokenizer.json``, and the weights as
``model.safetensors`` or ``pytorch_model.bin``. It is recognised by its content. Its Python files
are not needed, and VirNucPro never runs any code in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from virnucpro.core.atomic_io import hash_file, read_json
from virnucpro.core.errors import UnavailableError
from virnucpro.core.events import EventHandler
from virnucpro.core.logging import printable
from virnucpro.core.recipe import Alphabet, EncoderSpec, Footprint, Precision
from virnucpro.models.base import DAMAGE, Model, check_header, check_intact, progress_of
from virnucpro.models.dnabert_s.model import (
    DNABERT,
    LAYER_NORM_EPS,
    DNABERTShape,
    choose_kernel,
    mean_pool,
    pack,
)
from virnucpro.models.dnabert_s.tokenizer import Tokenizer, read_tokenizer
from virnucpro.models.family import ModelFile
from virnucpro.models.packing import PackedEncoder, to_device
from virnucpro.models.registry import FAMILIES, Published
from virnucpro.models.safe_pickle import check_plain, read_pt

_FAMILY = FAMILIES["dnabert-s"]


class _DNABERTModel(Model):
    """A DNABERT-S model on disk. Its path is a folder."""

    def precision_on(self, kind: str, precision: Precision) -> Precision:
        """Return float32, or two bf16 parts on tensor cores unless the user asks for float32.

        bf16 alone would change the published calls.
        """
        return "bf16x2" if kind == "cuda" and precision in ("bf16", "fp8", "int8") else "fp32"

    def prepare(self, precision: Precision, on_event: EventHandler) -> tuple[Path, str]:
        """Return the folder, which workers map, and the hash over weights and tokenizer."""
        weights, tokenizer, _ = self.files
        hashing = progress_of("hashing the model", self.footprint.file_bytes, on_event)
        both = hash_file(weights, hashing) + hash_file(tokenizer)
        return self.path, hashlib.sha256(both.encode()).hexdigest()

    def verify(self) -> str:
        load_dnabert(self.path, self.n_layers)
        return self.prepare("fp32", lambda _: None)[1]


def _estimate_memory(dim: int, n_parameters: int, file_bytes: int) -> Footprint:
    filling = 65_536 * 768  # tokens times dimensions in a GPU batch
    bytes_per_parameter = 6  # two bf16 parts, one stored twice. float32 takes 4
    bytes_per_token_and_dim = 128  # peak for all activations in a layer, with a margin
    return Footprint(
        n_parameters=n_parameters,
        file_bytes=file_bytes,
        bytes_per_parameter=bytes_per_parameter,
        bytes_per_token=bytes_per_token_and_dim * dim,
        filling_tokens=filling // dim,
    )


def footprint_of(published: Published) -> Footprint:
    return _estimate_memory(published.dim, published.n_parameters, published.files[0].n_bytes or 0)


def open_published(name: str, published: Published, path: Path) -> _DNABERTModel:
    """Inspect a folder with the published files. Raises as ``inspect``."""
    return inspect_folder(path)


def inspect(path: Path, on_event: EventHandler) -> _DNABERTModel | None:
    """Return the model in a folder, or None if it is no BERT.

    Raises:
        UnavailableError: it is another kind of BERT, or damaged.
    """
    return inspect_folder(path) if _is_bert(path) else None


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> _DNABERTEncoder:
    """Load the first ``spec.layer`` layers of a model.

    Raises:
        UnavailableError: the model cannot be used.
    """
    model, tokenizer = load_dnabert(weights, spec.layer)
    model = model.to(device)
    model.kernel = choose_kernel(device)
    if spec.precision == "bf16x2":
        model.split_products()
    return _DNABERTEncoder(spec, model, tokenizer, device)


class _DNABERTEncoder(PackedEncoder):
    """DNABERT-S on packed batches."""

    def __init__(
        self, spec: EncoderSpec, model: DNABERT, tokenizer: Tokenizer, device: torch.device
    ) -> None:
        super().__init__(spec, device)
        self.model = model
        self.tokenizer = tokenizer

    @property
    def kernel(self) -> str:
        return self.model.kernel.__name__

    def count_tokens(self, lengths: Sequence[int]) -> int:
        """Estimate the number of tokens. The exact number depends on the tokens that fit."""
        return super().count_tokens(list(map(_read_tokenizer, lengths)))

    def count_flop(self, lengths: Sequence[int]) -> float:
        shape = self.model.shape
        seqlens = [_read_tokenizer(length) + _FAMILY.extra_tokens for length in lengths]
        squares = float(sum(seqlen * seqlen for seqlen in seqlens))
        products = 2.0 * shape.layer_products * sum(seqlens)
        return shape.n_layers * (products + 4.0 * squares * shape.dim)

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return super().plan(list(map(_read_tokenizer, lengths)), tokens_per_batch)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[str]) -> Tensor:
        """Embed a batch. The rows stay on the device."""
        batch, places = pack(self.tokenizer.encode(sequences))
        means = mean_pool(self.model(to_device(batch.tokens, self.device), batch), batch)
        return means[to_device(places, self.device)]


def _read_tokenizer(n_letters: int) -> int:
    """Return an upper estimate for an average text. An unknown letter is a separate token."""
    return int(-(-n_letters // _FAMILY.letters_per_token))


# Model folder

_KIND = "a DNABERT-S"
_HINT = "`virnucpro models download dnabert-s` fetches the published one"


def _is_bert(path: Path) -> bool:
    """Return whether a folder has a ``config.json`` that describes any kind of BERT."""
    try:
        config = read_json(path / ModelFile.CONFIG)
        return bool(config["model_type"] == "bert")
    except DAMAGE:
        return False


def _weights_file(path: Path) -> Path:
    """Return the weights file in a folder.

    Raises:
        UnavailableError: the folder has none.
    """
    weights = (ModelFile.WEIGHTS, "pytorch_model.bin")  # the first that exists is read
    for name in weights:
        if (path / name).is_file():
            return path / name
    raise UnavailableError(
        f"{printable(path)} has neither {' nor '.join(weights)}",
        hint="put the weights next to config.json and tokenizer.json",
    )


def inspect_folder(path: Path) -> _DNABERTModel:
    """Inspect the model in a folder.

    Its id is a hash over the vocabulary, the embedding, and the first row of every other tensor, so
    it does not depend on the format.

    Raises:
        UnavailableError: it is another kind of BERT, or damaged.
    """
    model, tokenizer = _open_folder(path)
    shape = model.shape
    weights = _weights_file(path)
    digest = hashlib.sha256(repr((shape, tokenizer.merges)).encode())
    for name, tensor in model.state_dict().items():
        part = tensor if name == "embedding.weight" else tensor[:1]
        digest.update(part.float().contiguous().numpy().tobytes())
    return _DNABERTModel(
        path=path,
        name=path.name,
        family="dnabert-s",
        reads=Alphabet.DNA,
        encoder_id=digest.hexdigest()[:16],
        n_layers=shape.n_layers,
        dim=shape.dim,
        footprint=_estimate_memory(shape.dim, shape.n_parameters, weights.stat().st_size),
        files=[weights, path / ModelFile.TOKENIZER, path / ModelFile.CONFIG],
    )


def load_dnabert(path: Path, n_layers: int) -> tuple[DNABERT, Tokenizer]:
    """Load a model's first ``n_layers`` layers on the CPU, in float32, and its tokenizer.

    The weights are mapped if the file allows it, so that processes share them.

    Raises:
        UnavailableError: the model cannot be used.
    """
    model, tokenizer = _open_folder(path)
    model.layers = model.layers[:n_layers]
    with check_intact(_weights_file(path), _KIND, _HINT):
        for name, tensor in model.state_dict().items():
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} contains a number that is not finite")
    return model.float().eval().requires_grad_(False), tokenizer


def _open_folder(path: Path) -> tuple[DNABERT, Tokenizer]:
    """Load the complete model, in its file's type, and its tokenizer.

    Raises:
        UnavailableError: it is another kind of BERT, or damaged.
    """
    tokenizer = read_tokenizer(path / ModelFile.TOKENIZER)
    shape = _read_shape(path / ModelFile.CONFIG, tokenizer)
    file = _weights_file(path)
    with torch.device("meta"):
        model = DNABERT(shape, shape.n_layers)
    with check_intact(file, _KIND, _HINT):
        if file.suffix == ".safetensors":
            check_header(file)
        tensors: Any = load_file(file) if file.suffix == ".safetensors" else read_pt(file, _KIND)
        for tensor in tensors.values():
            check_plain(tensor)
        unused = {"pooler.dense.weight", "pooler.dense.bias"}  # not needed for a text's vector
        state = {_published_name(name): tensors[name] for name in tensors.keys() - unused}
        model.load_state_dict(state, assign=True)
    return model, tokenizer


def _read_shape(file: Path, tokenizer: Tokenizer) -> DNABERTShape:
    """Read the model dimensions from ``config.json``.

    Raises:
        UnavailableError: ``config.json`` is damaged, or describes another kind of BERT.
    """
    with check_intact(file, _KIND, _HINT):
        config: Mapping[str, Any] = read_json(file)
        expected = {
            "hidden_act": "gelu",
            "layer_norm_eps": LAYER_NORM_EPS,
            "type_vocab_size": 2,
            "vocab_size": tokenizer.n_words,
        }
        for name, value in expected.items():
            if config[name] != value:
                raise ValueError(f"its {name} is {config[name]!a}, not {value!a}")
        shape = DNABERTShape(
            n_layers=_count(config, "num_hidden_layers"),
            dim=_count(config, "hidden_size"),
            n_heads=_count(config, "num_attention_heads"),
            inner=_count(config, "intermediate_size"),
            n_words=tokenizer.n_words,
        )
        if shape.dim % shape.n_heads:
            raise ValueError(f"{shape.n_heads} heads in {shape.dim} dimensions")
    return shape


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    if type(value) is not int or not 0 < value < 1 << 16:
        raise ValueError(f"its {name} is {value!a}")
    return value


def _published_name(stored_name: str) -> str:
    our_names = {  # module names, by their names in the Hub
        "embeddings.word_embeddings": "embedding",
        "embeddings.token_type_embeddings": "token_types",
        "embeddings.LayerNorm": "embedding_norm",
        "encoder.layer": "layers",
        "attention.self.Wqkv": "qkv",
        "attention.output.dense": "attention_out",
        "attention.output.LayerNorm": "attention_norm",
        "mlp.gated_layers": "gate_and_up",
        "mlp.wo": "down",
        "mlp.layernorm": "mlp_norm",
    }
    for in_hub, ours in our_names.items():
        stored_name = stored_name.replace(in_hub, ours)
    return stored_name
