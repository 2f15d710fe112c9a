"""The benchmark of a machine: its limits, and how near VirNucPro and others come to them."""
