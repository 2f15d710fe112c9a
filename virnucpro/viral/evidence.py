"""Combine a record's score with the evidence that it is a known virus."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

import numpy as np

from virnucpro.viral.known import (
    ENDOGENOUS,
    MAY_BE_ENDOGENOUS,
    KnownIndex,
    KnownRecords,
    WindowHits,
)
from virnucpro.viral.options import ThresholdOptions
from virnucpro.viral.proteins import Proteins
from virnucpro.viral.types import CalledRecords, Calls


def add_evidence(
    calls: Calls,
    hits: WindowHits,
    options: ThresholdOptions,
    index: KnownIndex,
    *,
    is_protein: bool = False,
) -> None:
    """Call records by the evidence that the options select, in place.

    The index counts its false calls in nucleotides, so a protein has those of its codons.

    A record without a score is not called, and its score never changes. A known record gets the
    false discovery rate for its evidence, or the rate for its score if that is lower and counts.
    """
    known = index.classify(hits, len(calls.record_ids))
    lengths = np.array(calls.lengths, dtype=np.int64)
    if is_protein:
        bases_per_residue = 3
        lengths *= bases_per_residue
    rates = index.false_discovery_rates(known.strength, lengths, options.prevalence).tolist()
    was_looked_up = np.flatnonzero(known.n_windows > 0).tolist()
    for record, n_kmers in zip(was_looked_up, known.n_viral[was_looked_up].tolist(), strict=True):
        calls.n_known_kmers[record] = n_kmers
    for record in np.flatnonzero(known.is_known).tolist():
        calls.known_families[record] = index.owners[known.owner[record]]
    uses_score = options.evidence != "known"
    uses_index = options.evidence != "score"
    # Other records are not called, and have no evidence.
    candidates = known.is_known | np.array(calls.are_viruses, dtype=np.bool_)
    for record in np.flatnonzero(candidates).tolist():
        by_score = calls.are_viruses[record] and uses_score
        has_score = calls.virus_scores[record] is not None
        by_index = bool(known.is_known[record]) and uses_index and has_score
        calls.are_viruses[record] = by_score or by_index
        calls.evidences[record] = _evidence_word(by_score=by_score, by_index=by_index)
        if by_index:
            score_rate = calls.rates[record]
            is_lower = by_score and score_rate is not None and score_rate < rates[record]
            calls.rates[record] = score_rate if is_lower else rates[record]
            notes = (calls.notes[record], *_evidence_notes(index, known, record))
            calls.notes[record] = "; ".join(filter(None, notes))


def _evidence_word(*, by_score: bool, by_index: bool) -> str:
    if by_score:
        return "both" if by_index else "score"
    return "known" if by_index else ""


def _evidence_notes(index: KnownIndex, known: KnownRecords, record: int) -> Iterable[str]:
    """Yield remarks on a known virus for the user: it may be part of a host genome."""
    n_known = int(known.n_known_windows[record])
    n_windows = int(known.n_windows[record])
    if n_known < n_windows:
        yield f"known in {n_known} of {n_windows} parts: may be a provirus"
    if index.owners[known.owner[record]] in ENDOGENOUS:
        yield MAY_BE_ENDOGENOUS


def look_up_and_add(
    results: CalledRecords, options: ThresholdOptions, *, is_protein: bool = False
) -> None:
    """Look up the records with a score in the index, and call them as ``add_evidence`` does."""
    is_scored = [status == "scored" for status in results.calls.statuses]
    index = KnownIndex.load_builtin()
    record_indices = np.flatnonzero(is_scored)
    if is_protein:
        proteins = [results.records.record_at(record).protein for record in record_indices.tolist()]
        hits = index.look_up_proteins(Proteins.from_sequences(proteins))
    else:
        hits = index.look_up(list(compress(results.records.sequences, is_scored)))
    hits = hits._replace(record=record_indices[hits.record])
    add_evidence(results.calls, hits, options, index, is_protein=is_protein)
