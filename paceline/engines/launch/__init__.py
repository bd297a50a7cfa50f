"""Start of a framework's own program: its Job, and its Python environment."""
