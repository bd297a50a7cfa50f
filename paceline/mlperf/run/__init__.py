"""Series of trials to a target, and what the small siblings train on."""
