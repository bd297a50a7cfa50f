"""Pairs of runs looked at while they are being made, with one error spent over all looks."""
