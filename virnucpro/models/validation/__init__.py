"""Test an encoder against fair-esm: check its vectors, and benchmark its speed."""
