"""The terminal report: plain when piped, complete, and text stays text."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from paceline.core.result import Status
from paceline.core.run_report import RunReport
from paceline.report.text import render_text
from tests.report.example import (
    STATUSES,
    failed_report,
    hostile_report,
    referenced_report,
    report,
    single_step_report,
)


def printed(run: RunReport, *, terminal: bool = False, header: bool = True) -> str:
    """What the report prints."""
    out = io.StringIO()
    console = Console(
        file=out, width=60, force_terminal=terminal, color_system="standard" if terminal else None
    )
    render_text(run, console, header=header)
    return out.getvalue()


def test_the_headline_has_value_interval_window_and_kind_of_interval() -> None:
    line = next(line for line in printed(report()).splitlines() if "tokens/s  ±" in line)
    assert line.strip() == (
        "17,422 tokens/s  ± 0.2 %      median of 54 steady steps (7-60); within-run 95 %"
    )


def test_padded_samples_are_told_in_samples_with_the_text_in_them() -> None:
    metrics = report().result.metrics
    share = metrics["real_token_fraction"].model_copy(update={"value": 0.75})
    text = printed(
        report(headline="samples_per_s", metrics={**metrics, "real_token_fraction": share})
    )
    head, rates = [line.strip() for line in text.splitlines() if "samples/s" in line]
    assert head.endswith(
        "samples/s  ± 0.2 %      median of 54 steady steps (7-60); within-run 95 %"
    )
    assert (
        "at the mean step, as published averages count · 17,422 tokens/s of text, 75.0 %" in rates
    )


def test_images_are_told_in_samples_without_tokens() -> None:
    text = printed(report(headline="samples_per_s"))
    assert "samples/s  ±" in text and "tokens/s" not in text


def test_the_report_says_how_far_from_the_limit_and_why_there_is_no_mfu() -> None:
    text = printed(report())
    assert "62.7 % of what this machine reaches in bf16 (590 GFLOP/s)" in text
    assert "MFU: no data-sheet peak for cpu in bf16" in text


def test_mfu_comes_with_its_convention() -> None:
    result = report().result
    mfu = result.metrics["mfu"].model_copy(update={"value": 0.3617, "note": None})
    text = printed(report(metrics={**result.metrics, "mfu": mfu}))
    assert "MFU 36.2 % (causal)" in text


def test_the_report_names_step_time_memory_waiting_and_start_up() -> None:
    text = printed(report())
    for part in (
        "s median",
        "s mean (0.4 % jitter)",
        "GiB a rank (resident)",
        "data wait",
        "start-up 2.31 s",
        "rank 1 on node-000 busiest (+2.0 %)",
    ):
        assert part in text


def test_equal_ranks_blame_nobody() -> None:
    assert "busiest" not in printed(report(slow_rank=None))


def test_the_report_ends_with_the_run_folder_and_its_main_files() -> None:
    last = printed(report()).splitlines()[-1]
    assert last.split() == [report().folder, "result.json", "steps.jsonl", "job.sh"]


def test_references_are_listed_with_ratio_or_the_reason_against() -> None:
    text = printed(referenced_report())
    assert "tiny-llama/epyc-9654 17,310 tokens/s, ratio 1.021" in text
    assert "not comparable: prints the last step, not the median" in text


def test_piped_output_has_no_escape_codes_and_no_wrapped_lines() -> None:
    text = printed(report())
    assert "\x1b" not in text
    assert any(len(line) > 100 for line in text.splitlines())


def test_a_terminal_gets_colours() -> None:
    assert "\x1b[" in printed(report(), terminal=True)


def test_the_header_can_be_left_out() -> None:
    assert "global batch 16 sequences" in printed(report())
    assert "global batch 16 sequences" not in printed(report(), header=False)


@pytest.mark.parametrize("status", [s for s in STATUSES if s != "ok"])
def test_a_run_without_success_says_status_reason_log_and_what_to_do(status: Status) -> None:
    text = printed(failed_report(status, 3))
    run = failed_report(status).result
    for part in (run.reason, "| [rank 1] exit code 1", "what to do: ", "3 of 60 steps done"):
        assert str(part) in text
    assert "tokens/s" not in text and "MFU" not in text


def test_a_single_step_gives_no_figure_and_says_so() -> None:
    assert "no figure: 1 step (1, too few for a figure)" in printed(single_step_report())


def test_unknown_figures_are_left_out_and_never_printed_as_none() -> None:
    result = report().result
    blank = {name: m.model_copy(update={"value": None}) for name, m in result.metrics.items()}
    text = printed(report(metrics=blank, straggler=None))
    assert "None" not in text and "nan" not in text
    assert "no figure" in text


def test_markup_in_names_and_logs_is_not_interpreted() -> None:
    text = printed(hostile_report("[bold red]x[/] [link=http://a]y[/link]"), terminal=True)
    assert "[bold red]x[/] [link=http://a]y[/link]" in text


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_printed_without_terminal_sequences(text: str) -> None:
    assert "\x1b" not in printed(hostile_report(text))
    assert "\x1b" not in printed(failed_report("failed", reason=text, log_tail=(text, text)))
