"""Runs over time: groups of repeats, step changes, and environment changes around them."""
