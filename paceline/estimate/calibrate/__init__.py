"""Calibrating this machine: probes and short steps of its own, and coefficients moved by them."""
