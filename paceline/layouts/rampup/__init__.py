"""A batch ramp-up planned before it runs, and schedules judged.

plan.py cuts the ramp-up into stages and chooses the nodes and the layout of each, timing.py says
what layouts take in one. check.py reads a schedule that somebody made by hand, and judges it.
"""
