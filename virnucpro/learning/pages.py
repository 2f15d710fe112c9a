"""``virnucpro report``: the page of what a folder holds: a run, a training or an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from virnucpro.learning.evaluation.page import EVALUATION, write_evaluation_page
from virnucpro.learning.training.page import write_training_page
from virnucpro.learning.training.request import FACTS
from virnucpro.page.run import write_run_page
from virnucpro.run.folder import PAGE, RunDir, no_run
from virnucpro.run.hashes import check_outputs


def report_folder(folder: Path) -> Path:
    """Write the page of a folder that nobody is working on. -> its file

    Raises:
        InputMissingError: it holds none of these.
        OutputError: another process is using it.
        VirnucproError: as the pages do.
    """
    rundir = RunDir(folder)
    kinds: list[tuple[Path, Callable[[Path], None]]] = [
        (rundir.manifest, _write_run_page),
        (folder / FACTS, write_training_page),
        (folder / EVALUATION, write_evaluation_page),
    ]
    for file, write in kinds:
        if file.is_file():
            with rundir.locked():
                rundir.sweep()
                write(folder)
            return rundir.report
    raise no_run(folder, "give the --output-dir of one", "run, no training and no evaluation")


def _write_run_page(folder: Path) -> None:
    rundir = RunDir(folder)
    check_outputs(rundir, but=[PAGE])
    write_run_page(rundir)
