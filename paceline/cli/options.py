"""Options that several verbs share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ReportFormat(StrEnum):
    """Forms in which one run is printed."""

    text = "text"
    json = "json"
    csv = "csv"
    md = "md"
    html = "html"


RunsDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of all runs; default $PACELINE_RUNS, else ./runs.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Same as --format json.")]
RunName = Annotated[
    str, typer.Argument(help="A run: folder, unique prefix, tag, or `last`.", metavar="RUN")
]
DeviceKind = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
ClusterName = Annotated[str | None, typer.Option(help="A cluster of the catalog, or a YAML file.")]
