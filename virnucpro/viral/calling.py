"""Classify records with the scorer, by sequence alone, without frames or vectors.

Records arrive in blocks. A score does not depend on the other records in its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan

import numpy as np

from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.core.recipe import Recipe, Status
from virnucpro.core.types import Records
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.sequences.screen import reject_reasons
from virnucpro.viral.evidence import add_evidence
from virnucpro.viral.known import KnownIndex, WindowHits
from virnucpro.viral.networks import (
    ErrorRates,
    Scorer,
    false_discovery_rates_of,
    thresholds_of,
)
from virnucpro.viral.options import FALSE_POSITIVES, ThresholdOptions
from virnucpro.viral.probability import probabilities
from virnucpro.viral.proteins import Proteins
from virnucpro.viral.scoring import WindowScores, score_block, score_proteins
from virnucpro.viral.types import CalledRecords, Calls, FoundRegions, FrameScores


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRecords:
    """Scorer results for neighbouring records: everything a call needs except the threshold."""

    records: Records
    screened: dict[int, Status]  # by index: status of each record that was screened out
    notes: list[str]  # why a record was screened out, or a remark on its sequence
    log_odds: FloatArray  # (n,) NaN: no score
    kingdoms: IntArray  # (n,) index in ``Scorer.kingdoms``, 0 for proteins and without a score
    n_pieces: IntArray  # (n,)
    pieces: WindowScores  # for all records
    known: WindowHits  # for all records that passed the screen
    # by index, for each searched record: its regions if called other, and if called virus
    found: dict[int, tuple[FoundRegions, FoundRegions]] = field(default_factory=dict)


def score_records(records: Records, recipe: Recipe, scorer: Scorer) -> ScoredRecords:
    """Score each record's sequence.

    A protein is a single window, without the final stop that gene callers write.
    """
    is_protein = recipe.input_type == "protein"
    refusals = reject_reasons(records, recipe)
    if is_protein:
        refusals = _short_proteins(records, scorer.min_length("protein")) | refusals
    notes = [refusals[i][1] if i in refusals else "" for i in range(len(records.ids))]
    screened = {index: status for index, (status, _) in refusals.items()}
    indices = np.array([i for i in range(len(notes)) if i not in screened], dtype=np.int64)
    if is_protein:
        proteins = [records.record_at(index).protein for index in indices]
        scores, pieces = _whole_proteins(proteins, scorer)
        kingdoms = np.zeros(len(indices), dtype=np.int64)
        known = KnownIndex.load_builtin().look_up_proteins(Proteins.from_sequences(proteins))
    else:
        sequences = [records.sequences[index] for index in indices]
        scores, pieces, kingdoms = score_block(
            sequences, scorer, GeneticCode.from_number(recipe.genetic_code)
        )
        known = KnownIndex.load_builtin().look_up(sequences)
    log_odds = np.full(len(notes), np.nan)
    log_odds[indices] = scores
    kingdom_indices = np.zeros(len(notes), dtype=np.int64)
    kingdom_indices[indices] = kingdoms
    pieces = pieces._replace(record=np.array(indices, dtype=np.int64)[pieces.record])
    known = known._replace(record=indices[known.record])
    n_pieces = np.bincount(pieces.record, minlength=len(notes))
    return ScoredRecords(
        records, screened, notes, log_odds, kingdom_indices, n_pieces, pieces, known
    )


def _whole_proteins(proteins: Sequence[str], scorer: Scorer) -> tuple[FloatArray, WindowScores]:
    """Return each protein's log-odds, and the single window that covers it."""
    scores = score_proteins(proteins, scorer)
    n = len(proteins)
    lengths = np.array(list(map(len, proteins)), dtype=np.int64)
    return scores, WindowScores(np.arange(n), np.zeros(n, dtype=np.int64), lengths, scores)


