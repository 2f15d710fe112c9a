"""The scorer: is a sequence viral, by its own letters. Needs numpy and its library."""
