"""Coefficients fitted to measurements, and their confidence."""