def call_scored(
    scored: ScoredRecords, recipe: Recipe, scorer: Scorer, cut: ThresholdOptions
) -> CalledRecords:
    """Call each record, with the scores of its windows."""
    is_protein = recipe.input_type == "protein"
    error_rates = scorer.select_error_rates(recipe.input_type)
    records = scored.records
    pieces = scored.pieces
    n = len(records.ids)
    lengths = records.lengths
    if is_protein:
        scored_lengths = np.ones(n, dtype=np.int64)
        scored_lengths[pieces.record] = pieces.n_bases
    else:
        scored_lengths = lengths
    is_virus, rates = apply_threshold(
        scored.log_odds, np.maximum(1, scored_lengths), scored.kingdoms, error_rates, cut
    )
    scores = _score_columns(probabilities(scored.log_odds))
    has_no_score = np.isnan(scored.log_odds)
    statuses: list[Status] = ["scored"] * n
    notes = list(scored.notes)
    for index in np.flatnonzero(has_no_score).tolist():
        statuses[index] = "no_orf"
        notes[index] = "no known residue" if is_protein else "no known base"
    for index, status in scored.screened.items():
        statuses[index], notes[index] = status, scored.notes[index]
    is_known = ~np.isnan(pieces.log_odds)
    calls = Calls(
        records.names,
        lengths.tolist(),
        statuses,
        records.samples,
        scores,
        scores,
        is_virus.tolist(),
        _score_columns(np.where(has_no_score, np.nan, rates)),
        scored.n_pieces.tolist(),
        np.bincount(pieces.record[is_known], minlength=n).tolist(),
        [0] * n,
        notes,
        [""] * n,
        [""] * n,
        [None] * n,
    )
    known_index = KnownIndex.load_builtin()
    add_evidence(calls, scored.known, cut, known_index, is_protein=is_protein)
    return CalledRecords(records, calls, _frames(scored, is_known, is_protein=is_protein))


def _frames(scored: ScoredRecords, is_known: BoolArray, *, is_protein: bool) -> FrameScores:
    """Return the scores of windows with a known base.

    A window covers both strands and is its own chunk.
    """
    pieces = scored.pieces
    names = scored.records.ids
    owners = pieces.record[is_known]
    firsts = np.cumsum(scored.n_pieces) - scored.n_pieces
    numbers = np.arange(1, 1 + len(pieces.record)) - firsts[pieces.record]
    if is_protein:
        ids = [names[owner] for owner in owners.tolist()]
    else:
        suffixes = [f"_piece_{number}" for number in range(1 + numbers.max(initial=0))]
        pairs = zip(owners.tolist(), numbers[is_known].tolist(), strict=True)
        ids = [names[owner] + suffixes[number] for owner, number in pairs]
    n_per_record = np.bincount(owners, minlength=len(names)).tolist()
    return FrameScores(n_per_record, ids, ids, probabilities(pieces.log_odds[is_known]).tolist())


def _short_proteins(records: Records, shortest: int) -> dict[int, tuple[Status, str]]:
    """Return the status and note of each protein that is too short for the scorer, by index."""
    lengths = [len(record.protein) for record in records.iter_records()]
    return {
        index: ("too_short", f"{length} of at least {shortest}")
        for index, length in enumerate(lengths)
        if length < shortest
    }


def _score_columns(values: FloatArray) -> list[float | None]:
    """Replace NaN by None."""
    return [None if isnan(value) else value for value in values.tolist()]


def apply_threshold(
    log_odds: FloatArray,
    lengths: IntArray,
    kingdoms: IntArray,
    error_rates: Sequence[Sequence[ErrorRates]],
    cut: ThresholdOptions,
) -> tuple[BoolArray, FloatArray]:
    """Return whether each record is viral by its calibrated log-odds, and its false discovery rate.

    Error rates are by kingdom. NaN is not viral. Both results are (n,).
    """
    share = FALSE_POSITIVES[cut.preset]
    is_virus = log_odds >= thresholds_of(error_rates, kingdoms, lengths, share)
    if cut.threshold is not None:
        is_virus = probabilities(log_odds) >= cut.threshold
    rates = false_discovery_rates_of(error_rates, kingdoms, log_odds, lengths, cut.prevalence)
    return is_virus, rates
