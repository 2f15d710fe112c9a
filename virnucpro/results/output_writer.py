"""Write the outputs of a run and its samples, as rows arrive in input order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from virnucpro.core.atomic_io import storage_errors
from virnucpro.results.counts import RecordCounts
from virnucpro.results.outputs import CHUNK_TABLE, OutputFile
from virnucpro.results.row_batches import RowBatch
from virnucpro.results.sample_tables import LAST_LINES, OutputDir, is_due
from virnucpro.results.tsv import SortedLines, encode_texts, open_table
from virnucpro.sequences.inputs import InputFile

_SYNCED_AT_ONCE = 4  # samples; a disk does a few syncs as fast as one

_Add = Callable[[RowBatch], None]


@contextmanager
def open_outputs(outputs: Sequence[OutputFile], output_dir: OutputDir) -> Iterator[_Add]:
    """Yield a function that adds a batch to the outputs of a run and, if requested, its sample.

    Pass it every record once, in input order. Files appear when the ``with`` block succeeds.
    """
    with ExitStack() as stack:
        adds = [stack.enter_context(_open_files(outputs, output_dir))]
        if output_dir.samples is not None:
            adds.append(stack.enter_context(_open_samples(outputs, output_dir, output_dir.samples)))

        def add(batch: RowBatch) -> None:
            for add_to_outputs in adds:
                add_to_outputs(batch)

        yield add


@contextmanager
def _open_samples(
    outputs: Iterable[OutputFile], output_dir: OutputDir, folder: Path
) -> Iterator[_Add]:
    """Yield a function that adds a batch to the outputs in its sample folder.

    Batches come in sample order. Every input sample gets outputs, even without records, and so does
    any other sample with records. One sample is written while a few others are synced to disk. A
    sample to which a resume added a mate occurs twice, and stays open all the time.
    """
    outputs = [output for output in outputs if output.per_file]
    once, twice = _samples_by_visits(output_dir.inputs)
    queue = deque(once)
    closing = deque[Future[None]]()
    current: str | None = None
    with (
        ThreadPoolExecutor(_SYNCED_AT_ONCE) as pool,
        ExitStack() as all_stack,
        ExitStack() as stack,
    ):
        add_to: _Add | None = None

        def opened(sample: str, stack: ExitStack) -> _Add:
            sample_dir = OutputDir(folder / sample, output_dir.tree, output_dir.aside)
            with storage_errors(sample_dir.folder):
                output_dir.tree.make_folder(sample_dir.folder)
            return stack.enter_context(_open_files(outputs, sample_dir))

        def close() -> None:
            closing.append(pool.submit(stack.pop_all().close))
            while len(closing) > _SYNCED_AT_ONCE:
                closing.popleft().result()

        def begin(sample: str) -> None:
            nonlocal current, add_to
            close()
            current = sample
            add_to = opened(sample, stack)

        lasting = {sample: opened(sample, all_stack) for sample in twice}

        def add(batch: RowBatch) -> None:
            while current != batch.sample and batch.sample not in lasting:
                begin(queue.popleft() if batch.sample in queue else batch.sample)
            add_here = lasting.get(batch.sample, add_to)
            assert add_here is not None
            own = batch.own_rows
            add_here(batch if own is None else replace(batch, rows=own))

        yield add
        for sample in queue:
            begin(sample)
        close()
        for closed in closing:
            closed.result()


def _samples_by_visits(inputs: Sequence[InputFile]) -> tuple[list[str], list[str]]:
    """Split samples by whether their files are neighbours.

    Mates share a sample. A mate that was added later is not a neighbour of the other.

    Returns:
        Samples with neighbouring files only, without those that may have no outputs, and the
        others.
    """
    pairs = dict.fromkeys((file.sample, file.generation) for file in inputs)
    n_visits = Counter(sample for sample, _ in pairs)
    due = dict.fromkeys(file.sample for file in inputs if is_due(file))
    once = [sample for sample in due if n_visits[sample] == 1]
    return once, [sample for sample, n in n_visits.items() if n > 1]


@contextmanager
def _open_files(outputs: Iterable[OutputFile], output_dir: OutputDir) -> Iterator[_Add]:
    """Yield a function that adds a batch to each output. Files appear if the block succeeds."""
    counts_by_sample: dict[str, RecordCounts] = {}
    with ExitStack() as stack:
        tables = []
        for output in outputs:
            path = output_dir.folder / output.file
            opened = open_table(output_dir.tree, path, output.columns, is_packed=output.is_packed)
            tables.append((output, stack.enter_context(opened)))
            if not output.is_optional:
                tables[-1][1]()
        chunks = stack.enter_context(SortedLines(output_dir.aside))

        def add(batch: RowBatch) -> None:
            counts_by_sample.setdefault(batch.sample, RecordCounts()).include(batch.counts)
            for output, open_file in tables:
                if output is CHUNK_TABLE:
                    chunks.add(batch.rows.get(output.file, b""))
                elif output.file in batch.rows:
                    open_file().write(batch.rows[output.file])

        yield add
        for output, open_file in tables:
            if output is CHUNK_TABLE:
                open_file().writelines(chunks.merged())
            last_lines = LAST_LINES.get(output)
            if last_lines and (text := last_lines(output_dir, counts_by_sample)):
                open_file().write(encode_texts(text))
