"""The entry point of the program. Ctrl-C during loading ends it with a message.

It imports nothing slow, so that Ctrl-C is handled from the start.
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
