"""Which layouts there are for a model on a number of devices, and which of them to try next.

space.py lists them, residuals.py learns what the time model gets wrong among them, decision.py says
what to run next, memory.py what needs no try once a layout has run out of memory.
"""
