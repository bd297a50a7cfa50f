"""Calibration of this machine: probes, short steps, and the coefficients fitted to them."""
