"""Embedding models, their families and their devices."""
