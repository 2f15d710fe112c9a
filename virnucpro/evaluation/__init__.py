"""What a head is worth on groups that it has not seen."""
