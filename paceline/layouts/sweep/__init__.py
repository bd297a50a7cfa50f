"""Sweeps: one recipe at every combination of some settings, each a run of its own.

dimensions.py reads what varies, plan.py says what can run and in which order, prediction.py what is
expected of it, runner.py runs what is missing, trials.py keeps what each combination has measured.
result.py is what comes out, shown by table.py, chart.py and page.py.
"""
