"""A finished run, a training or an evaluation as one HTML page that needs no network."""
