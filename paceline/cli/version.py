"""`paceline version`."""

from __future__ import annotations

import platform
from importlib import metadata

from paceline import __version__
from paceline.cli.options import Json
from paceline.cli.output import OutputColumn, TableForm, TableFormat, emit_table


def version(form: TableForm = TableFormat.text, as_json: Json = False) -> None:
    """Print the versions of Paceline, Python and torch.

    Example: paceline version --json
    """
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    versions = {"paceline": __version__, "python": platform.python_version(), "torch": torch}
    rows = [{"program": name, "version": text} for name, text in versions.items()]
    columns = [OutputColumn("program", "program"), OutputColumn("version", "version")]
    emit_table(rows, columns, TableFormat.json if as_json else form, document=versions)
