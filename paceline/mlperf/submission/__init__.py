"""Prepare submissions: describe systems, build packages, and run the official package checker."""
