"""``virnucpro evaluate``: labelled records, called as users have theirs called, and measured.

Fragments of the records go through the same ``pipeline.run`` as any input of ``predict``; what
is measured is read from the tables that it leaves, and joined by id.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from virnucpro.callers.caller import Caller
from virnucpro.callers.calls import score_chunks
from virnucpro.callers.head import HeadFacts
from virnucpro.engine.executor import Executor
from virnucpro.engine.local import ProcessExecutor
from virnucpro.ground.config import Recipe
from virnucpro.ground.errors import UsageError, VirnucproError
from virnucpro.ground.events import OnEvent
from virnucpro.ground.files import refuse_links, writing
from virnucpro.ground.log import printable
from virnucpro.ground.numeric import Mask, Values
from virnucpro.ground.option_fields import carry
from virnucpro.ground.records import Call, FastaRecord, Prediction
from virnucpro.learning.evaluation.fragments import (
    WHOLE,
    Cutting,
    Fragment,
    HeldOut,
    OfTraining,
    length_name,
    write_fragments,
)
from virnucpro.learning.evaluation.metrics import Interval, Measures, Samples, bootstrap, measure
from virnucpro.learning.labelled.records import (
    DataManifest,
    Labelled,
    LabelledRecord,
    Split,
    check_groups,
    read_data_manifest,
    read_records,
    read_split,
    warn_of_mixed_groups,
)
from virnucpro.learning.options import EvaluateOptions
from virnucpro.learning.status import find_card
from virnucpro.run.folder import RunDir
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import GeneticCode, genetic_code
from virnucpro.sequences.translate import chunk_record, translate_six_frames
from virnucpro.stories.options import PredictOptions
from virnucpro.stories.pipeline import run
from virnucpro.stories.resolve import RunConfig, resolve
from virnucpro.tables.sinks import FrameTable, RecordTable

Unit = Literal["record", "chunk"]
Subset = Literal["all", "virus", "other"]
_RUN = "run"  # the run folder of the fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """An evaluation before it runs: the data, the options, and the folders of the results."""

    options: EvaluateOptions
    manifest: DataManifest
    splits: dict[str, Split] | None
    of_training: OfTraining
    cutting: Cutting
    card: Path | None  # of the model, to get the figures

    @property
    def output(self) -> Path:
        return self.options.output_dir

    @property
    def run_folder(self) -> Path:
        return self.output / _RUN

    @property
    def fasta(self) -> Path:
        return self.output / "fragments.fa"

    @property
    def table(self) -> Path:
        return self.output / "fragments.tsv"

    def read_records(self) -> Iterator[Labelled]:
        """The records that are asked for, one by one; at the end it is told if groups are mixed.

        Raises:
            InputError: a FASTA file contradicts the manifest, or holds other letters.
        """
        part, splits, records = self.options.part or "test", self.splits, []
        for labelled, record in read_records(self.manifest):
            if splits is None or splits[labelled.group] == part:
                records.append(labelled)
                yield labelled, record
        warn_of_mixed_groups(records)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplesOfKind(Samples):
    """All samples of one kind: records of one length, or chunks. NaN where there is no frame.

    Groups are numbered in the order of their first samples, and each sample weighs 1.
    """

    unit: Unit
    length: str
    is_called: Mask  # (n,)
    kingdoms: NDArray[np.str_]  # (n,)
    is_trained: Mask  # (n,), head, encoder or scorer was trained on it

    @classmethod
    def of(
        cls,
        unit: Unit,
        length: str,
        scores: Values,
        is_called: Mask,
        records: Sequence[LabelledRecord],
        trained: Set[str],
    ) -> SamplesOfKind:
        """``records`` are those that the samples are of, and ``trained`` ids of some."""
        return cls(
            scores=scores,
            is_virus=np.array([record.is_virus for record in records], dtype=np.bool_),
            groups=_numbered([record.group for record in records]),
            weights=np.ones(len(records)),
            unit=unit,
            length=length,
            is_called=is_called,
            kingdoms=np.array([record.kingdom for record in records], dtype=np.str_),
            is_trained=np.array([record.id in trained for record in records], dtype=np.bool_),
        )


def _numbered(groups: Iterable[Hashable]) -> NDArray[np.int64]:
    """Numbers of groups, in the order of their first samples. (n,)"""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """The figures of one kind of samples, all of them or with one kingdom on one side."""

    unit: Unit
    length: str
    subset: Subset  # "virus": viruses of the kingdom against all others; "other": the reverse
    kingdom: str
    n: int
    n_virus: int
    n_groups: int
    n_no_orf: int
    n_trained: int
    scored: Measures  # of what was scored, each sample counting one
    interval: Interval  # of ``scored``
    equal_groups: Measures  # of what was scored, each group of a label counting one
    no_orf_as_0: Measures  # of everything
    interval_no_orf_as_0: Interval


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The figures of an evaluation."""

    question: Question
    caller: Caller
    held_out: HeldOut
    kinds: tuple[SamplesOfKind, ...]
    rows: tuple[EvaluationRow, ...]
    cut: str  # rule by which a record is called viral, in words


