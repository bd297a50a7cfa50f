"""Checks of hosts before a run."""
