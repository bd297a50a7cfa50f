"""Many runs as tasks, side by side on slots of a cluster or of one machine.

slot.py is one slot, division.py shares out what there is, runner.py runs the tasks, lost_hosts.py
says which slots have lost a host and whether the allocation that all runs are steps of goes on.
"""
