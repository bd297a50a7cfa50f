"""From a set of runs to a score: windows, reference convergence, expected time, energy."""
