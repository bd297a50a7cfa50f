"""`paceline compare --sequential`: run pairs until the verdict is decided."""

from __future__ import annotations

from paceline.cli.output import TableFormat, emit
from paceline.cli.repeat import RepeatDisplay, announce
from paceline.cli.terminal import echo
from paceline.compare.sequential.judgement import SequentialComparison
from paceline.runs.flow import command_line
from paceline.runs.sequential_comparison import (
    PairsQuestion,
    asked,
    judged_so_far,
    run_until_decided,
    series_of,
)
from paceline.runs.sequential_report import look_text, sequential_document


def compare_in_pairs(question: PairsQuestion, as_json: bool, probe: bool) -> SequentialComparison:
    """Run the pairs that are needed, or report how many are missing, and print the result."""
    series = series_of(question)
    if series is None:
        answer = asked(judged_so_far(question))
    else:
        announce(series)
        answer = run_until_decided(
            question, series, command_line(), RepeatDisplay(), _print_analysis, probe=probe
        )
    emit(sequential_document(answer), TableFormat.json if as_json else TableFormat.text)
    return answer


def _print_analysis(answer: SequentialComparison) -> None:
    """Print the latest interim analysis to standard error."""
    if answer.looks:
        echo(f"  {look_text(answer.looks[-1])}", err=True)
