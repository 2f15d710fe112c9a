"""``virnucpro predict``: score and call the input records, and embed them if a model is given.

The steps are those of ``extract``. In addition, a classifier selects the records to embed, and its
calls fill the tables. Without a model, stored scores replace stored vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from virnucpro.core.events import STAGES, EventHandler
from virnucpro.core.helper_pool import HelperPool
from virnucpro.core.logging import LOGGER
from virnucpro.core.option_schema import convert_options
from virnucpro.core.recipe import Recipe
from virnucpro.engine.base import Executor
from virnucpro.results.outputs import OUTPUTS, open_run_dir
from virnucpro.store.frame_scores import FrameScoreStore
from virnucpro.store.manifest import Manifest
from virnucpro.store.plan import Plan
from virnucpro.store.run_dir import RunDir
from virnucpro.viral.classifier import RecordClassifier
from virnucpro.viral.options import ThresholdOptions
from virnucpro.viral.provirus import ProvirusFinder
from virnucpro.workflows.complete_run import complete_run
from virnucpro.workflows.lost_inputs import find_lost_inputs
from virnucpro.workflows.predict_config import PredictConfig
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.predict_rows import SELECTION, CallRowBuilder
from virnucpro.workflows.resolve_predict import resolve_predict
from virnucpro.workflows.run_context import RunContext, RunRecord, has_sample_tables
from virnucpro.workflows.run_steps import (
    ExecutorOn,
    OpenRun,
    PlanSteps,
    announce_plan,
    choose_executor,
    local_executor,
    lock_run_dir,
    log_summary,
    make_plan,
    open_run,
    read_inputs,
    start_record,
    start_workers,
)
from virnucpro.workflows.score_cache import ScoreStore
from virnucpro.workflows.summary import Summary

if TYPE_CHECKING:
    from virnucpro.workflows.frame_scoring import FrameScorer


def predict(
    options: PredictOptions,
    on_event: EventHandler,
    executor_on: ExecutorOn = local_executor,
    pool: HelperPool | None = None,
) -> Summary:
    """Call the input records and write the results to the run folder.

    Args:
        pool: helpers that may still be starting. None: start them when they are needed.

    Raises:
        VirnucproError: see ``errors``. Finished shards are always kept.
    """
    with lock_run_dir(options.output_dir) as lock_new_folder:
        config = resolve_predict(options, on_event)
        lock_new_folder()
        executor = choose_executor(config, executor_on)
        return run_locked_predict(config, executor, on_event, pool)


def run_predict(
    config: PredictConfig,
    executor: Executor,
    on_event: EventHandler,
    pool: HelperPool | None = None,
) -> Summary:
    """Run or resume a prediction. Creates the folder if it is missing.

    Raises:
        VirnucproError: see ``errors``. Finished shards are always kept.
    """
    with open_run_dir(config.output).locked(create=True):
        return run_locked_predict(config, executor, on_event, pool)


def run_locked_predict(
    config: PredictConfig,
    executor: Executor,
    on_event: EventHandler,
    pool: HelperPool | None = None,
) -> Summary:
    """Run or resume a prediction in a folder that the caller has locked.

    Raises:
        VirnucproError: see ``errors``. Finished shards are always kept.
    """
    options = config.options
    summary = Summary()
    with open_run(config, executor, pool) as run:
        if lost_inputs := find_lost_inputs(options, run.recorded):
            _predict_without_inputs(run, config, lost_inputs[0], summary, on_event)
            log_summary(run.dir, summary)
            return summary
        with summary.stage(STAGES[0]), run.dir.planning():
            manifest = read_inputs(run, config, on_event)
            calls = resolve_calls(config, run.dir, manifest.recipe)
            record = record_predict(run.dir, config, manifest, calls)
            sink = make_sink(run.dir, manifest.recipe, calls.classifier)
            job = start_workers(run, config, record, executor, sink)

            def describe(plan: Plan) -> RunContext:
                context = predict_context(config, record, calls, plan, run.pool, on_event)
                announce_plan(context, options, warnings=warn_of_plan(calls.classifier, plan))
                summary.announce_calls(calls.classifier, run.recorded)
                return context

            steps = PlanSteps(
                run=run,
                record=record,
                config=config,
                selection=SELECTION,
                scores=calls.scores,
                describe=describe,
                on_event=on_event,
            )
            plan = make_plan(steps, executor)
        complete_run(plan, steps, job, executor, summary)
    return summary


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Classification:
    """The classifier, region finder and score store for one input type."""

    classifier: RecordClassifier
    finder: ProvirusFinder | None  # None: no search for regions
    scores: ScoreStore | None  # None: scores are not stored


def resolve_calls(config: PredictConfig, run_dir: RunDir, recipe: Recipe) -> Classification:
    """Resolve the classifier for the input type, its region finder and its stored scores.

    Raises:
        UsageError: a threshold option is not possible for these records.
        InputMissingError, UnavailableError: the region model is missing or damaged.
    """
    options = config.options
    classifier = config.classifier.for_input_type(recipe.input_type)
    finder = None
    if options.regions and recipe.input_type == "nucleotide":
        # The finder uses the scorer, whichever classifier makes the calls.
        finder = ProvirusFinder.load_builtin(
            recipe.genetic_code,
            classifier.scorer,
            options.region_model,
            options.min_posterior,
        )
    scores = None
    if classifier.stores_scores:
        digest = finder.digest if finder else ""
        scores = ScoreStore(run_dir, run_dir.scores, recipe.fingerprint, digest)
    return Classification(classifier=classifier, finder=finder, scores=scores)


def make_sink(run_dir: RunDir, recipe: Recipe, classifier: RecordClassifier) -> FrameScorer | None:
    """Return what scores the frames in the workers, or None without a model or a head."""
    if not recipe.encoders or classifier.frame_head is None:
        assert recipe.keep_vectors, "without a head, a run keeps its vectors"
        return None
    from virnucpro.workflows.frame_scoring import FrameScorer

    store = run_dir.intermediate_scores(recipe)
    return FrameScorer(store, classifier.frame_head, run_dir.feature_stores(recipe))


def record_predict(
    run_dir: RunDir, config: PredictConfig, manifest: Manifest, calls: Classification
) -> RunRecord:
    """Record the facts of a prediction and the key of its rows."""
    options = config.options
    classifier = calls.classifier
    key = (
        type(classifier).__name__,
        sorted(classifier.hashes.items()),
        classifier.threshold,
        convert_options(options, ThresholdOptions, region_model=None),
        calls.finder.digest if calls.finder else "",
        has_sample_tables(options, run_dir),
    )
    announcements = (*classifier.announcements, *config.announcements)
    return start_record(run_dir, config, manifest, announcements, key)


def make_row_builder(config: PredictConfig, plan: Plan, calls: Classification) -> CallRowBuilder:
    """Build the row builder that the table tasks of a prediction share."""
    manifest = plan.manifest
    per_file = has_sample_tables(config.options, plan.rundir)
    return CallRowBuilder(
        manifest=manifest,
        stores=plan.rundir.feature_stores(manifest.recipe),
        frame_scores=plan.rundir.frame_scores(manifest.recipe),
        intermediate_scores=_intermediate_scores(plan, calls.classifier),
        slices=plan.shards_by_slice,
        per_file=per_file,
        with_own_ids=per_file and manifest.is_qualified,
        classifier=calls.classifier,
        finder=calls.finder,
        scores=calls.scores,
        finds_genes=config.options.genes,
    )


def _intermediate_scores(plan: Plan, classifier: RecordClassifier) -> FrameScoreStore | None:
    """Return where workers store the scores of frames, if the run also keeps the vectors."""
    recipe = plan.manifest.recipe
    if not (recipe.encoders and recipe.keep_vectors) or classifier.frame_head is None:
        return None
    return plan.rundir.intermediate_scores(recipe)


def predict_context(
    config: PredictConfig,
    record: RunRecord,
    calls: Classification,
    plan: Plan,
    pool: HelperPool,
    on_event: EventHandler,
) -> RunContext:
    """Build the context that the steps after planning share."""
    options = config.options
    run_dir = record.run_dir
    return RunContext(
        run_dir=run_dir,
        record=record,
        plan=plan,
        row_builder=make_row_builder(config, plan, calls),
        outputs=OUTPUTS["predict"],
        scores=calls.scores,
        searches_regions=calls.finder is not None,
        per_file=has_sample_tables(options, run_dir),
        keep_intermediate=options.keep_intermediate,
        has_report=options.report,
        pool=pool,
        on_event=on_event,
        max_merged_bytes=config.max_merged_bytes,
    )


def warn_of_plan(classifier: RecordClassifier, plan: Plan) -> list[str]:
    """Warn about records that get no call or only a weak one."""
    counts = plan.counts
    numbers = (counts.n_records, counts.n_short, len(plan.shards))
    return list(classifier.warnings(plan.manifest.recipe.chunk_size, *numbers))


def _predict_without_inputs(
    run: OpenRun, config: PredictConfig, lost_input: str, summary: Summary, on_event: EventHandler
) -> None:
    """Apply another threshold to the stored scores of a finished run whose input is missing.

    Raises:
        ResumeError, InputMissingError: as ``check_same_recipe`` and ``rethreshold``.
    """
    from virnucpro.store.recipe_changes import check_same_recipe
    from virnucpro.workflows.rethreshold import rethreshold

    recorded = run.recorded
    assert recorded is not None, "a run that is resumed"
    check_same_recipe(recorded, config.recipe_for(recorded.recipe.input_type))
    calls = resolve_calls(config, run.dir, recorded.recipe)
    assert calls.scores is not None, "scores are kept where the scorer calls"
    record = record_predict(run.dir, config, recorded, calls)
    plan = Plan(run.dir, recorded)
    context = predict_context(config, record, calls, plan, run.pool, on_event)
    LOGGER.warning(
        "the input is missing: %s; using the scores of this run for the calls", lost_input
    )
    summary.count_plan(plan)
    summary.announce_calls(calls.classifier, recorded)
    rethreshold(context, make_row_builder(config, plan, calls), calls.scores, lost_input, summary)
