"""Samples: where they come from, and which belong to which step and rank."""
