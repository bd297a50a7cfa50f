"""`paceline runs bundle` and `paceline runs verify`: write and verify a run as one archive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Json, RunName, RunsDir
from paceline.cli.output import TableForm, TableFormat, emit, emit_json
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_GATE_FAILED
from paceline.core.units import pluralize, si
from paceline.files.run_folder import find_run, runs_root
from paceline.report.document import Column, Document, Table, Verdict
from paceline.runs.bundles.verification import BundleCheck, check_bundle
from paceline.runs.bundles.writing import write_bundle


def bundle(
    run: RunName = "last",
    runs_dir: RunsDir = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Output file; default: RUN.bundle.tar.gz in the current folder."
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the path and the content list of the bundle as JSON: {file, bundle}.",
        ),
    ] = False,
) -> None:
    """Write a run as one archive for `runs verify`, `runs diff`, `runs import` and `run --from`.

    The bundle holds the run folder without checkpoints and secrets, and the SHA-256 of every file.
    The same run always gives the same bytes.

    Example: paceline runs bundle last --output run.bundle.tar.gz
    """
    path, content = write_bundle(find_run(runs_root(runs_dir), run), output)
    for part in content.left_out:
        echo(f"left out: {part.path}: {part.why}", err=True)
    for name in content.redacted:
        echo(f"redacted a secret in {name}", err=True)
    if as_json:
        emit_json({"file": str(path), "bundle": content.model_dump(mode="json")})
        return
    size = si(sum(file.bytes for file in content.files), "B")
    echo(str(path))
    echo(f"{pluralize(len(content.files), 'file')}, {size}, sha256 {content.sha256}", err=True)


def verify(
    file: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="Bundle written by `paceline runs bundle`.")
    ],
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Verify a bundle: check the digest of every file and recompute its figures.

    Nothing in the bundle is executed. Exit code 3 if a file or a figure differs. Digests detect
    damage and mistakes; they do not prove that the author was honest.

    Example: paceline runs verify run.bundle.tar.gz
    """
    check = check_bundle(file)
    emit(verification_document(check), TableFormat.json if as_json else form)
    raise typer.Exit(EXIT_GATE_FAILED if check.faults or check.figures else 0)


def verification_document(check: BundleCheck) -> Document:
    """Describe the verification of a bundle: its verdict, and everything that differs."""
    faults = [{"what": fault.fault, "name": fault.path} for fault in check.faults]
    figures = [
        {
            "what": "figure",
            "name": figure.name,
            "stored": figure.stored_value,
            "recomputed": figure.recomputed_value,
        }
        for figure in check.figures
    ]
    columns = [Column(name, name) for name in ("what", "name", "stored", "recomputed")]
    size = si(check.bytes, "B")
    versions = f"measured by Paceline {check.measured_by}, checked by {check.checked_by}"
    return Document(
        kind="verification of a bundle",
        title=check.run,
        setup=(pluralize(check.n_files, "file"), size, f"sha256 {check.sha256}"),
        verdict=Verdict(check.verdict, "alert" if faults or figures else "good"),
        answer=(_answer(check),),
        sections=(Table(columns=columns, rows=[*faults, *figures]),),
        notes=() if check.measured_by == check.checked_by else (versions,),
        source=check.bundle,
        data=check,
    )


def _answer(check: BundleCheck) -> str:
    """Return what was found, in one sentence."""
    figures = pluralize(check.n_figures, "figure")
    if check.faults:
        files = pluralize(len(check.faults), "file")
        return f"{files} damaged, so the figures were not checked."
    if not check.n_figures:
        return "All files are intact. The run has no figures."
    if not check.figures:
        return f"All files are intact, and {figures} confirmed from them."
    return f"{len(check.figures):,} of {figures} differ from those recomputed from the files."
