from paceline.api import check, compare, estimate, load_run, parse, runs

__version__: str
__all__ = ["check", "compare", "estimate", "load_run", "parse", "runs"]
