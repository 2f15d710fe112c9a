"""Compare every output of a model with its reference, for ``models check``.

The reference gives the hidden states of all layers, logits and contacts. Poolings and perplexities
are derived from them here, in float64 and without our own code. The distance between two results
may be as large as the precision's roundings explain (``roundings``):

- vectors, logits: the relative L2 distance between rows
- standard deviations: the same, relative to the length of the residues, since they may be zero
- contacts: the relative L2 distance between the maps of a protein
- perplexities: the difference of their logarithms. A logarithm is a mean over residues, so its
  error is at most the largest error of a residue's log-probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.model_outputs import (
    MASK_LETTER,
    HeadOutput,
    Include,
    parse_vector_name,
    vector_name,
)
from virnucpro.core.recipe import EncoderSpec
from virnucpro.models.base import Model, Rows
from virnucpro.models.output_choice import ALL_LAYERS, OutputChoice, choose_outputs
from virnucpro.models.protein_tokens import SpecialToken, tokenize
from virnucpro.models.validation.roundings import largest_distance

Outputs = Mapping[str, Mapping[str, Rows]]  # output -> sequence -> rows
Texts = Mapping[str, str]  # sequence -> letters

CONTACT_LENGTHS = range(9, 258)  # residues; the reference keeps the attention of all layers


@dataclass(frozen=True, slots=True)
class OutputDeviation:
    """The largest distance of one output from the reference, relative to its tolerance."""

    output: str
    sequence: str
    distance: float
    tolerance: float

    @property
    def share(self) -> float:
        """Return the share of the tolerance. Above 1 is a failure."""
        if self.distance == 0:
            return 0.0
        return self.distance / self.tolerance if self.tolerance else math.inf


@dataclass(frozen=True, slots=True)
class ReferenceOutputs:
    """The reference's results for the panel, for contacts, and for masked residues."""

    panel: Outputs
    contacts: Outputs
    masked: Outputs  # logits of the proteins in ``mask_each``

    def expected(self, output: str) -> dict[str, Rows]:
        """Derive one of our outputs, by sequence. Perplexities are left out."""
        reductions: dict[str, Callable[..., Any]] = {"mean": np.mean, "max": np.max, "std": np.std}
        if output == HeadOutput.CONTACTS:
            return {name: rows.reshape(1, -1) for name, rows in self.contacts[output].items()}
        vectors = parse_vector_name(output)
        if vectors is None or output in self.panel:
            return dict(self.panel[output])
        residues = self.panel[vector_name("none", vectors.layer)]
        reduce = reductions[vectors.pooling]
        return {
            name: reduce(rows.astype(np.float64), axis=0, keepdims=True)
            for name, rows in residues.items()
        }

    def losses(self, texts: Texts) -> dict[str, dict[str, NDArray[np.float64]]]:
        """Return the negative log-probabilities of residues, by perplexity and sequence."""
        logits = self.panel[HeadOutput.LOGITS]
        single = {name: _losses(logits[name], texts[name]) for name in logits}
        masked = {}
        for name in masked_proteins(texts):
            residue_losses = []
            for i, letter in enumerate(texts[name]):
                rows = self.masked[HeadOutput.LOGITS][_masked_name(name, i)]
                residue_losses.append(_losses(rows[i : i + 1], letter))
            masked[name] = np.concatenate(residue_losses)
        return {HeadOutput.SINGLE_PASS_PERPLEXITY: single, HeadOutput.PERPLEXITY: masked}


# The outputs that both programs compute


def add_masked(panel: Texts) -> Texts:
    """Return the panel with a protein that has masks."""
    mask_every = 5  # every fifth residue of a protein with masks
    letters = list(panel["ubiquitin"])
    letters[::mask_every] = MASK_LETTER * len(letters[::mask_every])
    return {**panel, "masked": "".join(letters)}


def mask_each(texts: Texts) -> Texts:
    """Return the short proteins with each of their residues masked in turn."""
    return {
        _masked_name(name, i): text[:i] + MASK_LETTER + text[i + 1 :]
        for name in masked_proteins(texts)
        for text in [texts[name]]
        for i in range(len(text))
    }


def masked_proteins(texts: Texts) -> list[str]:
    """List the proteins for the pseudo-perplexity, which are short: its cost is quadratic."""
    max_masked = 16  # residues of the proteins whose residues are masked one by one
    return [name for name, text in texts.items() if len(text) <= max_masked]


def _masked_name(protein: str, i: int) -> str:
    return f"{protein} {i}"


