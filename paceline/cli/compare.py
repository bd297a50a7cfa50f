"""`paceline compare`: slower, faster, the same, or undecided."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Json, RunsDir, refuse_unused
from paceline.cli.output import emit, emit_files
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.files.run_folder import runs_root
from paceline.runs.comparison import Gate, compare_runs, compare_with_reference, parse_margin
from paceline.runs.comparison_junit import junit_xml
from paceline.runs.comparison_report import comparison_document

VERDICT_EXIT = {"same": 0, "faster": 0, "better": 0, "undecided": 4}
"""Exit code by verdict; every other verdict fails the gate (3)."""


ALWAYS_USED = frozenset(
    {"first", "second", "margin", "allow", "metric", "runs_dir", "form", "as_json"}
)
USED_IN_PAIRS = ALWAYS_USED | {"sequential", "max_pairs", "group", "probe"}
USED_WITHOUT_PAIRS = ALWAYS_USED | {"against", "html", "sequential"}


class CompareFormat(StrEnum):
    """Forms in which a comparison is printed."""

    text = "text"
    json = "json"
    csv = "csv"
    md = "md"
    junit = "junit"


def compare(
    context: typer.Context,
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="The baseline: a run, a group of repeats, a tag, a result file, or several by "
            "commas. With --against it is what is judged.",
        ),
    ],
    second: Annotated[
        str | None, typer.Argument(metavar="B", help="What is judged, named in the same ways.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REFERENCE",
            help="Judge A against a published row, table or source; `reference` takes the row "
            "nearest to the run.",
        ),
    ] = None,
    margin: Annotated[
        str, typer.Option(help="Smaller differences do not matter: 1% or 0.01.")
    ] = "1%",
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A setting that may differ, e.g. dtype. Repeatable."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Metric that the verdict depends on. Repeatable; default step_time_s.",
        ),
    ] = None,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="Make pairs of runs in turns (A B, B A, ...) until they decide. A and B are two "
            "groups that ran in turns, or recipes with changes as in `run --interleave`; of other "
            "runs it says how many pairs are missing.",
        ),
    ] = False,
    max_pairs: Annotated[
        int | None,
        typer.Option(
            min=3,
            max=1000,
            help="Give up after so many pairs (16); to be settled before the first look.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the groups NAME-a and NAME-b of a new series.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            help="Measure this machine's reachable rate before the first run.",
        ),
    ] = True,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the page with its charts.")
    ] = None,
    runs_dir: RunsDir = None,
    form: Annotated[
        CompareFormat,
        typer.Option("--format", help="md suits a pull request, junit a CI server."),
    ] = CompareFormat.text,
    as_json: Json = False,
) -> None:
    """Say whether B is slower than A, faster, the same, or whether that is undecided.

    From three repeats a side on it is a test over repeats (Welch's t on the runs' medians); fewer
    are undecided unless the history of the configuration tells how far its runs lie apart. Ratios
    are B over A, so of a step time above 1 is slower; with --against they are A over the reference.

    Exit code 0: same or faster. 3: slower, not comparable or invalid. 4: undecided, and it says how
    many more repeats it takes.

    With --sequential A and B run in pairs, and after each look the verdict is either there or a
    further pair begins; over all looks identical sides are called different in at most 5 % of the
    cases. Ctrl-C keeps what was measured; the same command goes on.

    Examples:

      paceline compare before after --margin 1%

      paceline compare last --against reference

      paceline compare old-driver new-driver --format junit > compare.xml

      paceline compare tiny-llama tiny-llama,layout.zero_stage=3 --sequential
    """
    if (second is None) == (against is None):
        raise UserError("compare", "takes either B or --against", remedy="name the other side once")
    root = runs_root(runs_dir)
    gate = Gate(parse_margin(margin), tuple(allow or ()), tuple(metric or ()))
    if sequential:
        refuse_unused(context, "--sequential", USED_IN_PAIRS)
        # It needs launchers and engines, which a plain comparison does without.
        from paceline.cli.sequential import until_decided as pairs_until_decided
        from paceline.runs.sequential_comparison import PairsQuestion

        question = PairsQuestion(root, first, second or "", gate, max_pairs, group, runs_dir)
        answer = pairs_until_decided(question, _json_alone(form, as_json), probe)
        raise typer.Exit(VERDICT_EXIT.get(answer.verdict, 3))
    refuse_unused(context, "runs that there are (--sequential makes them)", USED_WITHOUT_PAIRS)
    if against is not None:
        comparison = compare_with_reference(root, first, against, gate)
    else:
        comparison = compare_runs(root, first, second or "", gate)
    document = comparison_document(comparison)
    if form is CompareFormat.junit and not as_json:
        echo('<?xml version="1.0" encoding="UTF-8"?>')
        echo(junit_xml(comparison), nl=False)
        emit_files(document, page=html)
    else:
        emit(document, CompareFormat.json if as_json else form, page=html)
    raise typer.Exit(VERDICT_EXIT.get(comparison.verdict, 3))


def _json_alone(form: CompareFormat, as_json: bool) -> bool:
    """Whether pairs are printed as JSON; raises UserError for a form that they do not have."""
    if form not in (CompareFormat.text, CompareFormat.json):
        raise UserError(f"--format {form.value}", "is not made of pairs", allowed="text, json")
    return as_json or form is CompareFormat.json
