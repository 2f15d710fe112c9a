"""Heads, encoders and scorers are trained here."""
