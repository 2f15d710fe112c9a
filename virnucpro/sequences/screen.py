"""The screen before embedding and scoring: a status for each record that is left out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from virnucpro.ground.config import Recipe
from virnucpro.ground.records import FastaRecord, Records, Status
from virnucpro.sequences.fasta import find_invalid, is_of_type

MAX_RESIDUES = 50_000  # longer than any protein known; attention grows with the square


def screen(record: FastaRecord, recipe: Recipe) -> tuple[Status | None, str]:
    """The status and the note of a record that is left out, or None and ""."""
    length = len(record.sequence)
    invalid = find_invalid(record, recipe.input_type)
    if invalid:
        return "invalid", invalid
    if recipe.input_type == "protein" and length > MAX_RESIDUES:
        return "invalid", f"{length} residues; at most {MAX_RESIDUES} are embedded"
    if recipe.input_type == "protein" and not protein_of(record):
        return "invalid", "the record holds nothing but a stop"
    if length < recipe.min_length:
        return "too_short", f"{length} of at least {recipe.min_length}"
    return None, ""


def screen_all(records: Records, recipe: Recipe) -> dict[int, tuple[Status, str]]:
    """The status and the note of each record that is left out, by its place."""
    places: Iterable[int] = range(len(records.ids))
    is_usual = recipe.input_type == "nucleotide" and is_of_type(
        "".join(records.sequences), recipe.input_type
    )
    if is_usual:
        is_short = records.lengths < max(1, recipe.min_length)
        places = np.flatnonzero(is_short).tolist()
    screened = ((place, *screen(records.at(place), recipe)) for place in places)
    return {place: (status, note) for place, status, note in screened if status is not None}


def protein_of(record: FastaRecord) -> str:
    """The protein in upper case, without the stop that gene callers write at the end."""
    return record.sequence.upper().removesuffix("*")
