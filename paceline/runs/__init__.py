"""Runs from plan to result, and groups of runs: repeats, comparisons, history."""

from paceline.core.callable_package import make_callable

make_callable(__name__)
