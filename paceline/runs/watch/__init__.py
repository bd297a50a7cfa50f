"""A run while it goes on: how fast it is now, beside its own past, and what it waits for."""
