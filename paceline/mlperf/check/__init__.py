"""The official compliance checker, in plain words."""
