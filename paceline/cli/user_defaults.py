"""Defaults of `paceline.toml` for options that neither the command line nor a variable sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from paceline.core.errors import UserError
from paceline.files.user_file import user_file

OPTIONS = {"cluster": "--cluster", "gpu": "--gpu", "price": "--price"}
"""Option by key; the folder of runs is resolved where $PACELINE_RUNS is."""
SAYS_HARDWARE = ("device", "per_node", "intra", "inter", "compare", "measured_run_name", "cluster")
"""Parameters that exclude a cluster, and with it the GPU, of the file."""
LOG_PANEL = "Settings that the log does not state"
"""Panel of options about a log, which may come from anybody's machine."""


def fill_defaults(context: Any, parameters: Sequence[Any]) -> None:
    """Set the options that have a default in `paceline.toml` and were not given."""
    by_option = {
        name: parameter
        for parameter in parameters
        if parameter.param_type_name == "option"
        and getattr(parameter, "rich_help_panel", None) != LOG_PANEL
        for name in parameter.opts
    }
    if by_option.keys().isdisjoint(OPTIONS.values()) or (defaults := user_file()) is None:
        return
    explicit_names = {each.name for each in parameters if _is_given(context, each.name)}
    values = {key: getattr(defaults, key) for key in OPTIONS}
    has_cluster = values["cluster"] is not None and "--cluster" in by_option
    values["gpu" if has_cluster and explicit_names.isdisjoint(SAYS_HARDWARE) else "cluster"] = None
    if "cluster" in explicit_names:
        values["gpu"] = None
    for key, option in OPTIONS.items():
        parameter = by_option.get(option)
        if parameter is None or values[key] is None or parameter.name in explicit_names:
            continue
        try:
            context.params[parameter.name] = parameter.process_value(context, values[key])
        except typer.BadParameter as error:
            raise UserError(f"{defaults.path}: {key}", error.message) from error


def _is_given(context: Any, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")
