"""One HTML page of a finished folder."""
