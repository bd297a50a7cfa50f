"""Sweeps: run one recipe with every combination of some settings.

plan.py expands and orders the combinations, prediction.py estimates them, and trials.py runs what
is missing. result.py holds the result; report.py and charts.py present it.
"""
