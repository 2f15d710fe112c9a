"""Write and read the tables of a run."""
