"""The scorer: from a sequence to its log-odds of being viral. Needs numpy and the C library."""
