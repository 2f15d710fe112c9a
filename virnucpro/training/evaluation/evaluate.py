"""``virnucpro evaluate``: call labelled records as ``predict`` would, and measure the calls.

Records that were not trained on are cut into fragments of typical lengths. These go through the
same steps as any input to ``predict``. Calls are read from its tables and matched with the labels
by id. Results are ``evaluation.json``, a table, a page, a few lines and, on request, a section in
a model card.

For each length, a record gives as many fragments as fit end to end, at most ``per_record``. The
record is divided into as many equal parts, and each part has a fragment at a random position, on a
random strand. The complete record is a sample too, or a random window if it is longer than
``per_record`` times the longest length. Where a record is cut depends only on its id and the seed.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro._version import __version__
from virnucpro.core.atomic_io import atomic_path, hash_file
from virnucpro.core.errors import InputError, ResumeError, UsageError, VirnucproError
from virnucpro.core.events import EventHandler
from virnucpro.core.logging import LOGGER, announce, format_count, printable
from virnucpro.core.numeric import BoolArray, FloatArray
from virnucpro.core.option_schema import convert_options
from virnucpro.core.recipe import Recipe
from virnucpro.core.safe_dir import SafeDir
from virnucpro.engine.base import Executor
from virnucpro.engine.local import ProcessExecutor
from virnucpro.results.outputs import RunOutput, open_run_dir
from virnucpro.results.table_readers import read_calls, read_frame_scores
from virnucpro.sequences.fasta import read_fasta, write_record
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.sequences.kmers import Sketch
from virnucpro.sequences.translate import Chunk, translate_six_frames
from virnucpro.store.run_dir import RunDir
from virnucpro.training.evaluation.metrics import MEASURES, NOT_DEFINED, Measures, Samples
from virnucpro.training.labelled_data import (
    DataManifest,
    Labelled,
    LabelledRecord,
    Split,
    check_groups,
    group_digest,
    read_data_manifest,
    read_records,
    read_split,
    record_digest,
    warn_of_mixed_groups,
    write_table,
)
from virnucpro.training.options import EvaluateOptions
from virnucpro.training.provirus import evaluate_regions
from virnucpro.training.reports import (
    OVERALL_MEASURES,
    add_evaluation,
    find_card,
    markdown_table,
    write_evaluation_page,
    write_figures,
)
from virnucpro.training.trained_data import Trained, read_trained
from virnucpro.viral.classifier import RecordClassifier
from virnucpro.viral.head import HeadInfo
from virnucpro.viral.types import Prediction
from virnucpro.workflows.predict import run_locked_predict
from virnucpro.workflows.predict_config import PredictConfig
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.resolve_predict import resolve_predict

Figures = dict[str, Any]  # for JSON: rounded; None: not defined
_RUN = "run"  # run folder for the fragments
_WHOLE = "whole"  # length of a complete record
_CHANGED_FOLDER = "the run folder was changed by another program: start again with --force"
_FACTS = ("unit", "length", "subset", "kingdom", "n", "n_virus", "n_groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """An evaluation before it runs: the options, and the data that they name."""

    options: EvaluateOptions
    manifest: DataManifest
    splits: dict[str, Split] | None

    @classmethod
    def from_options(cls, options: EvaluateOptions) -> EvaluationSpec:
        """Read manifest and split, and reject links in the folder.

        Raises:
            InputError, InputMissingError: the manifest or the split is wrong.
            OutputError: a subfolder is a link.
        """
        SafeDir(options.output_dir).refuse_links([_RUN])
        manifest = read_data_manifest(options.data)
        splits = read_split(options.split) if options.split is not None else None
        if splits is not None:
            check_groups(manifest.groups, splits)
        return cls(options=options, manifest=manifest, splits=splits)

    def facts(self, caller: RecordClassifier) -> Figures:
        """Describe what is measured, the data and how they are cut, for ``evaluation.json``."""
        options = self.options
        path = options.split
        return {
            "virnucpro_version": __version__,
            "data": {"path": str(options.data), "sha256": self.manifest.sha256},
            "split": path
            and {"path": str(path), "sha256": hash_file(path), "part": options.for_part},
            "head": None,
            "scorer": None,
            **caller.to_dict,
            "cutting": {
                "lengths": [*options.fragment_lengths],
                "per_record": options.fragments_per_record,
                "seed": options.seed,
            },
        }

    @property
    def run_folder(self) -> Path:
        return self.options.output_dir / _RUN

    @property
    def fasta(self) -> Path:
        return self.options.output_dir / "fragments.fa"

    def read_records(self) -> Iterator[Labelled]:
        """Yield the records to evaluate one by one, and warn about mixed groups at the end.

        Raises:
            InputError: a FASTA file contradicts the manifest, or does not contain nucleotides.
        """
        records = []
        for labelled, record in read_records(self.manifest):
            if self.splits is None or self.splits[labelled.group] == self.options.for_part:
                records.append(labelled)
                yield labelled, record
        warn_of_mixed_groups(records)


@dataclass(frozen=True, kw_only=True, eq=False)
class _SamplesOfKind(Samples):
    """Samples of one kind: records of one length, or chunks.

    A sample without frames has the score NaN. Groups are numbered by their first sample. Each
    sample weighs 1.
    """

    unit: Literal["record", "chunk"]
    length: str
    is_called: BoolArray  # (n,)
    kingdoms: NDArray[np.str_]  # (n,)
    is_trained: BoolArray  # (n,), True if head, encoder or scorer was trained on the record

    @classmethod
    def of(
        cls,
        unit: Literal["record", "chunk"],
        length: str,
        scores: FloatArray,
        is_called: BoolArray,
        records: Sequence[LabelledRecord],
        trained: Set[str],
    ) -> _SamplesOfKind:
        """Make samples.

        Args:
            records: one per sample.
            trained: training record ids.
        """
        return cls(
            scores=scores,
            is_virus=np.array([record.is_virus for record in records], dtype=np.bool_),
            groups=_number_fragments([record.group for record in records]),
            weights=np.ones(len(records)),
            unit=unit,
            length=length,
            is_called=is_called,
            kingdoms=np.array([record.kingdom for record in records], dtype=np.str_),
            is_trained=np.array([record.id in trained for record in records], dtype=np.bool_),
        )

    def as_json(self, figures: Figures) -> Figures:
        """Return these samples' figures, labelled with their kind."""
        return {"unit": self.unit, "length": self.length, **figures}


