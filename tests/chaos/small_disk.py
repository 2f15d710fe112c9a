"""Runs on small disks in memory, for ``test_disk``: fill them, make room, resume, keep the result.

Its process has mounts of its own. It writes one line of JSON for each disk.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from runs import leftovers, run_inline

from virnucpro.config import RunConfig
from virnucpro.errors import VirnucproError
from virnucpro.head import load_head


def main(config: RunConfig, head_file: Path, kept: Path, limits: list[str]) -> None:
    head, disk = load_head(head_file), config.output.parent
    for limit in limits:
        subprocess.run(["mount", "-t", "tmpfs", "-o", limit, "tmpfs", disk], check=True)
        told = {"message": "", "kept": str(kept / limit)}
        try:
            run_inline(config, head)
        except VirnucproError as error:
            told |= {"message": str(error), "hint": error.hint, "exit_code": error.exit_code}
        told["leftovers"] = leftovers(disk)
        room = "remount,size=64m,nr_inodes=10000"
        subprocess.run(["mount", "-o", room, disk], check=True)
        run_inline(replace(config, resume=True), head)
        shutil.copytree(config.output, told["kept"])
        subprocess.run(["umount", disk], check=True)
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*pickle.loads(Path(sys.argv[1]).read_bytes()))  # noqa: S301 - our own
