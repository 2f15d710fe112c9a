"""The resolved configuration of a prediction, and how to resolve one that embeds nothing."""

from __future__ import annotations

from dataclasses import dataclass

from virnucpro.core.machine import count_workers, read_machine
from virnucpro.core.option_schema import convert_options
from virnucpro.engine.base import Resources
from virnucpro.viral.classifier import RecordClassifier
from virnucpro.viral.classifier_choice import choose_classifier
from virnucpro.viral.options import ThresholdOptions
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.run_config import RunConfig, make_recipe


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PredictConfig(RunConfig):
    """One resolved ``predict``, with or without encoders."""

    options: PredictOptions
    classifier: RecordClassifier


def resolve_scorer_alone(options: PredictOptions) -> PredictConfig:
    """Resolve a run without vectors: all cores serve the parent process and its helpers."""
    classifier = choose_classifier(
        convert_options(options, ThresholdOptions), options.calls, None, []
    )
    machine = read_machine(options.slurm)
    n_helpers = count_workers(options.workers, 0, machine) - 1
    chunk_size = classifier.chunk_size(options.chunk_size)
    shortest = classifier.min_length("nucleotide")
    return PredictConfig(
        options=options,
        classifier=classifier,
        recipe=make_recipe(options, (), chunk_size, shortest, classifier.hashes, keep_vectors=True),
        resources=Resources(
            devices=("cpu",),
            tokens_per_batch=1,
            n_helpers=n_helpers,
            memory=machine.memory_total,
        ),
        min_protein_length=classifier.min_length("protein"),
        announcements=("devices: CPU cores; no GPU is used, because no model embeds",),
    )
