"""Comparison of two sides: comparability, significance test, verdict and its wording."""
