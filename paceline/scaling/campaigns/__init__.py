"""Scaling campaigns: a cluster measured in sub-clusters of several sizes, many at a time.

record.py holds what is kept, plan.py makes it, rounds.py runs what is missing of it, result.py is
what comes out.
"""
