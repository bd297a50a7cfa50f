"""Exports of a stored run to the formats of experiment trackers and of Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from paceline.core.errors import UserError
from paceline.runs.exporters.run_export import RunExport, run_export

__all__ = ["EXPORTERS", "export_run"]

EXPORTERS: dict[str, str | None] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "openmetrics": None,
}
"""Formats, and the library that each needs; the module of each writes it."""


def export_run(folder: Path, to: str, out: Path) -> None:
    """Export the run in `folder` to `out`, a folder, or a file for OpenMetrics.

    Raises UserError if the library is not installed or `out` exists as the wrong kind.
    """
    library = EXPORTERS[to]
    if (out.is_file() and library) or (out.is_dir() and not library):
        kind = "a folder" if library else "a file"
        raise UserError(f"--out {out}", f"is not {kind}", remedy="choose another path")
    try:
        write: Callable[[RunExport, Path], None]
        write = import_module(f"{__name__}.{to}_format").write
    except ModuleNotFoundError as error:
        raise UserError(
            f"--to {to}",
            f"needs the package {library}: {error}",
            remedy="install paceline[export]",
        ) from error
    write(run_export(folder), out)
