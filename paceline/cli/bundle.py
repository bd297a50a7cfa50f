"""`paceline runs bundle` and `paceline runs verify`: write and verify a run as one archive."""

from __future__ import annotations

from collections.abc import Iterator
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
from paceline.runs.bundles.signature import signature_file
from paceline.runs.bundles.verification import BundleCheck, check_bundle
from paceline.runs.bundles.writing import write_bundle
from paceline.runs.recomputation import MAX_DIFFERENCES

GOOD = ("intact", "no result")


def bundle(
    run: RunName = "last",
    runs_dir: RunsDir = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Output file; default: RUN.bundle.tar.gz in the current folder."
        ),
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(help="SSH key that signs the bundle in BUNDLE.sig.", metavar="KEY"),
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
    path, content = write_bundle(find_run(runs_root(runs_dir), run), output, sign)
    for part in content.left_out:
        echo(f"left out: {part.path}: {part.why}", err=True)
    for name in content.redacted:
        echo(f"redacted a secret in {name}", err=True)
    if sign:
        echo(f"signed: {signature_file(path)}", err=True)
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
    signer: Annotated[
        Path | None,
        typer.Option(
            help="One of these must have signed it: a file as of `ssh-keygen -Y verify`.",
            metavar="ALLOWED_SIGNERS",
        ),
    ] = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Verify a bundle: check the digest of every file and recompute its results from the raw files.

    Nothing in the bundle is executed. Exit code 3 if a file, a value or the signature differs.
    Digests detect damage and mistakes, a signature shows who wrote the bundle; neither proves that
    the author was honest.

    Example: paceline runs verify run.bundle.tar.gz
    """
    check = check_bundle(file, signer)
    emit(verification_document(check), TableFormat.json if as_json else form)
    raise typer.Exit(0 if check.verdict in GOOD else EXIT_GATE_FAILED)


def verification_document(check: BundleCheck) -> Document:
    """Describe the verification of a bundle: its verdict, and everything that differs."""
    faults = [{"what": fault.fault, "name": fault.path} for fault in check.faults]
    differences = [
        {
            "what": "value",
            "name": f"{each.document}: {each.field}" if each.field else each.document,
            "stored": each.stored_value,
            "recomputed": each.recomputed_value,
        }
        for each in check.differences
    ]
    unchecked_parts = [
        {"what": "not checked", "name": f"{p.path}: {p.why}"} for p in check.unchecked_parts
    ]
    columns = [Column(name, name) for name in ("what", "name", "stored", "recomputed")]
    size = si(check.bytes, "B")
    return Document(
        kind="verification of a bundle",
        title=check.run,
        setup=(pluralize(check.n_files, "file"), size, f"sha256 {check.sha256}"),
        verdict=Verdict(
            check.verdict, "good" if check.verdict in ("intact", "no result") else "alert"
        ),
        answer=(_answer(check),),
        sections=(Table(columns=columns, rows=[*faults, *differences, *unchecked_parts]),),
        notes=tuple(_notes(check)),
        source=check.bundle,
        data=check,
    )


def _notes(check: BundleCheck) -> Iterator[str]:
    """Yield who signed, what the verification takes as given, and what explains a difference."""
    if check.signer or check.signature_fault:
        yield f"signed by {check.signer}" if check.signer else f"signature: {check.signature_fault}"
    if check.raw_files:
        yield f"taken as given: {', '.join(check.raw_files)}"
    if check.measured_by != check.checked_by:
        yield (
            f"measured by Paceline {check.measured_by}, checked by {check.checked_by}: values and "
            "texts of another version may differ"
        )


def _answer(check: BundleCheck) -> str:
    """Return what was found, in one sentence."""
    if check.faults:
        files = pluralize(len(check.faults), "file")
        return f"{files} damaged, so the values were not checked."
    values, num_differences = pluralize(check.n_values, "value"), len(check.differences)
    if num_differences:
        more = " or more" if num_differences == MAX_DIFFERENCES else ""
        return f"{num_differences:,}{more} of {values} differ from those that the raw files give."
    if check.verdict == "not signed":
        return "All files are intact, but no allowed signer signed the bundle."
    if check.verdict == "no result":
        return "All files are intact. The run has no result."
    return f"All files are intact, and {values} confirmed from the raw files."