def _number_fragments(groups: Iterable[object]) -> NDArray[np.int64]:
    """Number groups (n,) by their first sample."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups], dtype=np.int64)


def report_evaluation(options: EvaluateOptions, on_event: EventHandler) -> list[str]:
    """Evaluate records or regions, write the tables and the page, and return lines for the user.

    Raises:
        VirnucproError: as ``evaluate`` and ``evaluate_regions``.
    """
    if options.regions is not None:
        return evaluate_regions(options, options.regions, on_event)
    card = find_card(options.model) if options.card and options.model else None
    folder = options.output_dir
    figures = evaluate(options, on_event)
    with _models_in_use(folder, create=False):
        write_report(folder, figures)
        write_evaluation_page(folder, figures)
    if card is not None:
        add_evaluation(card, list(_card_lines(figures)))
    return summary_lines(folder, figures)


def evaluate(options: EvaluateOptions, on_event: EventHandler) -> Figures:
    """Measure a head, or the scorer, on labelled sequences.

    Raises:
        VirnucproError: see ``errors``. Also raised if something could not be scored.
    """
    question = EvaluationSpec.from_options(options)
    is_new = not options.output_dir.exists()
    prediction = convert_options(
        options,
        PredictOptions,
        input=(),  # set once the fragments are cut
        input_type="nucleotide",
        output_dir=question.run_folder,
        embed=None if options.model is None else "all",
        regions=False,
        report=False,
    )
    config = resolve_predict(prediction, on_event)
    executor = ProcessExecutor(config.resources.devices)
    return evaluate_spec(question, config, executor, on_event, create=is_new)


def evaluate_spec(
    question: EvaluationSpec,
    config: PredictConfig,
    executor: Executor,
    on_event: EventHandler,
    *,
    create: bool = True,
) -> Figures:
    """Cut, score and measure.

    Args:
        config: a run in ``run_folder``, still without inputs.
        create: create the folder if it is missing. False for a folder that existed at first, which
            may have been moved since.

    Returns:
        ``evaluation.json`` as a mapping.

    Raises:
        VirnucproError: see ``errors``. Also raised if something could not be scored.
    """
    caller = config.classifier.for_input_type("nucleotide")
    if question.options.model and "head" not in caller.to_dict:
        raise UsageError(
            f"no head comes with the model {printable(question.options.model)}",
            hint="name a head with --head, or leave --model out to evaluate the scorer",
        )
    trained: set[str] = set()
    folder = question.options.output_dir
    with _models_in_use(folder, create=create):
        pairs = held_out_groups(question.read_records(), caller, question.options, trained)
        scored = _score_records(question, config)
        fragments = write_fragments(pairs, question.options, question.fasta, scored)
        config = replace(config, options=replace(config.options, input=(question.fasta,)))
        open_run_dir(folder).make_folder(question.run_folder)
        with open_run_dir(question.run_folder).locked():
            summary = run_locked_predict(config, executor, on_event)
    if summary.exit_code:
        raise VirnucproError(
            f"not everything was scored: see {printable(question.run_folder)}",
            hint="figures of a part would mislead: run the same command with --resume",
        )
    kinds = list(_read_fragments(question, fragments, trained))
    if head := caller.frame_head:  # the scorer's pieces are equivalent to fragments of that length
        kinds.append(read_chunks(question, fragments, trained, config.recipe, head.facts))
    records = [fragment.record for fragment in fragments if fragment.length == _WHOLE]
    kinds = [kind for kind in kinds if len(kind)]
    return {
        **question.facts(caller),
        "n_records": len(records),
        "n_groups": len({record.group for record in records}),
        "n_trained_records": len(trained),
        "cut": summary.cut,
        "rows": [row for kind in kinds for row in _measure_kind(kind, question.options.seed)],
        "reliability": [kind.as_json(_reliability(kind)) for kind in kinds],
        "roc": [kind.as_json(_roc(kind)) for kind in kinds],
        "scores": [kind.as_json(_histogram(kind)) for kind in kinds],
    }


@contextmanager
def _models_in_use(folder: Path, *, create: bool) -> Iterator[None]:
    """Lock a folder, and delete unfinished files from a killed evaluation.

    A new folder is deleted again if the block fails before it writes results.

    Raises:
        OutputError, StorageError: as ``RunDir.locked``.
    """
    is_new = not folder.exists()
    rundir = open_run_dir(folder)
    try:
        with rundir.locked(create=create):
            rundir.remove_leftovers()
            yield
    except BaseException:
        if is_new:
            with suppress(OSError):  # the first error is the one to report
                if {path.name for path in folder.iterdir()} <= RunDir.command_files:
                    shutil.rmtree(folder)
        raise


def _score_records(question: EvaluationSpec, config: PredictConfig) -> str | None:
    """Return the fragments' SHA-256 from the resumed run, or None for a new run."""
    manifest = open_run_dir(question.run_folder).read_manifest() if config.options.resume else None
    return manifest.inputs[0].sha256 if manifest and manifest.inputs else None


