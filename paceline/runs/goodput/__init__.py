"""Goodput: breakdown of a training's wall time over all its restarts."""
