"""Measurements of a rank and their output."""
