"""Real frameworks, each in the environment that `paceline recipes engines install` makes."""
