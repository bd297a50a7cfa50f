"""Step time of a training run: formulas over arrays of cases, and their coefficients."""
