"""Turn the outputs that a user asks for into those of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from virnucpro.core.errors import UsageError
from virnucpro.core.logging import format_count, printable
from virnucpro.core.model_outputs import (
    Include,
    OutputSpec,
    Pooling,
    Store,
    included_output,
    vector_output,
)
from virnucpro.core.option_text import with_options
from virnucpro.models.base import Model

ALL_LAYERS = "all"


class OutputChoice(NamedTuple):
    """The outputs that the user or a head asks for. Without layers or poolings: the defaults."""

    layers: tuple[str, ...] = ()  # numbers as the user writes them, or ``all``
    poolings: tuple[Pooling, ...] = ()
    includes: tuple[Include, ...] = ()


class ModelOutputs(NamedTuple):
    """The fields of ``EncoderSpec`` that name the outputs."""

    layer: int
    pooling: Pooling
    extra: tuple[OutputSpec, ...]


def choose_outputs(choice: OutputChoice, model: Model, store: Store) -> ModelOutputs:
    """Choose the outputs of a model.

    The order in which the user names them does not matter. The first output is the first pooling
    of the last layer that was asked for, with one row per sequence if there is such an output.

    Raises:
        UsageError: the model lacks a layer, a pooling or a head.
    """
    layers = _choose_layers(choice.layers, model.n_layers)
    poolings = _choose_poolings(choice.poolings, model)
    last = layers[-1]
    first = poolings[0]
    extra = [
        vector_output(pooling, layer, model.dim, store)
        for layer in layers
        for pooling in poolings
        if (layer, pooling) != (last, first)
    ]
    for include in get_args(Include):
        if include in choice.includes:
            _check_include(include, model)
            extra.append(included_output(include, model.n_tokens, store))
    return ModelOutputs(last, first, tuple(extra))


def _choose_layers(texts: Sequence[str], n_layers: int) -> list[int]:
    """Return the numbers of layers, ascending."""
    if not texts:
        return [n_layers]
    if ALL_LAYERS in texts:
        return list(range(1, n_layers + 1))
    return sorted({_parse_layer(text, n_layers) for text in texts})


def _parse_layer(text: str, n_layers: int) -> int:
    """Return the number of a layer, from 1.

    Raises:
        UsageError: it is no number, or the model lacks the layer.
    """
    hint = with_options("count layers from 1, or from -1 for the last one; {layers:all} gives each")
    try:
        number = int(text)
    except ValueError as error:
        raise UsageError(
            with_options("{layers} has {text}, which is no layer", text=repr(printable(text))),
            hint=hint,
            option="layers",
        ) from error
    layer = n_layers + 1 + number if number < 0 else number
    if not 1 <= layer <= n_layers:
        raise UsageError(
            f"there is no layer {number}: the model has {format_count(n_layers, 'layer')}",
            hint=with_options("leave {layers} out for the last one"),
            option="layers",
        )
    return layer


def _choose_poolings(poolings: Sequence[Pooling], model: Model) -> list[Pooling]:
    """Return the poolings, in a fixed order with ``none`` last.

    Raises:
        UsageError: the model lacks a pooling.
    """
    for pooling in poolings:
        if pooling not in model.poolings:
            raise UsageError(
                with_options(
                    "{pooling:{value}}: {name} makes one vector per frame",
                    value=pooling,
                    name=printable(model.name),
                ),
                hint=with_options("leave {pooling} out, or name an ESM-2 with {model}"),
                option="pooling",
            )
    chosen: list[Pooling] = [pooling for pooling in get_args(Pooling) if pooling in poolings]
    return chosen or [model.poolings[0]]


def _check_include(include: Include, model: Model) -> None:
    """Check that a model has the head for a value of ``--include``.

    Raises:
        UsageError: it has not.
    """
    if include not in model.includes:
        head = "contact head" if include == "contacts" else "language-model head"
        raise UsageError(
            with_options(
                "{include:{value}}: {name} has no {head}",
                value=include,
                name=printable(model.name),
                head=head,
            ),
            hint=model.explain_missing(include),
            option="include",
        )
