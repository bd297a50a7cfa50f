"""Machines: each renders a Job as a script, starts that very script and watches it."""
