"""Staging of a recipe's models, data, code and containers: fetched or made, and verified."""