def _read_fragments(
    question: EvaluationSpec, fragments: Sequence[_Fragment], trained: Set[str]
) -> Iterator[_SamplesOfKind]:
    """Yield called fragments by length, ascending, then complete records.

    Raises:
        VirnucproError: a fragment is not in the table of records, or could not be used.
    """
    calls = {
        call.record_id: call
        for call in read_calls(
            open_run_dir(question.run_folder).output(RunOutput.RECORD_TABLE.file), _CHANGED_FOLDER
        )
        if call.status in ("scored", "no_orf", "too_short")
    }
    for fragment in fragments:
        if fragment.id not in calls:
            raise _unscored_samples(
                f"{printable(fragment.id)}, of {printable(fragment.record.id)},"
            )
    for length in (*map(str, sorted(question.options.fragment_lengths)), _WHOLE):
        length_fragments = [fragment for fragment in fragments if fragment.length == length]
        answers = [calls[fragment.id] for fragment in length_fragments]
        yield _SamplesOfKind.of(
            "record",
            length,
            np.array([call.virus_score for call in answers], dtype=np.float64),  # NaN for None
            np.array([call.is_virus for call in answers], dtype=np.bool_),
            [fragment.record for fragment in length_fragments],
            trained,
        )


def read_chunks(
    question: EvaluationSpec,
    fragments: Sequence[_Fragment],
    trained: Set[str],
    recipe: Recipe,
    facts: HeadInfo,
) -> _SamplesOfKind:
    """Return chunks from complete records, as the head alone scores and calls them.

    Frames are looked up by id in the table of frames. It has the same order, with frames from other
    records in between. A chunk without embedded frames has no score.

    Raises:
        VirnucproError: a frame is not in the table.
    """
    records_by_fragment = {
        fragment.id: fragment.record for fragment in fragments if fragment.length == _WHOLE
    }
    scores: list[float] = []
    records: list[LabelledRecord] = []
    code = GeneticCode.from_number(recipe.genetic_code)
    frame_scores = read_frame_scores(
        open_run_dir(question.run_folder).output(RunOutput.FRAME_TABLE.file), _CHANGED_FOLDER
    )
    for record in read_fasta(question.fasta):
        if record.id not in records_by_fragment:
            continue
        chunks = list(Chunk.from_record(record, recipe.chunk_size))
        orfs = translate_six_frames(chunks, code)
        frames = [Prediction(orf, _find(orf.id, frame_scores)) for orf in orfs]
        chunk_scores = facts.score_chunks(frames)
        scores += [chunk_scores.get(chunk.id, np.nan) for chunk in chunks]
        records += [records_by_fragment[record.id]] * len(chunks)
    values = np.array(scores, dtype=np.float64)
    is_called = values >= facts.threshold
    return _SamplesOfKind.of("chunk", _WHOLE, values, is_called, records, trained)


