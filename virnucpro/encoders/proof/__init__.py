"""What proves an encoder: the check against fair-esm, and the benchmark beside it."""
