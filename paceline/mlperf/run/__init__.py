"""Run series of trials to a target: request, trials, state, and data of the tiny variants."""
