"""Find viral sequences in FASTA with the protein language model ESM-2."""

__version__ = "0.1.0"
