"""`paceline version`."""

from __future__ import annotations

import typer

from paceline.cli.options import Json


def version(as_json: Json = False) -> None:
    """Print the versions of Paceline, Python and torch."""
    import json
    import platform
    from importlib import metadata

    from paceline import __version__

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    versions = {"paceline": __version__, "python": platform.python_version(), "torch": torch}
    if as_json:
        typer.echo(json.dumps(versions, indent=2))
        return
    for name, text in versions.items():
        typer.echo(f"{name} {text or '(not installed)'}")
