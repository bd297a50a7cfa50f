"""How a model and its work are spread over ranks."""
