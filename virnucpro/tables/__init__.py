"""Write and read the tables of a run: their names, columns and rows."""
