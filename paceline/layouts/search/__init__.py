"""Search over the layouts of a model on a number of devices.

space.py lists the layouts, residuals.py learns the errors of the time model, decision.py chooses
the next run, and memory.py excludes layouts after one has run out of memory.
"""
