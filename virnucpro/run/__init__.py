"""The run folder: what is planned, what is done, and whose it is."""
