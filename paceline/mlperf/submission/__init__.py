"""Submissions: systems described, packages laid out and checked."""
