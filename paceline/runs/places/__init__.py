"""Trials side by side, each on a part of a cluster or of one machine.

part.py is one part, dividing.py shares out what there is, working.py runs work on all parts at once,
losses.py gives the work of parts that lost a host to others.
"""
