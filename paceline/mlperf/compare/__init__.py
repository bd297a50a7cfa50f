"""Scores beside published results."""
