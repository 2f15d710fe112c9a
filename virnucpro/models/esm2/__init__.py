"""The ESM-2 encoder. Knows tensors; knows nothing of FASTA, run folders or processes."""
