"""Models that turn sequences into vectors. One door: ``encoders.base``."""
