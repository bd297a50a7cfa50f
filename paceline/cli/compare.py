"""`paceline compare`: test which side is faster."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from paceline.cli.log_options import LOG_OPTIONS, LogOptions
from paceline.cli.options import Html, Json, Junit, Markdown, RunsDir, refuse_unused
from paceline.cli.output import emit, emit_files, render
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.files.documents import write_output
from paceline.files.run_folder import runs_root
from paceline.runs.comparison import (
    ComparisonOptions,
    compare_runs,
    compare_with_reference,
    parse_margin,
)
from paceline.runs.comparison_report import comparison_document, junit_xml

VERDICT_EXIT = {
    **dict.fromkeys(("same", "faster", "better"), 0),
    **dict.fromkeys(("undecided", "likely slower", "likely faster"), 4),
}
"""Exit code by verdict; all other verdicts exit with 3."""


ALWAYS_USED = frozenset(
    {"first", "second", "margin", "allow", "metric", "runs_dir", "form", "as_json"}
)
USED_IN_PAIRS = ALWAYS_USED | {"sequential", "max_pairs", "group", "probe"}
USED_WITHOUT_PAIRS = (
    ALWAYS_USED | {"against", "html", "markdown", "junit", "sequential"} | LOG_OPTIONS
)


class CompareFormat(StrEnum):
    """Output formats of a comparison."""

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
            help="Baseline: a log, a folder of logs, a stored run, group or tag, a "
            "bundle, step times as CSV, a result file, or a comma-separated list of "
            "these. With --against, the side to judge.",
        ),
    ],
    second: Annotated[
        str | None, typer.Argument(metavar="B", help="Side to judge, given in the same way.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REFERENCE",
            help="Compare A with a published row, table or source; `reference` takes the row "
            "nearest to the run.",
        ),
    ] = None,
    margin: Annotated[
        str, typer.Option(help="Differences below this margin do not count: 1% or 0.01.")
    ] = "1%",
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Setting that may differ, e.g. dtype. Repeatable."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Metric that decides the verdict (default step_time_s). Repeatable.",
        ),
    ] = None,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="Run A and B in pairs (A B, B A, ...) until the verdict is decided. A and B are"
            " two interleaved groups, or recipes with changes as for `run --interleave`; "
            "for other runs, the number of missing pairs is printed.",
        ),
    ] = False,
    max_pairs: Annotated[
        int | None,
        typer.Option(
            min=3,
            max=1000,
            help="Maximum number of pairs (default 16). Must be fixed before the first interim "
            "analysis.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of a new series, whose groups are called NAME-a and NAME-b.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            help="Measure the achievable GEMM throughput of this machine first (cached).",
        ),
    ] = True,
    html: Html = None,
    markdown: Markdown = None,
    junit: Junit = None,
    runs_dir: RunsDir = None,
    form: Annotated[
        CompareFormat,
        typer.Option("--format", help="Output format; md suits a pull request, junit a CI server."),
    ] = CompareFormat.text,
    as_json: Json = False,
    *,
    log: LogOptions,
) -> None:
    """Test whether B is slower than A, faster, the same, or whether that is undecided.

    With three or more alternating repeats per side this is a test over repeats (Welch's t-test on
    the medians of the runs). With fewer, or on different days or hosts, the known run-to-run
    variation is used: that of the configuration's history, or of published runs on such machines.
    A difference is then proven at 99%, and likely at 95%. Ratios are B over A: a step time above 1
    is slower. With --against they are A over the reference.

    Logs of any known framework need no import. Settings that they do not state are assumed equal,
    and can be added with options, as for `parse`. Logs of several ranks of one run count once.

    Exit codes: 0 same or faster; 3 slower, not comparable or invalid; 4 undecided or likely, with
    the number of further repeats that are needed.

    With --sequential, A and B run in pairs until an interim analysis reaches a verdict. Over all
    interim analyses, identical sides are called different in at most 5% of cases. Ctrl-C keeps
    finished runs, and the same command resumes.

    Examples:

      paceline compare before.log after.log

      paceline compare 'before/*.log' 'after/*.log'         several runs per side

      paceline compare before after --margin 1%

      paceline compare last --against reference

      paceline compare old-driver new-driver --format junit > compare.xml

      paceline compare tiny-llama tiny-llama,layout.zero_stage=3 --sequential
    """
    if (second is None) == (against is None):
        raise UserError(
            "compare", "takes either B or --against, not both", remedy="give one of them"
        )
    root = runs_root(runs_dir)
    settings = log.settings()
    gate = ComparisonOptions(
        parse_margin(margin), tuple(allow or ()), tuple(metric or ()), settings
    )
    if sequential:
        refuse_unused(context, "--sequential", USED_IN_PAIRS)
        # It needs launchers and engines, which a plain comparison does without.
        from paceline.cli.sequential import compare_in_pairs
        from paceline.runs.sequential_comparison import SequentialRequest

        question = SequentialRequest(
            root=root,
            first=first,
            second=second or "",
            options=gate,
            max_pairs=max_pairs,
            group=group,
            runs_dir=runs_dir,
        )
        answer = compare_in_pairs(question, _json_alone(form, as_json), probe)
        raise typer.Exit(VERDICT_EXIT.get(answer.verdict, 3))
    refuse_unused(context, "runs that there are (--sequential makes them)", USED_WITHOUT_PAIRS)
    if against is not None:
        comparison = compare_with_reference(root, first, against, gate)
    else:
        comparison = compare_runs(root, first, second or "", gate)
    document = comparison_document(comparison)
    if markdown is not None:
        write_output(markdown, render(document, CompareFormat.md))
    if junit is not None:
        write_output(junit, junit_xml(comparison))
    if form is CompareFormat.junit and not as_json:
        echo(junit_xml(comparison), nl=False)
        emit_files(document, page=html)
    else:
        emit(document, CompareFormat.json if as_json else form, page=html)
    raise typer.Exit(VERDICT_EXIT.get(comparison.verdict, 3))


def _json_alone(form: CompareFormat, as_json: bool) -> bool:
    """Return whether to print JSON; raise UserError for a format that --sequential lacks."""
    if form not in (CompareFormat.text, CompareFormat.json):
        raise UserError(
            f"--format {form.value}", "is not available with --sequential", allowed="text, json"
        )
    return as_json or form is CompareFormat.json
