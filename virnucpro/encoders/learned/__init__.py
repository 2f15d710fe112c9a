"""Encoders that ``train`` makes of residues, for ``predict``."""
