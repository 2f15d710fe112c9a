"""The name of the program, as shells know it."""

PROGRAM = "virnucpro"
VARIABLE = "_VIRNUCPRO_COMPLETE"  # a shell sets it to request completions
