"""The evaluation of a head on groups that it has not seen."""