def evaluate(options: EvaluateOptions, on_event: OnEvent) -> Evaluation:
    """Measure a head, or the scorer, on labelled sequences, as the options say.

    Raises:
        VirnucproError: see ``errors``; or something could not be scored.
    """
    question = understand(options)
    prediction = carry(
        options,
        PredictOptions,
        input=(),  # the fragments, when they are cut
        input_type="nucleotide",
        output_dir=question.run_folder,
        regions=False,
        report=False,
    )
    config = resolve(prediction, on_event)
    executor = ProcessExecutor(config.resources.devices)
    return answer(question, config, executor, on_event)


def understand(options: EvaluateOptions) -> Question:
    """Check what is asked, and read what the manifest says.

    Raises:
        UsageError: options contradict each other, or make no sense.
        InputError: manifest or split are wrong.
    """
    if options.part is not None and options.split is None:
        raise UsageError("--part without --split", hint="say which split with --split FILE")
    of_training: OfTraining = "leave out" if options.held_out_only else "refuse"
    if options.allow_training_data:
        of_training = "keep"
    cutting = Cutting(
        lengths=_lengths(options.lengths),
        per_record=options.fragments_per_record,
        seed=options.seed,
    )
    refuse_links(options.output_dir, [_RUN])
    manifest = read_data_manifest(options.data)
    splits = read_split(options.split) if options.split is not None else None
    if splits is not None:
        check_groups(manifest.groups, splits)
    return Question(
        options=options,
        manifest=manifest,
        splits=splits,
        of_training=of_training,
        cutting=cutting,
        card=find_card(options.model) if options.card and options.model else None,
    )


def _lengths(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(
            f"--lengths is {printable(text)!r}; it must be numbers of bases",
            hint="for example --lengths 300,500,3000",
        )
    return tuple(map(int, words))


def answer(
    question: Question, config: RunConfig, executor: Executor, on_event: OnEvent
) -> Evaluation:
    """Cut, score and measure; ``config`` is of a run without inputs in ``run_folder``.

    Raises:
        VirnucproError: see ``errors``; or something could not be scored.
    """
    caller = config.caller.of_type("nucleotide")
    if question.options.model and caller.frame_head is None:
        raise UsageError(
            f"no head comes with the model {printable(question.options.model)}",
            hint="name a head with --head, or leave --model out to evaluate the scorer",
        )
    held_out = HeldOut(caller, question.of_training)
    with _folder(question.output):
        pairs = held_out.select(question.read_records())
        fragments = write_fragments(pairs, question.cutting, question.fasta, question.table)
    config = replace(config, options=replace(config.options, input=(question.fasta,)))
    summary = run(config, executor, on_event)
    if summary.exit_code:
        raise VirnucproError(
            f"not everything was scored: see {printable(question.run_folder)}",
            hint="figures of a part would mislead: run the same command with --resume",
        )
    kinds = read_records_of(question, fragments, held_out)
    if head := caller.frame_head:  # the scorer's pieces are as good as fragments of that length
        kinds.append(read_chunks(question, fragments, held_out, config.recipe, head.facts))
    rows = tuple(row for kind in kinds for row in measure_kind(kind, question.cutting.seed))
    return Evaluation(question, caller, held_out, tuple(kinds), rows, summary.cut)


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """A folder that is there, and if the block fails only if it was there before."""
    is_new = not path.exists()
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):  # it is told what went wrong before
                path.rmdir()
        raise


def read_records_of(
    question: Question, fragments: Sequence[Fragment], held_out: HeldOut
) -> list[SamplesOfKind]:
    """The fragments by rising length, and the whole records, with the calls of the run."""
    with RunDir(question.run_folder).record_table("predict").open(encoding="utf-8") as table:
        calls = read_answers(table, fragments)
    scores = np.array([call.virus_score for call in calls], dtype=np.float64)  # NaN for None
    is_called = np.array([call.is_virus for call in calls], dtype=np.bool_)
    lengths = np.array([fragment.length for fragment in fragments], dtype=np.int64)
    kinds = []
    for length in (*sorted(question.cutting.lengths), WHOLE):
        rows = np.flatnonzero(lengths == length)
        kind = SamplesOfKind.of(
            "record",
            length_name(length),
            scores[rows],
            is_called[rows],
            [fragments[i].record for i in rows.tolist()],
            held_out.trained,
        )
        kinds.append(kind)
    return kinds