def panel_spec(spec: EncoderSpec, model: Model) -> EncoderSpec:
    """Return a specification of what the reference computes for the panel."""
    poolings = tuple(pooling for pooling in model.poolings if pooling in ("bos", "none"))
    includes: tuple[Include, ...] = ("logits",) if "logits" in model.includes else ()
    choice = OutputChoice((ALL_LAYERS,), poolings or model.poolings, includes)
    return with_choice(spec, model, choice)


def complete_spec(spec: EncoderSpec, model: Model) -> EncoderSpec:
    """Return a specification of all outputs but the pseudo-perplexity."""
    includes = tuple(include for include in model.includes if include != "perplexity")
    return with_choice(spec, model, OutputChoice((ALL_LAYERS,), model.poolings, includes))


def include_spec(spec: EncoderSpec, model: Model, include: Include) -> EncoderSpec:
    """Return a specification of the result of one head, besides the default vectors."""
    return with_choice(spec, model, OutputChoice(includes=(include,)))


def with_choice(spec: EncoderSpec, model: Model, choice: OutputChoice) -> EncoderSpec:
    chosen = choose_outputs(choice, model, spec.store)
    return model.spec(
        sha256=spec.sha256, precision=spec.precision, store=spec.store, **chosen._asdict()
    )


# Distances


def find_tolerances(
    exact: ReferenceOutputs, rounded: ReferenceOutputs, outputs: Sequence[str], texts: Texts
) -> dict[str, float]:
    """Return the largest distance that roundings explain, for each output."""
    explained = {}
    for output in outputs:
        if output in (HeadOutput.SINGLE_PASS_PERPLEXITY, HeadOutput.PERPLEXITY):
            continue
        distances = _distances(output, rounded.expected(output), exact)
        explained[output] = max(distances.values())
    for output in {HeadOutput.SINGLE_PASS_PERPLEXITY, HeadOutput.PERPLEXITY}.intersection(outputs):
        losses = exact.losses(texts)[output]
        errors = rounded.losses(texts)[output]
        explained[output] = max(float(abs(errors[name] - losses[name]).max()) for name in losses)
    return explained


def find_output_deviations(
    ours: Outputs, exact: ReferenceOutputs, tolerances: Mapping[str, float], texts: Texts
) -> list[OutputDeviation]:
    """Compare our outputs with the reference: the worst sequence of each, worst output first."""
    deviations = []
    for output, tolerance in tolerances.items():
        if output in (HeadOutput.SINGLE_PASS_PERPLEXITY, HeadOutput.PERPLEXITY):
            distances = _perplexity_distances(ours[output], exact.losses(texts)[output])
        else:
            distances = _distances(output, ours[output], exact)
        worst = max(distances, key=lambda name: distances[name])
        deviations.append(OutputDeviation(output, worst, distances[worst], tolerance))
    return sorted(deviations, key=lambda one: one.share, reverse=True)


def _distances(output: str, rows: Mapping[str, Rows], exact: ReferenceOutputs) -> dict[str, float]:
    """Return the distance of an output from the reference, by sequence."""
    expected = exact.expected(output)
    vectors = parse_vector_name(output)
    if vectors is not None and vectors.pooling == "std":
        residues = exact.panel[vector_name("none", vectors.layer)]
        return {
            name: _scaled_distance(rows[name], expected[name], residues[name]) for name in expected
        }
    if output == HeadOutput.CONTACTS:
        return {
            name: largest_distance(rows[name].reshape(1, -1), expected[name]) for name in expected
        }
    return {name: largest_distance(rows[name], expected[name]) for name in expected}


def _scaled_distance(row: Rows, exact: Rows, residues: Rows) -> float:
    """Return the L2 distance of two rows, relative to the root mean square length of residues."""
    length = math.sqrt(float((residues.astype(np.float64) ** 2).sum(axis=1).mean()))
    distance = float(np.linalg.norm(row.astype(np.float64) - exact.astype(np.float64))) / length
    return distance if math.isfinite(distance) else math.inf


def _perplexity_distances(
    rows: Mapping[str, Rows], losses: Mapping[str, NDArray[np.float64]]
) -> dict[str, float]:
    distances = {}
    for name, residue_losses in losses.items():
        distance = abs(math.log(float(rows[name][0, 0])) - float(residue_losses.mean()))
        distances[name] = distance if math.isfinite(distance) else math.inf
    return distances


def _losses(logits: Rows, text: str) -> NDArray[np.float64]:
    """Return the negative log-probability of each residue that is no mask."""
    tokens = tokenize([text])[1:-1]
    known = tokens != SpecialToken.MASK
    exact = logits.astype(np.float64)[known]
    largest = exact.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(exact - largest).sum(axis=1)) + largest[:, 0]
    losses: NDArray[np.float64] = log_sums - exact[np.arange(len(exact)), tokens[known]]
    return losses
