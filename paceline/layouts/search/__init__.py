"""Which layouts there are for a model on a number of devices."""
