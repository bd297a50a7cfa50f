"""Runs from plan to result, and groups of runs: repeats, comparisons, history."""
