"""The ESM-2 encoder. It works on tensors, independent of FASTA, run folders and processes."""
