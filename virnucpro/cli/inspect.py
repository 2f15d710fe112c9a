"""The commands ``devices`` and ``status``."""

from __future__ import annotations

import json
import os

from virnucpro.cli.command import command
from virnucpro.cli.exits import Finished, exits
from virnucpro.cli.running import report
from virnucpro.stories.options import StatusOptions


def devices() -> None:
    """List the devices that a run would use: GPUs, memory, precision, kernels.

    Example: virnucpro devices
    """
    with exits():
        from virnucpro.ground.devices import describe_machine

        report([*describe_machine(os.environ.get("CUDA_VISIBLE_DEVICES"))])


@command(StatusOptions)
def status(options: StatusOptions) -> None:
    """Describe a run folder: finished, pending and failed work, and who is at it.

    Example: virnucpro status results/ --verify

    Exit code 1: --verify found damaged files.
    """
    with exits():
        from virnucpro.run.status import inspect_run, measure_run

        if options.as_json:
            report([json.dumps(measure_run(options.folder), indent=2)])
            raise Finished(0)
        lines, n_damaged = inspect_run(options.folder, verify=options.verify)
        report(lines)
        raise Finished(1 if n_damaged else 0)
