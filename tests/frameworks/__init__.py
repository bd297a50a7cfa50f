"""Frameworks really started, each in the environment that `paceline engines install` makes."""
