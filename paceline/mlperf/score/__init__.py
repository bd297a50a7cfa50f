"""Score a set of runs: windows, reference convergence, expected time, energy."""