def _find(frame_id: str, scores: Iterator[tuple[str, float]]) -> float:
    for next_id, score in scores:
        if next_id == frame_id:
            return score
    raise _unscored_samples(f"the frame {printable(frame_id)}")


def _unscored_samples(what: str) -> VirnucproError:
    return VirnucproError(f"{what} has no score", hint=_CHANGED_FOLDER)


def _measure_kind(kind: _SamplesOfKind, seed: int) -> Iterator[Figures]:
    """Yield figures for all samples, then for each kingdom against the opposite label.

    ``subset`` is ``all``, ``virus`` (viruses of a kingdom against all non-viruses) or ``other``
    (the reverse). ``scored`` contains the ``Measures`` for samples with a score, each counting 1.
    ``low`` and ``high`` are the ends of their 95 % intervals. In ``equal_groups`` each group of a
    label counts 1. ``no_orf_as_0`` and its ends include samples without a score.
    """
    sides = (("virus", kind.is_virus), ("other", ~kind.is_virus))
    yield {**kind.as_json({}), "subset": "all", "kingdom": "", **_measure_samples(kind, seed)}
    for subset, own_side in sides:
        for kingdom in sorted(set(kind.kingdoms[own_side].tolist()) - {""}):
            part = kind.select(~own_side | (kind.kingdoms == kingdom))
            facts = kind.as_json({"subset": subset, "kingdom": kingdom})
            yield {**facts, **_measure_samples(part, seed)}


def _measure_samples(kind: _SamplesOfKind, seed: int) -> Figures:
    """Measure some samples. Their intervals depend only on these samples and the seed."""
    scored = kind.scored
    scored = replace(scored, groups=_number_fragments(scored.groups.tolist()))
    everything = kind.with_missing_lowest(0.0)
    everything = replace(everything, groups=_number_fragments(everything.groups.tolist()))
    low, high = scored.bootstrap(scored.is_called, seed)
    overall_low, overall_high = everything.bootstrap(kind.is_called, seed)
    # Each group of a label weighs 1, whatever its size.
    _, own, sizes = np.unique(scored.sides, return_inverse=True, return_counts=True)
    measures = {
        "scored": scored.measure(scored.is_called),
        "low": low,
        "high": high,
        "equal_groups": scored.measure(scored.is_called, 1.0 / sizes[own]),
        "no_orf_as_0": everything.measure(kind.is_called),
        "no_orf_as_0_low": overall_low,
        "no_orf_as_0_high": overall_high,
    }
    return {
        "n": len(kind),
        "n_virus": int(kind.is_virus.sum()),
        "n_groups": len(np.unique(kind.groups)),
        "n_no_orf": len(kind) - len(scored),
        "n_trained": int(kind.is_trained.sum()),
        **{name: _rounded(figures) for name, figures in measures.items()},
    }


