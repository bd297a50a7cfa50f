"""Many runs as tasks, side by side on slots of a cluster or of one machine.

slot.py is one slot and the loss of its hosts, division.py shares out what there is, runner.py runs
the tasks.
"""
