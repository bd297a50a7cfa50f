"""Recompute published tables from their own speeds, and convert figures between conventions."""
