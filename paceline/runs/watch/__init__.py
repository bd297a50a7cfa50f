"""Monitoring of a run: its current speed compared with its own past, and its waits."""
