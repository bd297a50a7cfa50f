"""The native trainer: a program of its own that is copied beside every run; nobody imports it."""
