"""Scaling campaigns: a cluster measured in sub-clusters of several sizes, many at a time.

record.py holds what is kept, planning.py makes it, running.py runs what is missing of it.
"""
