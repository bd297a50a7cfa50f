"""How long a training step takes and what memory it needs, before anything runs.

Formulas with physical coefficients (efficiencies, latencies, exposed shares), each with a prior and
an uncertainty; published step times move the priors (fit.py), measurements on a machine move them
further. All formulas take arrays, so one call estimates a case or all layouts of a cluster.
"""