def read_chunks(
    question: Question,
    fragments: Sequence[Fragment],
    held_out: HeldOut,
    recipe: Recipe,
    facts: HeadFacts,
) -> SamplesOfKind:
    """The chunks of the whole records, as the head alone scores and calls them."""
    whole = {fragment.id: fragment.record for fragment in fragments if fragment.length == WHOLE}
    rundir, code = RunDir(question.run_folder), genetic_code(recipe.genetic_code)
    with rundir.output(FrameTable).open(encoding="utf-8") as table:
        pieces = (record for record in read_fasta(question.fasta) if record.id in whole)
        chunks = list(read_chunk_scores(table, pieces, recipe.chunk_size, facts, code))
    scores = np.array([score for _, score in chunks], dtype=np.float64)
    records = [whole[record_id] for record_id, _ in chunks]
    name, is_called = length_name(WHOLE), scores >= facts.threshold
    return SamplesOfKind.of("chunk", name, scores, is_called, records, held_out.trained)


def read_answers(table: TextIO, fragments: Sequence[Fragment]) -> list[Call]:
    """The call of each fragment in a table of records, by id.

    Raises:
        VirnucproError: a fragment is not in the table, or could not be used.
    """
    calls = {
        call.record_id: call
        for call in RecordTable.read(table)
        if call.status in ("scored", "no_orf", "too_short")
    }
    unscored = [fragment for fragment in fragments if fragment.id not in calls]
    if unscored:
        raise VirnucproError(
            f"{printable(unscored[0].id)}, of {printable(unscored[0].record.id)}, has no score",
            hint="the run folder was changed by another program: start again with --force",
        )
    return [calls[fragment.id] for fragment in fragments]


def read_chunk_scores(
    table: TextIO,
    records: Iterator[FastaRecord],
    chunk_size: int,
    facts: HeadFacts,
    code: GeneticCode,
) -> Iterator[tuple[str, float]]:
    """Each chunk's record and its score, or NaN if it has no stop-free frame.

    The frames of the records are found in the table of frames by their ids. Those of
    other records may stand between them; the order is the same.

    Raises:
        VirnucproError: a frame is not in the table.
    """
    scores = FrameTable.read(table)
    for record in records:
        chunks = list(chunk_record(record, chunk_size))
        predictions = [
            Prediction(orf, _find(orf.id, scores)) for orf in translate_six_frames(chunks, code)
        ]
        score_of = score_chunks(predictions, facts)
        for chunk in chunks:
            yield record.id, score_of.get(chunk.id, np.nan)


def _find(frame_id: str, scores: Iterator[tuple[str, float]]) -> float:
    for next_id, score in scores:
        if next_id == frame_id:
            return score
    raise VirnucproError(
        f"the frame {printable(frame_id)} has no score",
        hint="the run folder was changed by another program: start again with --force",
    )


def measure_kind(kind: SamplesOfKind, seed: int) -> Iterator[EvaluationRow]:
    """The samples as a whole, then each kingdom of either label against all of the other."""
    if not len(kind):
        return
    yield measure_subset(kind, "all", "", seed)
    sides: tuple[tuple[Subset, Mask], ...] = (("virus", kind.is_virus), ("other", ~kind.is_virus))
    for subset, own_side in sides:
        for kingdom in sorted(set(kind.kingdoms[own_side].tolist()) - {""}):
            part = kind.where(~own_side | (kind.kingdoms == kingdom))
            yield measure_subset(part, subset, kingdom, seed)


def measure_subset(kind: SamplesOfKind, subset: Subset, kingdom: str, seed: int) -> EvaluationRow:
    """The figures of some samples. What intervals draw depends on these alone."""
    scored, everything = (
        replace(samples, groups=_numbered(samples.groups.tolist()))
        for samples in (kind.scored, kind.filled(0.0))
    )
    return EvaluationRow(
        unit=kind.unit,
        length=kind.length,
        subset=subset,
        kingdom=kingdom,
        n=len(kind),
        n_virus=int(kind.is_virus.sum()),
        n_groups=len(np.unique(kind.groups)),
        n_no_orf=len(kind) - len(scored),
        n_trained=int(kind.is_trained.sum()),
        scored=measure(scored, scored.is_called),
        interval=bootstrap(scored, scored.is_called, seed),
        equal_groups=measure(_with_equal_groups(scored), scored.is_called),
        no_orf_as_0=measure(everything, kind.is_called),
        interval_no_orf_as_0=bootstrap(everything, kind.is_called, seed),
    )


def _with_equal_groups(samples: Samples) -> Samples:
    """Each group of a label weighs one, whatever its size."""
    _, own, sizes = np.unique(samples.sides, return_inverse=True, return_counts=True)
    return replace(samples, weights=1.0 / sizes[own])
