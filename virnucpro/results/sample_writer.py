"""Write the outputs of each sample, a few samples at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from virnucpro.core.atomic_io import storage_errors
from virnucpro.results.output_files import AddBatch, open_files
from virnucpro.results.outputs import OutputFile
from virnucpro.results.row_batches import RowBatch
from virnucpro.results.sample_tables import OutputDir, is_due
from virnucpro.sequences.inputs import InputFile


@contextmanager
def open_samples(
    outputs: Iterable[OutputFile], output_dir: OutputDir, folder: Path
) -> Iterator[AddBatch]:
    """Yield a function that adds a batch to the outputs in its sample folder.

    Batches come in sample order. Every input sample gets outputs, even without records, and so does
    any other sample with records. One sample is written while a few others are synced to disk. A
    sample to which a resume added a mate occurs twice, and stays open all the time.
    """
    synced_at_once = 4  # samples; a disk does a few syncs as fast as one
    outputs = [output for output in outputs if output.per_file]
    once, twice = _samples_by_visits(output_dir.inputs)
    queue = deque(once)
    closing = deque[Future[None]]()
    current: str | None = None
    with (
        ThreadPoolExecutor(synced_at_once) as pool,
        ExitStack() as all_stack,
        ExitStack() as stack,
    ):
        add_to: AddBatch | None = None

        def opened(sample: str, stack: ExitStack) -> AddBatch:
            sample_dir = OutputDir(folder / sample, output_dir.tree, output_dir.aside)
            with storage_errors(sample_dir.folder):
                output_dir.tree.make_folder(sample_dir.folder)
            return stack.enter_context(open_files(outputs, sample_dir))

        def close() -> None:
            closing.append(pool.submit(stack.pop_all().close))
            while len(closing) > synced_at_once:
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
