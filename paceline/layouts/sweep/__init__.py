"""Sweeps: one recipe at every combination of some settings, each a run of its own.

dimensions.py reads what varies, planning.py says what can run and in which order, predicting.py what
is expected of it, running.py runs what is missing.
"""
