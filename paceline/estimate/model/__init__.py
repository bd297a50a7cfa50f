"""The time of a training step: formulas over arrays of cases, and their coefficients."""
