"""Write the outputs of a run and its samples, as rows arrive in input order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from virnucpro.results.output_files import AddBatch, open_files
from virnucpro.results.outputs import OutputFile
from virnucpro.results.row_batches import RowBatch
from virnucpro.results.sample_tables import OutputDir


@contextmanager
def open_outputs(outputs: Sequence[OutputFile], output_dir: OutputDir) -> Iterator[AddBatch]:
    """Yield a function that adds a batch to the outputs of a run and, if requested, its sample.

    Pass it every record once, in input order. Files appear when the ``with`` block succeeds.
    """
    with ExitStack() as stack:
        adds = [stack.enter_context(open_files(outputs, output_dir))]
        if output_dir.samples is not None:
            from virnucpro.results.sample_writer import open_samples

            adds.append(stack.enter_context(open_samples(outputs, output_dir, output_dir.samples)))

        def add(batch: RowBatch) -> None:
            for add_to_outputs in adds:
                add_to_outputs(batch)

        yield add
