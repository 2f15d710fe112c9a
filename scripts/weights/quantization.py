"""Quantize fitted networks to the integers of ``virnucpro/viral/native/networks.c``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from virnucpro.core.numeric import FloatArray
from virnucpro.viral.features import CLIP, WindowFeatures
from virnucpro.viral.networks import NetworkStack, QuantizedLayer, Stack, Weights

N_LEVELS = 127  # of a feature, from its centre to ``CLIP``


class LayerScale(NamedTuple):
    """The integer scales around a layer."""

    input_step: float  # value of one input level
    zero_point: int  # input level of 0
    output_steps: int  # per unit of the layer's output


GELU_OUTPUT_STEP = 1 / 20
GELU_ZERO_POINT = 4
GELU_INPUT_STEPS = 64  # per unit
LAYER_SCALES = (
    LayerScale(CLIP / N_LEVELS, zero_point=128, output_steps=GELU_INPUT_STEPS),
    LayerScale(GELU_OUTPUT_STEP, GELU_ZERO_POINT, output_steps=GELU_INPUT_STEPS),
    LayerScale(GELU_OUTPUT_STEP, GELU_ZERO_POINT, output_steps=1),
)

FloatLayer = tuple[Weights, Weights]  # weights (n_nets, out, in), biases (n_nets, out)
FloatStack = tuple[tuple[FloatLayer, ...], int]  # a ``Stack`` before quantization


def quantize_networks(
    mean: Weights,
    deviation: Weights,
    stacks: Mapping[int, FloatStack],
    prokaryotic: FloatStack | None = None,
) -> NetworkStack:
    """Quantize networks of features standardised by ``mean`` and ``deviation``, (n_features,)."""
    scale = np.float32(N_LEVELS / CLIP) / deviation
    centre = (np.rint(mean.astype(np.float64) * scale) / scale).astype(np.float32)
    shift = (centre.astype(np.float64) - mean) / deviation

    def quantize_stack(stack: FloatStack, column: int) -> Stack:
        layers, n_viral = stack
        (weight, bias), *deeper_layers = layers
        shifted_bias = bias + weight @ shift[column : column + weight.shape[2]]
        scaled_layers = zip([(weight, shifted_bias), *deeper_layers], LAYER_SCALES, strict=True)
        return tuple(_quantize_layer(*layer, scales) for layer, scales in scaled_layers), n_viral

    quantized = {column: quantize_stack(stack, column) for column, stack in stacks.items()}
    return NetworkStack(
        centre,
        scale,
        quantized,
        prokaryotic and quantize_stack(prokaryotic, WindowFeatures.RATIOS_VIEW.start),
    )


def _quantize_layer(
    weights: Weights, biases: Weights | FloatArray, scale: LayerScale
) -> QuantizedLayer:
    """Quantize a layer. Its integer bias is limited, so that sums do not overflow."""
    max_weight = 63  # two products of weights and levels fit into 16 bits
    max_bias = 2.0**22  # the products add up to less than 2^25
    weight = weights.astype(np.float64)
    bias = biases.astype(np.float64)
    min_step = np.maximum(abs(bias) / scale.input_step / max_bias, np.finfo(np.float32).tiny)
    weight_step = np.maximum(abs(weight).max(axis=2) / max_weight, min_step)
    levels = np.rint(weight / weight_step[:, :, None])
    integer_bias = np.rint(bias / (weight_step * scale.input_step))
    integer_bias -= scale.zero_point * levels.sum(axis=2)
    output_scale = weight_step * scale.input_step * scale.output_steps
    return QuantizedLayer(
        levels.astype(np.int8), integer_bias.astype(np.int32), output_scale.astype(np.float32)
    )
