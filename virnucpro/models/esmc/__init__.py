"""The ESM C encoder (ESM Cambrian), the successor of ESM-2."""
