"""`paceline version`: print versions."""

from __future__ import annotations

import platform
from importlib import metadata

from paceline import __version__
from paceline.cli.output import TableOptions, emit_table
from paceline.report.document import Column


def version(output: TableOptions) -> None:
    """Print the versions of Paceline, Python and torch.

    Example: paceline version --json
    """
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    versions = {"paceline": __version__, "python": platform.python_version(), "torch": torch}
    rows = [{"program": name, "version": text} for name, text in versions.items()]
    columns = [Column("program", "program"), Column("version", "version")]
    emit_table(rows, columns, output.output_format, document=versions)
