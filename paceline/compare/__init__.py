"""Two sides held against each other: the test, what must be equal, the verdict and its words."""
