"""Write a set of outputs, as rows arrive in input order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from virnucpro.results.counts import RecordCounts, add_counts
from virnucpro.results.outputs import OutputFile
from virnucpro.results.row_batches import RowBatch
from virnucpro.results.sample_tables import LAST_LINES, OutputDir
from virnucpro.results.tsv import encode_texts, open_table

if TYPE_CHECKING:
    from virnucpro.results.sorted_lines import SortedLines

AddBatch = Callable[[RowBatch], None]


@contextmanager
def open_files(outputs: Iterable[OutputFile], output_dir: OutputDir) -> Iterator[AddBatch]:
    """Yield a function that adds a batch to each output. Files appear if the block succeeds."""
    counts_by_sample: dict[str, RecordCounts] = {}
    with ExitStack() as stack:
        tables = []
        sorted_texts: dict[str, SortedLines] = {}
        for output in outputs:
            path = output_dir.folder / output.file
            opened = open_table(output_dir.tree, path, output.columns, is_packed=output.is_packed)
            tables.append((output, stack.enter_context(opened)))
            if not output.is_optional:
                tables[-1][1]()
            if output.is_sorted:
                from virnucpro.results.sorted_lines import SortedLines

                sorted_texts[output.file] = stack.enter_context(SortedLines(output_dir.aside))

        def add(batch: RowBatch) -> None:
            add_counts(counts_by_sample, batch.counts)
            for output, open_file in tables:
                if output.is_sorted:
                    sorted_texts[output.file].add(batch.rows.get(output.file, b""))
                elif output.file in batch.rows:
                    open_file().write(batch.rows[output.file])

        yield add
        for output, open_file in tables:
            if output.is_sorted:
                open_file().writelines(sorted_texts[output.file].merged())
            last_lines = LAST_LINES.get(output)
            if last_lines and (text := last_lines(output_dir, counts_by_sample)):
                open_file().write(encode_texts(text))
