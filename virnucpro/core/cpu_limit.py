"""End in order at a limit of CPU time (``ulimit -t``)."""

from __future__ import annotations

import resource


def ask_before_cpu_limit() -> None:
    """Make the kernel send SIGXCPU before it kills this process at its CPU time limit.

    ``ulimit -t`` sets both limits to the same value. The process is then killed without a signal
    first, which looks like running out of memory and leaves no time to end. CPU time is counted per
    process.
    """
    seconds_to_end = 2  # CPU time between SIGXCPU and the kill at the limit
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY:
        return
    latest = max(1, hard - seconds_to_end)
    if soft == resource.RLIM_INFINITY or soft > latest:
        resource.setrlimit(resource.RLIMIT_CPU, (latest, hard))
