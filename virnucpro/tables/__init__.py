"""The files that a user reads: names, columns, rows; written and read again in one place."""
