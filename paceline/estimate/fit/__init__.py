"""Coefficients moved by what was measured, and how sure they are."""
