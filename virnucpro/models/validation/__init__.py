"""Test an encoder against fair-esm: the check of its vectors, and the benchmark of its speed."""
