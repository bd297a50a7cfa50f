"""Series of trials to a target: request, trials, their state; what the small siblings train on."""
