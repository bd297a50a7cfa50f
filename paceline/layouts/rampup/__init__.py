"""Plan a batch ramp-up, and check schedules made by hand.

plan.py divides the ramp-up into stages and chooses nodes and layout of each. timing.py estimates
layouts in a stage. check.py reads and checks a schedule.
"""
