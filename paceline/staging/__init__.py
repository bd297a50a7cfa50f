"""Models, data, code and containers of a recipe: fetched or made, verified, never half there."""
