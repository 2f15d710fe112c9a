"""Read sequence files into records, chunks and frames."""