def _rounded(figures: Measures) -> Measures:
    return {name: None if figure is None else round(figure, 6) for name, figure in figures.items()}


def _reliability(kind: _SamplesOfKind) -> Figures:
    curve = kind.scored.reliability()
    return {
        "mean_score": curve.mean_score.round(6).tolist(),
        "share_of_viruses": curve.virus_shares.round(6).tolist(),
        "n": curve.n.tolist(),
    }


def _roc(kind: _SamplesOfKind) -> Figures:
    """Return a few hundred points of the ROC curve of all samples, none for a single label."""
    roc_points = 200
    _, true, false = kind.with_missing_lowest(0.0).curve()
    points = np.unique(np.linspace(0, len(true) - 1, min(len(true), roc_points)).astype(np.int64))
    has_both = true[-1] > 0 and false[-1] > 0
    return {
        "true_positives": (true[points] / true[-1]).round(6).tolist() if has_both else [],
        "false_positives": (false[points] / false[-1]).round(6).tolist() if has_both else [],
    }


def _histogram(kind: _SamplesOfKind) -> Figures:
    """Count samples per score bin, by label. Bins have equal widths."""
    n_bars = 40  # in a histogram of scores from 0 to 1
    scored = kind.scored
    called = scored.scores[scored.is_called]
    virus, _ = np.histogram(scored.scores[scored.is_virus], bins=n_bars, range=(0, 1))
    other, _ = np.histogram(scored.scores[~scored.is_virus], bins=n_bars, range=(0, 1))
    return {
        "virus": virus.tolist(),
        "other": other.tolist(),
        "lowest_called": round(float(called.min()), 6) if len(called) else None,
    }


class _Fragment(NamedTuple):
    """A piece of a labelled record, in forward-strand bases."""

    id: str  # neutral, so that it reveals nothing about the record
    record: LabelledRecord
    length: str  # one of the requested lengths in bases, or _WHOLE
    start: int
    end: int
    strand: str


def write_fragments(
    pairs: Iterable[Labelled], options: EvaluateOptions, fasta: Path, scored: str | None = None
) -> list[_Fragment]:
    """Cut all records, and write the fragments and, next to them, a table with their origins.

    Args:
        scored: SHA-256 of the fragments in the resumed run.

    Raises:
        ResumeError: the fragments do not have this SHA-256. Nothing is written.
    """
    fragments: list[_Fragment] = []
    with atomic_path(fasta) as temporary:
        with temporary.open("w", encoding="utf-8", newline="\n") as out:
            complement = str.maketrans("ACGTURYKMBDHVacgturykmbdhv", "TGCAAYRMKVHDBtgcaayrmkvhdb")
            for labelled, record in pairs:
                for fragment in cut_record(labelled, len(record.sequence), options):
                    numbered = fragment._replace(id=f"fragment{len(fragments) + 1:07d}")
                    bases = record.sequence[fragment.start : fragment.end]
                    if fragment.strand == "-":
                        bases = bases.translate(complement)[::-1]
                    write_record(out, numbered.id, bases)
                    fragments.append(numbered)
        if scored not in (None, hash_file(temporary)):
            raise ResumeError(
                f"the evaluation in {printable(fasta.parent)} is of other fragments",
                hint="use the old data and options (--lengths, --seed, ...), choose another "
                "--output-dir, or start again: --force",
            )
    rows = (
        (name, source.id, length, start, end, strand, source.label, source.group, source.kingdom)
        for name, source, length, start, end, strand in fragments
    )
    columns = (
        "fragment",
        "record",
        "length",
        "start",
        "end",
        "strand",
        "label",
        "group",
        "kingdom",
    )
    write_table(fasta.with_name("fragments.tsv"), columns, rows)
    return fragments


