"""The files that users read, written in one pass over the records."""
