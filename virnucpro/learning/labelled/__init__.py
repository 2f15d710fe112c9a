"""Labelled sequences, for training and evaluation."""
