"""The commands ``devices`` and ``status``."""

from __future__ import annotations

import json
import os
from typing import Annotated

from virnucpro.cli.command import command
from virnucpro.cli.exits import Finished, exits
from virnucpro.cli.running import report
from virnucpro.ground.options import option
from virnucpro.stories.options import StatusOptions


def devices(
    *, as_json: Annotated[bool, option("Print the facts for programs.", None, "--json")] = False
) -> None:
    """List the devices that a run would use: GPUs, memory, precision, kernels.

    Example: virnucpro devices
    """
    with exits():
        from virnucpro.ground.devices import describe_machine, measure_machine

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if as_json:
            report([json.dumps(measure_machine(visible), indent=2)])
        else:
            report([*describe_machine(visible)])


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
