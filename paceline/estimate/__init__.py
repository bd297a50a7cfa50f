"""How long a training step takes and what memory it needs, before anything runs.

Formulas of time (model/) and memory (memory/) with physical coefficients (efficiencies, latencies,
exposed shares), each with a prior and an uncertainty. Published step times move the priors (fit/),
measurements on a machine move them further (calibrate/). All formulas take arrays, so one call
estimates a case or all layouts of a cluster (estimates.py); a single question has one answer with
its sources (question.py, answer.py).
"""
