"""`paceline mlperf system` and `mlperf package`: prepare a submission."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Json
from paceline.cli.output import TableForm, TableFormat, emit
from paceline.core.errors import EXIT_GATE_FAILED, EXIT_INCOMPLETE, UserError
from paceline.mlperf.report import description_document, package_document
from paceline.mlperf.rules import BENCHMARKS, SCORED_ONLY
from paceline.mlperf.submission.package import PackageRequest
from paceline.mlperf.submission.package import package as make
from paceline.mlperf.submission.system_description import describe

Ruleset = Annotated[
    str | None,
    typer.Option(help="MLPerf Training round; default 5.1.0.", show_default=False),
]


def system(
    cluster: Annotated[
        str | None,
        typer.Option(help="Name or YAML file of the cluster that this machine belongs to."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File for the description; an existing file is never overwritten.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Fill in a field. Repeatable."),
    ] = None,
    ruleset: Ruleset = None,
    fail_on_findings: Annotated[
        bool, typer.Option(help="Exit with 3 if a field is missing or wrong.")
    ] = False,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Describe this system for an MLPerf submission, and list what is still missing.

    Fields that the machine does not report start with UNKNOWN. Fill them in with --set or in the
    file, because no package is created with one. An empty value ("") leaves a field blank.

    Examples:

      paceline mlperf system --output systems/box.json --set submitter=Example --set division=closed

      paceline mlperf system --cluster cluster.yaml --set "status=Available on-premise"
    """
    description = describe(cluster, settings or [], output, ruleset)
    emit(description_document(description), TableFormat.json if as_json else form)
    if fail_on_findings and description.status != "complete":
        raise typer.Exit(EXIT_GATE_FAILED)


def package(
    places: Annotated[
        list[Path], typer.Argument(help="Folders of runs, one per benchmark.", metavar="DIR...")
    ],
    org: Annotated[str, typer.Option(help="Name of the submitting organization.")],
    division: Annotated[str, typer.Option(help="Division: closed or open.")],
    system: Annotated[
        Path,
        typer.Option(
            help="System description; the file name without .json is the name of the system."
        ),
    ],
    code: Annotated[
        list[str],
        typer.Option(
            metavar="[BENCHMARK=]FOLDER",
            help="Code that was run, for one benchmark or for all. Repeatable.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Folder in which the organization's submission folder is created.",
        ),
    ],
    ruleset: Ruleset = None,
    allow_placeholders: Annotated[
        bool, typer.Option(help="Accept logs whose organization is a placeholder.")
    ] = False,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Create a submission that the official package checker accepts: logs, description, code.

    All files are copied; nothing is moved, changed or overwritten. The folder is created only if
    the checker accepts it. Tiny variants, synthetic data and placeholders are rejected.

    Examples:

      paceline mlperf package LOGDIR --org Example --division closed --system systems/box.json
      --code implementation --output submission

    Exit code 3 if the rules or the checker reject it.
    """
    request = PackageRequest(
        places=tuple(places),
        organization=org,
        division=division,
        system=system,
        code=_code_folders(code),
        out=output,
        ruleset=ruleset,
        placeholders=allow_placeholders,
    )
    submission = make(request)
    emit(package_document(submission), TableFormat.json if as_json else form)
    if submission.folder is None:
        raise typer.Exit(
            EXIT_GATE_FAILED if submission.check.status == "failed" else EXIT_INCOMPLETE
        )


def _code_folders(code: list[str]) -> dict[str, Path]:
    """Return the code folder by benchmark; the key "" is the default."""
    folders: dict[str, Path] = {}
    for text in code:
        name, equals, folder = text.partition("=")
        is_benchmark = name in (BENCHMARKS | SCORED_ONLY) and bool(equals)
        key = name if is_benchmark else ""
        if key in folders:
            raise UserError(
                f"--code {text}",
                f"is a second folder for {key or 'all benchmarks'}",
                remedy="give one folder per benchmark",
            )
        folders[key] = Path(folder if is_benchmark else text)
    return folders
