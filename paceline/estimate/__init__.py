"""Estimates of step time and memory of a training run before it starts.

Time (model/) and memory (memory/) are computed by formulas with physical coefficients:
efficiencies, latencies, shares of exposed communication. Each coefficient has a prior and an
uncertainty. The priors are updated with published step times (fit/) and with measurements on a
machine (calibrate/). All formulas take arrays: one call estimates one case or all layouts of a
cluster (estimates.py). A single estimate also states its assumptions (request.py,
single_estimate.py).
"""

from paceline.core.callable_package import make_callable

make_callable(__name__)
