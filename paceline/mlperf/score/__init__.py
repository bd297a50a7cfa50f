"""From trials to a score: reference convergence, expected times, energy."""
