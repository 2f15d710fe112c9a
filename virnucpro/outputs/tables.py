"""The tables of a run, or of one of its samples: files that grow together, a record at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, TextIO

from virnucpro.files import atomic, open_table, writing
from virnucpro.records import Call, FastaRecord, Prediction
from virnucpro.run.folder import RunDir
from virnucpro.scoring.calls import (
    CHUNK_COLUMNS,
    FRAME_COLUMNS,
    RECORD_COLUMNS,
    SortedLines,
    chunk_rows,
    frame_rows,
    record_row,
)
from virnucpro.sequences.fasta import write_record

_SYNCED_AT_ONCE = 4  # a disk takes a few syncs in the time of one
Add = Callable[[FastaRecord, list[Prediction], Call], None]
Command = Literal["predict", "extract"]


@contextmanager
def tables(folder: RunDir, command: Command, aside: Path) -> Iterator[Add]:
    """All tables of a command in a folder, by what adds a record to them; lines wait ``aside``."""
    with ExitStack() as stack:
        records = stack.enter_context(table(folder.record_table(command), RECORD_COLUMNS))
        predict = stack.enter_context(_of_predict(folder, aside)) if command == "predict" else None

        def add(record: FastaRecord, predictions: list[Prediction], call: Call) -> None:
            records.write(record_row(call))
            if predict is not None:
                predict(record, predictions, call)

        yield add


@contextmanager
def _of_predict(folder: RunDir, aside: Path) -> Iterator[Add]:
    """What only ``predict`` writes."""
    with (
        table(folder.frame_table, FRAME_COLUMNS) as frames,
        table(folder.chunk_table, CHUNK_COLUMNS) as chunks,
        table(folder.viral) as viral,
        SortedLines(aside) as rows,
    ):

        def add(record: FastaRecord, predictions: list[Prediction], call: Call) -> None:
            frames.writelines(frame_rows(predictions))
            rows.extend(chunk_rows(predictions))
            if call.is_virus:
                write_record(viral, record.header, record.sequence)

        yield add
        chunks.writelines(rows.merged())


@contextmanager
def sample_tables(rundir: RunDir, command: Command, samples: Iterable[str]) -> Iterator[Add]:
    """The tables of each sample in its folder; records come in the order of their samples.

    Each of ``samples`` gets its tables, with or without records, and so does every other that has
    any. One sample is written at a time, and a few are being synced to disk.
    """
    waiting, closing = deque(samples), deque[Future[None]]()
    current: str | None = None
    with ThreadPoolExecutor(_SYNCED_AT_ONCE) as pool, ExitStack() as stack:
        add_to: Add | None = None

        def close() -> None:
            closing.append(pool.submit(stack.pop_all().close))
            while len(closing) > _SYNCED_AT_ONCE:
                closing.popleft().result()

        def begin(sample: str) -> None:
            nonlocal current, add_to
            close()
            folder = rundir.sample(sample)
            with writing(folder.root):
                folder.root.mkdir(parents=True, exist_ok=True)
            current, add_to = sample, stack.enter_context(tables(folder, command, rundir.shards))

        def add(record: FastaRecord, predictions: list[Prediction], call: Call) -> None:
            while current != record.sample:
                begin(waiting.popleft() if record.sample in waiting else record.sample)
            assert add_to is not None
            add_to(record, predictions, call)

        yield add
        for sample in waiting:
            begin(sample)
        close()
        for closed in closing:
            closed.result()


@contextmanager
def table(path: Path, columns: Sequence[str] = ()) -> Iterator[TextIO]:
    """A text file that appears when it is whole; headers may hold what is not UTF-8."""
    with atomic(path) as temporary, open_table(temporary) as out:
        if columns:
            out.write("\t".join(columns) + "\n")
        yield out


@contextmanager
def optional_table(path: Path) -> Iterator[Callable[[], TextIO]]:
    """A table that is made when it is first asked for; if it is not, an old one is deleted."""
    made: list[TextIO] = []
    with ExitStack() as stack:

        def opened() -> TextIO:
            if not made:
                made.append(stack.enter_context(table(path)))
            return made[0]

        yield opened
    if not made:
        path.unlink(missing_ok=True)
