"""Frameworks: each turns a RunSpec into a Job and its log into steps."""
