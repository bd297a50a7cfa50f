"""Sweeps: one recipe at every combination of some settings, each a run of its own.

plan.py says what varies, what can run and in which order, prediction.py what is expected of it,
trials.py runs what is missing and keeps what each combination has measured. result.py is what comes
out, made a document by report.py and charts.py.
"""
