"""Draw the picture of the dashboard in the README: `python docs/make_dashboard.py [FILE]`.

The dashboard is that of the program. Its events are simulated: three GPUs in the middle of a run,
each at the speed that was measured on one H100 (docs/GPU_OPTIMIZATION.md). The picture is an SVG
that loads nothing from a network (default: docs/dashboard.svg).
"""

from __future__ import annotations

import argparse
import io
import re
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from virnucpro.cli.dashboard import Dashboard
from virnucpro.cli.progress import EventLog
from virnucpro.core.events import BatchDone, EmbeddingStarted, Memory, ShardDone, WorkerReady
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.types import Shard

_ROOT = Path(__file__).resolve().parent.parent
_WIDTH = 92  # characters of the terminal
_GIB = 1 << 30
_MEMORY = Memory(int(6.6 * _GIB), 80 * _GIB)
_N_SHARDS = 7_400
_N_DONE_BEFORE = 600  # shards of an earlier start
_N_PROTEINS = 800  # of each shard
_N_RESIDUES = 240_000  # of each shard
_SHARD_SECONDS = 0.76  # at 318,000 tokens per second
_ROUNDS = 1_690  # shards that each GPU has finished
_SHARES = {"cuda:0": 0.72, "cuda:1": 0.31, "cuda:2": 0.55}  # of the current shard
_ENCODER = EncoderSpec(
    model="esm2_t33_650M_UR50D", sha256="", layer=33, pooling="mean", precision="bf16", dim=1280
)


def simulate_run() -> EventLog:
    """Return the events of a run on three GPUs, some minutes after its start."""
    shards = [
        Shard(index, Path(f"{index:06d}.faa"), _N_PROTEINS, _N_PROTEINS, _N_RESIDUES, "")
        for index in range(_N_DONE_BEFORE, _N_SHARDS)
    ]
    n_tokens = _N_RESIDUES + 2 * _N_PROTEINS
    start = time.monotonic() - _ROUNDS * _SHARD_SECONDS
    log = EventLog()
    log.state.started = start
    log.state.clock = lambda: start
    log(EmbeddingStarted(tuple(shards), _N_DONE_BEFORE, encoders=(_ENCODER,)))
    for name in _SHARES:
        log(WorkerReady(name, "NVIDIA H100", _MEMORY))
    rows = tuple(range(_N_PROTEINS))
    for n_rounds in range(_ROUNDS):
        now = start + (n_rounds + 1) * _SHARD_SECONDS
        log.state.clock = lambda now=now: now  # type: ignore[misc]
        for name in _SHARES:
            shard = shards.pop()
            log(BatchDone(name, shard, rows, n_tokens, _MEMORY))
            log(ShardDone(name, shard, _SHARD_SECONDS, n_failed=0))
    for name, share in _SHARES.items():
        log(BatchDone(name, shards.pop(), rows, int(n_tokens * share), _MEMORY))
    return log


def draw(log: EventLog) -> str:
    """Return the dashboard as an SVG, in the monospace font of the reader."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Dashboard(log.state, console).draw())
    svg = console.export_svg(
        title="virnucpro extract -i proteins.faa -o embeddings/ --gpus 0,1,2 --resume",
        theme=DIMMED_MONOKAI,
        unique_id="dashboard",
    )
    # a web font would be loaded from a network
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code, ", "")
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the picture of the dashboard.")
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path)
    path = parser.parse_args().file or _ROOT / "docs/dashboard.svg"
    path.write_text(draw(simulate_run()), encoding="utf-8")
