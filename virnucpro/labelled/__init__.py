"""Labelled sequences: what a training or an evaluation is given."""
