"""FASTA files and their records, chunks and frames."""
