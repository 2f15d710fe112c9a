"""Round nets to the whole numbers that ``virnucpro/viral/native/networks.c`` computes with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from virnucpro.core.numeric import FloatArray
from virnucpro.viral.features import CLIP, RATIOS
from virnucpro.viral.networks import Layer, NetworkStack, Stack, Weights

N_LEVELS = 127  # of a feature, from its centre to ``CLIP``
MEAN_LEVEL = 128  # of a feature at its centre
GELU_STEPS = 20  # levels per unit of a GELU's output
GELU_ZERO = 4  # level of an output of 0
INNER_STEPS = 64  # steps per unit of a GELU's input
LARGEST = 63  # weight: two of its products with levels fit into 16 bits
FARTHEST_START = 2.0**22  # products add up to less than 2^25
# of each layer: step of its inputs, their level of 0, and steps per unit of its sums
_Steps = tuple[float, int, int]
_STEPS: tuple[_Steps, ...] = (
    (CLIP / N_LEVELS, MEAN_LEVEL, INNER_STEPS),
    (1 / GELU_STEPS, GELU_ZERO, INNER_STEPS),
    (1 / GELU_STEPS, GELU_ZERO, 1),
)

FittedLayer = tuple[Weights, Weights]  # weights (n_nets, out, in), biases (n_nets, out)
Fitted = tuple[tuple[FittedLayer, ...], int]  # a ``Stack`` before it is rounded


def rounded(
    mean: Weights,
    deviation: Weights,
    stacks: Mapping[int, Fitted],
    prokaryotic: Fitted | None = None,
) -> NetworkStack:
    """Nets of features that are standardised by ``mean`` and ``deviation``, (n_features,) each."""
    scale = np.float32(N_LEVELS / CLIP) / deviation
    centre = (np.rint(mean.astype(np.float64) * scale) / scale).astype(np.float32)
    moved = (centre.astype(np.float64) - mean) / deviation

    def of(stack: Fitted, column: int) -> Stack:
        layers, n_viral = stack
        (weight, bias), *others = layers
        shifted = bias + weight @ moved[column : column + weight.shape[2]]
        each = zip([(weight, shifted), *others], _STEPS, strict=True)
        return tuple(_rounded(*layer, steps) for layer, steps in each), n_viral

    each = {column: of(stack, column) for column, stack in stacks.items()}
    return NetworkStack(centre, scale, each, prokaryotic and of(prokaryotic, RATIOS.start))


def _rounded(weights: Weights, biases: Weights | FloatArray, steps: _Steps) -> Layer:
    """Round a layer. A start is limited, so that sums do not overflow."""
    step, zero, unit = steps
    weight = weights.astype(np.float64)
    bias = biases.astype(np.float64)
    smallest = np.maximum(abs(bias) / step / FARTHEST_START, np.finfo(np.float32).tiny)
    unit_scale = np.maximum(abs(weight).max(axis=2) / LARGEST, smallest)
    numbers = np.rint(weight / unit_scale[:, :, None])
    start = np.rint(bias / (unit_scale * step)) - zero * numbers.sum(axis=2)
    worth = unit_scale * step * unit
    return numbers.astype(np.int8), start.astype(np.int32), worth.astype(np.float32)
