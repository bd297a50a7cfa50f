"""Scaling tests: a cluster measured in sub-clusters of several sizes, many at a time.

record.py defines the stored record, plan.py makes the plan, rounds.py runs the missing rounds, and
result.py defines the result.
"""
