"""The scorer: is a sequence viral, told from how it is spelled. Needs numpy and its library."""
