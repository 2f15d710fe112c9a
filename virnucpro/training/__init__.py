"""Labelled sequences, and what is learned and measured with them."""
