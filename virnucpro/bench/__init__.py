"""What this machine gives: its limits, and how near VirNucPro and others come to them."""
