"""FASTA files, their records, and what is cut and translated of them."""
