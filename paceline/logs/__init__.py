"""Foreign logs: detected, read, completed, held against themselves."""
