"""Labelled data, training, evaluation and their pages."""
