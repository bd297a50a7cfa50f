"""Paceline measures how fast a machine or a cluster trains large language models.

`parse`, `estimate`, `compare`, `load_run`, `runs` and `check` answer the questions of the command
line in Python; `paceline.api` documents them.
"""

from typing import Any

__version__ = "0.2.0"
_FUNCTIONS = ["check", "compare", "estimate", "load_run", "parse", "runs"]


def __getattr__(name: str) -> Any:
    """Load a function of the API on first use, because its imports take a second."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    # compare, estimate and runs are also packages, which are callable.
    packages = {"compare", "estimate", "runs"}
    return (
        import_module(f"paceline.{name}")
        if name in packages
        else getattr(import_module("paceline.api"), name)
    )
