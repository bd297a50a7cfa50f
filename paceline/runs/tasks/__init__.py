"""Concurrent runs as tasks on slots of a cluster or of one machine.

slot.py covers one slot and the loss of its hosts, host_partitioning.py divides the hardware into
slots, and runner.py runs the tasks.
"""
