"""Screen records: invalid and too short ones are not read further."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from virnucpro.core.model_outputs import MASK_LETTER
from virnucpro.core.numeric import IntArray
from virnucpro.core.recipe import Recipe, Status
from virnucpro.core.types import MASK_TEXT, FastaRecord, Records
from virnucpro.sequences.fasta import find_invalid, matches_type

# instead of the index of the first ``--embed`` rule that selects a record
EXCLUDED = -1  # no rule selects it
REJECTED = -2  # it cannot be embedded


def reject_reason(record: FastaRecord, recipe: Recipe) -> tuple[Status | None, str]:
    """Return the status and note of a record that is rejected, or None and ""."""
    if invalid := find_invalid(record, recipe.input_type):
        return "invalid", invalid
    if recipe.command == "predict" and MASK_LETTER in record.sequence:
        return "invalid", f"{MASK_TEXT} is read by extract, not by predict"
    if recipe.input_type == "protein" and not record.protein:
        return "invalid", "the record contains only a stop"
    return _screen_length(len(record.sequence), recipe)


def _screen_length(length: int, recipe: Recipe) -> tuple[Status | None, str]:
    max_residues = 50_000  # longer than any known protein; the cost of attention is quadratic
    if recipe.input_type == "protein" and length > max_residues:
        return "invalid", f"{length} residues; at most {max_residues} are embedded"
    if length < recipe.min_length:
        return "too_short", f"{length} of at least {recipe.min_length}"
    return None, ""


def reject_reasons(records: Records, recipe: Recipe) -> dict[int, tuple[Status, str]]:
    """Return the status and note of each rejected record, by index."""
    indices: Iterable[int] = range(len(records.ids))
    if recipe.input_type == "nucleotide" and matches_type(
        "".join(records.sequences), recipe.input_type
    ):
        lengths = records.lengths.tolist()
        rejected = {n for n in set(lengths) if not n or _screen_length(n, recipe)[0]}
        indices = [index for index, n in enumerate(lengths) if n in rejected]
    screened = ((index, *reject_reason(records.record_at(index), recipe)) for index in indices)
    return {index: (status, note) for index, status, note in screened if status is not None}


def reject_records(first_rules: IntArray, records: Records, recipe: Recipe) -> IntArray:
    """Return the first rule of each record, or ``REJECTED`` if it cannot be embedded. (n,)"""
    if not recipe.encoders:
        return np.full_like(first_rules, REJECTED)
    rules = first_rules.copy()
    rules[list(reject_reasons(records, recipe))] = REJECTED
    return rules