def cut_record(
    labelled: LabelledRecord, n_bases: int, options: EvaluateOptions
) -> Iterator[_Fragment]:
    """Yield one record's fragments, without ids, by ascending length and position."""
    lengths = sorted(options.fragment_lengths)
    per_record = options.fragments_per_record
    n_whole = min(n_bases, per_record * lengths[-1])
    kinds = [(str(length), length, n_bases // length, length) for length in lengths]
    for length, size, n_fitting, key in (*kinds, (_WHOLE, n_whole, 1, 0)):
        rng = np.random.default_rng([options.seed, record_digest(labelled.id), key])
        n_fragments = min(per_record, n_fitting)
        for i in range(n_fragments):
            first = i * n_bases // n_fragments
            last = (i + 1) * n_bases // n_fragments - size
            start = int(rng.integers(first, last, endpoint=True))
            strand = "+-"[int(rng.integers(2))]
            yield _Fragment("", labelled, length, start, start + size, strand)


def with_known_groups(
    trained_on: Mapping[str, Trained], labelled: LabelledRecord, sequence: str
) -> list[str]:
    """List the models that were trained on a record, its group, or a close relative.

    A record has a close relative if half of its sampled k-mers are in the sketch. This corresponds
    to about 98 % identical bases, wherever the record was cut from.
    """
    max_shared_share = 0.5  # of 31-mers
    sketch = Sketch.from_sequences(sequence)
    group = np.uint64(group_digest(labelled.group))
    return [
        owner
        for owner, (records, groups, kmers) in trained_on.items()
        if np.uint64(labelled.digest) in records
        or group in groups
        or sketch.containment(kmers) >= max_shared_share
    ]


def held_out_groups(
    pairs: Iterable[Labelled], caller: RecordClassifier, options: EvaluateOptions, trained: set[str]
) -> Iterator[Labelled]:
    """Pass on the records to test on, one by one.

    ``--held-out-only`` drops records that were trained on. With ``--allow-training-data`` their ids
    are added to ``trained``.

    Raises:
        InputError: raised at the end. Some records were trained on and the options do not allow
            that, or a label is missing.
    """
    memories = read_trained(caller.frame_head, caller.scorer)
    for owner, (records, groups, _) in memories.items():
        # Few encoders were trained on labels.
        if owner != "its encoder" and not (len(records) or len(groups)):
            LOGGER.warning("%s does not say what it was trained on: nothing can be held out", owner)
    ids: dict[str, set[str]] = {owner: set() for owner in memories}
    n_records = 0
    labels = Counter[str]()  # counts records that are passed on
    for labelled, record in pairs:
        n_records += 1
        owners = with_known_groups(memories, labelled, record.sequence)
        for owner in owners:
            ids[owner].add(labelled.id)
        if not (owners and options.held_out_only):
            labels[labelled.label] += 1
            yield labelled, record
    trained |= _kept_groups(ids, n_records, options)
    if len(labels) < 2:
        raise InputError(
            f"viruses or other records are missing: {n_records - labels.total():,} of "
            f"{format_count(n_records, 'record')} are left out because they were trained on",
            hint="add labelled records of both kinds that were not trained on",
        )


def _kept_groups(ids: Mapping[str, set[str]], n_records: int, options: EvaluateOptions) -> set[str]:
    """Return training record ids, if the options keep such records.

    Args:
        ids: model -> its training record ids.

    Raises:
        InputError: there are such records, and the options neither drop nor keep them.
    """
    counts = [
        f"{owner} was trained on {len(owner_ids):,}"
        for owner, owner_ids in ids.items()
        if owner_ids
    ]
    if not counts:
        return set()
    clause = (
        f"{', '.join(counts)} of {format_count(n_records, 'record')}, or on parts of them, close "
        "relatives or others of their groups"
    )
    if options.allow_training_data:
        LOGGER.warning("%s: the figures are too good", clause)
        return set().union(*ids.values())
    if options.held_out_only:
        announce(f"{clause}: they are left out")
        return set()
    raise InputError(
        f"{clause}: figures on them say nothing about new sequences",
        hint="leave them out with --held-out-only, or keep and report them with "
        "--allow-training-data",
    )


# Tables, the model card, and lines


def write_report(folder: Path, figures: Figures) -> None:
    """Write ``evaluation.tsv`` and ``evaluation.json``."""
    rows = [_columns(row) for row in figures["rows"]]
    write_figures(folder / "evaluation.tsv", list(rows[0]), rows, ".6f")
    SafeDir(folder).write_file(
        folder / "evaluation.json", json.dumps(figures, indent=1, allow_nan=False) + "\n"
    )


def _columns(row: Figures) -> dict[str, object]:
    """Return the cells for a row in ``evaluation.tsv``, by column."""
    scored = row["scored"]
    all_samples = row["no_orf_as_0"]
    return {
        **{name: row[name] for name in _FACTS},
        "no_orf": row["n_no_orf"] / row["n"],
        "n_trained": row["n_trained"],
        "auroc": scored["auroc"],
        "auroc_low": row["low"]["auroc"],
        "auroc_high": row["high"]["auroc"],
        **{name: scored[name] for name in MEASURES[1:]},
        **{f"{name}_equal_groups": row["equal_groups"][name] for name in MEASURES},
        **{f"auroc_{name}": row[name]["auroc"] for name in OVERALL_MEASURES},
        "recall_no_orf_as_0": all_samples["recall"],
        "false_positives_no_orf_as_0": all_samples["false_positives"],
    }


def _card_lines(figures: Figures) -> Iterator[str]:
    """Yield all figures for the model card: a table per way to count, a row per kind."""
    card_tables = (
        ("All samples; those without a score count as the lowest", "no_orf_as_0"),
        ("Samples with a score", "scored"),
        ("Samples with a score; each group counts the same", "equal_groups"),
    )
    part = figures["split"]["part"] if figures["split"] else "all"
    yield (
        f"On {_data(figures)}, {part} of the data with the SHA-256 {figures['data']['sha256']}; "
        f"called virus: {figures['cut']}. Of these, {figures['n_trained_records']:,} or others of "
        "their groups were trained on.\n"
    )
    for title, name in card_tables:
        yield f"### {title}\n"
        rows = []
        for row in figures["rows"]:
            facts = {fact: row[fact] for fact in _FACTS}
            measures = {measure: _shorten(row[name][measure]) for measure in MEASURES}
            rows.append(facts | measures)
        yield from markdown_table(rows)


def _data(figures: Figures) -> str:
    n_records = format_count(figures["n_records"], "record")
    return f"{n_records} of {format_count(figures['n_groups'], 'group')}"


def summary_lines(folder: Path, figures: Figures) -> list[str]:
    """Return the lines that the user sees at the end."""
    lines = [
        f"evaluated on {_data(figures)}; called virus: {figures['cut']}",
        f"{'':16}{'n':>8}{'no score':>10}  {'AUROC of all (95 % interval)':<30}{'recall':>8}"
        f"{'false +':>9}{'precision at 5 % viruses':>26}",
        *(_report_line(row) for row in figures["rows"] if row["subset"] == "all"),
        f"by kingdom, and more: {printable(folder / 'evaluation.tsv')}, .json; curves: report.html",
    ]
    if n_trained := figures["n_trained_records"]:
        lines.append(
            f"WITH TRAINING DATA: {n_trained:,} of the records, or their groups, were trained on; "
            "the figures are too good"
        )
    return lines


def _report_line(row: Figures) -> str:
    """Format the figures of all samples. A missing score counts as the lowest."""
    all_samples = row["no_orf_as_0"]
    auroc, low, high = (_shorten(row[name]["auroc"]) for name in OVERALL_MEASURES)
    name = f"{row['unit']}s, {row['length']}" if row["unit"] == "record" else "chunks"
    return (
        f"  {name:<14}{row['n']:>8}{row['n_no_orf'] / row['n']:>10.1%}  "
        f"{f'{auroc} ({low} to {high})':<30}"
        f"{_shorten(all_samples['recall']):>8}{_shorten(all_samples['false_positives']):>9}"
        f"{_shorten(all_samples['precision_if_5_percent_viral']):>26}"
    )


def _shorten(value: float | None) -> str:
    return NOT_DEFINED if value is None else f"{value:.3f}"
