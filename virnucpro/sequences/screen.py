"""The screen before embedding and scoring: a status for each record that is left out."""

from __future__ import annotations

from virnucpro.ground.config import Recipe
from virnucpro.ground.records import FastaRecord, Status
from virnucpro.sequences.fasta import find_invalid

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


def protein_of(record: FastaRecord) -> str:
    """The protein in upper case, without the stop that gene callers write at the end."""
    return record.sequence.upper().removesuffix("*")
