"""Exit code and message for a command that is interrupted before it starts.

This module imports nothing, so that the entry point can use it at once.
"""

INTERRUPTED_EXIT = 130
NOTHING_BEGAN = "nothing was started; work that was finished earlier is kept for --resume"
