"""`paceline compare --sequential`: run pairs until the verdict is decided."""

from __future__ import annotations

from paceline.cli.output import TableFormat, emit
from paceline.cli.repeat import RepeatDisplay, announce
from paceline.cli.terminal import echo
from paceline.compare.sequential.judgement import SequentialComparison
from paceline.runs.flow import command_line
from paceline.runs.sequential_comparison import (
    SequentialRequest,
    judge_existing_pairs,
    look_text,
    run_until_decided,
    sequential_document,
    sequential_series,
    with_instructions,
)


def compare_in_pairs(
    question: SequentialRequest, as_json: bool, probe: bool
) -> SequentialComparison:
    """Run the pairs that are needed, or report how many are missing, and print the result."""
    series = sequential_series(question)
    if series is None:
        answer = with_instructions(judge_existing_pairs(question))
    else:
        announce(series)
        answer = run_until_decided(
            question, series, command_line(), RepeatDisplay(), _print_analysis, probe=probe
        )
    emit(sequential_document(answer), TableFormat.json if as_json else TableFormat.text)
    return answer


def _print_analysis(answer: SequentialComparison) -> None:
    """Print the latest interim analysis to standard error."""
    if answer.analyses:
        echo(f"  {look_text(answer.analyses[-1])}", err=True)
