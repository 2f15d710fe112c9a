"""Run commands on small disks in memory, for ``test_disk``: fill, make room, resume, keep results.

A forked process with its own mounts does this. It writes one line of JSON for each disk.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from labelled_data_helpers import train_here
from run_helpers import again, execute, leftovers, run_inline

from virnucpro.core.errors import VirnucproError
from virnucpro.engine.local import InlineExecutor
from virnucpro.sequences import record_text
from virnucpro.store import plan
from virnucpro.training.evaluation.evaluate import EvaluationSpec, evaluate_spec, write_report
from virnucpro.training.options import TrainOptions
from virnucpro.training.reports import write_evaluation_page
from virnucpro.viral.classifier_choice import choose_classifier
from virnucpro.viral.head import Head
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.run_config import RunConfig


@dataclass(frozen=True)
class Prediction:
    config: RunConfig
    head: Path

    def __call__(self, resume: bool) -> None:
        run_inline(again(self.config, resume=resume), Head.load(self.head))


@dataclass(frozen=True)
class Scoring:
    """A run without a model, cut into small blocks."""

    options: PredictOptions

    def __call__(self, resume: bool) -> None:
        usual = plan.LETTERS_AT_ONCE, record_text.READ_BYTES
        plan.LETTERS_AT_ONCE = record_text.READ_BYTES = 3_000
        try:
            options = replace(self.options, resume=resume)
            execute(options, lambda _: None, lambda _: InlineExecutor())
        finally:
            plan.LETTERS_AT_ONCE, record_text.READ_BYTES = usual


@dataclass(frozen=True)
class Evaluation:
    question: EvaluationSpec
    config: RunConfig
    head: Path

    def __call__(self, resume: bool) -> None:
        config = again(self.config, resume=resume)
        options = config.options
        classifier = choose_classifier(options, options.calls, Head.load(self.head))
        config = replace(config, classifier=classifier)
        figures = evaluate_spec(self.question, config, InlineExecutor(), lambda _: None)
        write_report(self.question.options.output_dir, figures)
        write_evaluation_page(self.question.options.output_dir, figures)


@dataclass(frozen=True)
class Training:
    options: TrainOptions

    def __call__(self, resume: bool) -> None:
        train_here(replace(self.options, resume=resume))


def enter_own_mounts() -> None:
    """Continue in a forked process that may mount, and whose mounts end with it.

    The system requires a process with one thread, and libraries have started others in this one.

    Raises:
        OSError: the system does not allow this.
    """
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
    new_mounts = 0x0002_0000  # CLONE_NEWNS of sched.h
    new_users = 0x1000_0000  # CLONE_NEWUSER
    user_id = os.getuid()
    group_id = os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_mounts | new_users) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user_id} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group_id} 1")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def fill_each(given: tuple[Callable[[bool], None], Path, Path, list[str]]) -> None:
    """Let work fill disks at the parent of a folder. Its argument is True for a resume.

    ``given`` is the work, the folder, the folder for results, and the options of each mount.
    """
    work, folder, kept, limits = given
    enter_own_mounts()
    disk = folder.parent
    for limit in limits:
        subprocess.run(["mount", "-t", "tmpfs", "-o", limit, "tmpfs", disk], check=True)
        told = {"message": "", "kept": str(kept / limit)}
        try:
            work(False)
        except VirnucproError as error:
            told |= {"message": str(error), "hint": error.hint, "exit_code": error.exit_code}
        told["leftovers"] = leftovers(disk)
        room = "remount,size=64m,nr_inodes=10000"
        subprocess.run(["mount", "-o", room, disk], check=True)
        work(True)
        shutil.copytree(folder, told["kept"])
        gc.collect()  # an error keeps what it met, such as files that are mapped
        subprocess.run(["umount", disk], check=True)
        sys.stdout.write(json.dumps(told) + "\n")
