"""Write and read run tables."""
