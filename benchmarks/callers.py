"""Time the default ``virnucpro predict`` and other virus callers on the same file.

    python benchmarks/callers.py contigs.fa \\
        --genomad bin/genomad --deepmicroclass bin/DeepMicroClass --jaeger bin/jaeger \\
        --kraken2 bin/kraken2 --kraken2-database DIR

A program that is not named is left out. Each program runs as a whole command on one core, from the
file to its tables, in its own folder. All programs run in turn, ``--repeats`` times. For each, a
line of JSON has the median CPU seconds of all its processes, start included, and the bases per CPU
second. geNomad runs only its network (``nn-classification``). Jaeger reads contigs of 2,000 bases
or more. kraken2 needs a database, which hardly affects its speed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from virnucpro.sequences.fasta import read_fasta

_THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"


def commands_of(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """The command of each named program, which reads the file and writes into the folder."""
    file = str(options.fasta)
    output = str(folder / "of_")
    words = {
        "virnucpro": ["predict", "-i", file, "-o", output + "virnucpro", "--workers", "1", "-q"],
        "genomad": [
            *("nn-classification", "--threads", "1", "--cleanup"),
            *(file, output + "genomad"),
        ],
        "deepmicroclass": [
            *("predict", "-i", file, "-o", output + "deepmicroclass", "--device", "cpu"),
            *("--encoding", "onehot", "--mode", "hybrid", "--cpu_thread", "1"),
        ],
        "jaeger": [
            *("predict", "-i", file, "-o", output + "jaeger"),
            *("--cpu", "--workers", "1"),
        ],
        "kraken2": [
            *("--db", str(options.kraken2_database), "--threads", "1"),
            *("--output", output + "kraken2", "--report", output + "kraken2.report", file),
        ],
    }
    programs = {name: getattr(options, name) for name in words}
    return {name: [programs[name], *words[name]] for name in words if programs[name]}


def cpu_seconds(command: Sequence[str], core: int) -> float:
    """Run a command on one core; return its CPU seconds, children included.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    environment: Mapping[str, str] = os.environ | dict.fromkeys(_THREADS, "1")
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("fasta", type=Path)
    parser.add_argument("--virnucpro", default=shutil.which("virnucpro") or "virnucpro")
    parser.add_argument("--genomad")
    parser.add_argument("--deepmicroclass")
    parser.add_argument("--jaeger")
    parser.add_argument("--kraken2")
    parser.add_argument("--kraken2-database", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--core", type=int, default=0)
    options = parser.parse_args()
    if options.kraken2 and not options.kraken2_database:
        parser.error("--kraken2 needs --kraken2-database")
    n_bases = sum(len(record.sequence) for record in read_fasta(options.fasta))
    seconds: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        with TemporaryDirectory() as folder:
            for name, command in commands_of(options, Path(folder)).items():
                seconds.setdefault(name, []).append(cpu_seconds(command, options.core))
    ours = median(seconds["virnucpro"])
    for name, values in seconds.items():
        row = {
            "program": name,
            "bases": n_bases,
            "cpu_seconds": round(median(values), 2),
            "bases_per_cpu_second": round(n_bases / median(values)),
            "times_ours": round(median(values) / ours, 2),
        }
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
