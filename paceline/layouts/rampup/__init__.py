"""A batch ramp-up planned before it runs, and schedules judged.

stages.py cuts the ramp-up into stages, timing.py says what layouts take in one, plan.py chooses the
nodes and the layout of each, scripts.py writes the plan for Slurm. schedule_table.py reads a
schedule that somebody made by hand, check.py judges it.
"""
