"""Classify records with the scorer, a head or both, and find viral regions in them."""
