"""The entry point of the program: Ctrl-C while it loads ends it with a message.

It imports nothing that takes time, so that hardly a moment is left before it.
"""

import sys

from virnucpro.cli.early_exit import INTERRUPTED_EXIT, NOTHING_BEGAN


def main() -> None:
    """Load the command line and run it."""
    try:
        from virnucpro.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write(f"error: interrupted\nhint:  {NOTHING_BEGAN}\n")
        raise SystemExit(INTERRUPTED_EXIT) from None
