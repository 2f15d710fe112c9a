"""Call records, by the scorer, a head or both, and find regions in them."""
