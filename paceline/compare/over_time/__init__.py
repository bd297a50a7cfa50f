"""Runs over time: groups of repeats, step changes, and what changed around them."""
