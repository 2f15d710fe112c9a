"""The stories: predict, extract, work, regions; options to a run; the Python interface."""
