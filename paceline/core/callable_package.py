"""Packages that share their name with a function of the Python API."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package `paceline.NAME` that calls `paceline.api.NAME`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self.__name__.rpartition(".")[2]
        return getattr(import_module("paceline.api"), function)(*args, **kwargs)


def make_callable(package: str) -> None:
    """Let the package be called; `paceline.compare(a, b)` is otherwise hidden by the package."""
    sys.modules[package].__class__ = CallablePackage
