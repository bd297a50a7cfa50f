"""Comparison of two sides: comparability, significance test, verdict and its wording."""

from paceline.core.callable_package import make_callable

make_callable(__name__)
