"""Snapshot of a run as a document that can be shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from paceline.core.units import percent, seconds, significant
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Table,
    Tone,
    Verdict,
    unknown_figure,
)
from paceline.report.openmetrics import Gauge, openmetrics_text
from paceline.runs.watch.page import RANK_HEADS, SLOWER, busiest_ranks, rank_cells, state_figures
from paceline.runs.watch.state import WatchState

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import ChartTheme


def snapshot_document(state: WatchState) -> Document:
    """Return the snapshot as a document with its figures and ranks."""
    of_steps = f" of {state.steps_requested:,}" if state.steps_requested else ""
    progress = "no step yet" if state.step is None else f"step {state.step:,}{of_steps}"
    return Document(
        kind="a run at one moment",
        title=state.run,
        headline=f"{state.recipe or state.run}: {state.status}, {progress}",
        source=state.run,
        verdict=Verdict(state.status, _tone(state)),
        setup=(progress,),
        answer=(state.reason,) if state.reason else (),
        figures=tuple(_figures(state)),
        sections=(
            Table(
                title="The moment",
                columns=(Column("figure", "figure"), Column("value", "value")),
                rows=[{"figure": name, "value": value} for name, value in state_figures(state)],
            ),
            Table(
                title="Ranks",
                columns=[Column(head, head) for head in RANK_HEADS],
                rows=[
                    dict(zip(RANK_HEADS, rank_cells(rank), strict=True))
                    for rank in busiest_ranks(state)
                ],
                note="Median seconds of a recent step.",
            ),
        ),
        notes=("The run has ended." if state.ended else "The run goes on: it has moved since.",),
        charts=lambda theme: _charts(state, theme),
        data=state,
    )


def _charts(state: WatchState, theme: ChartTheme) -> Mapping[str, LayerChart]:
    from paceline.runs.watch.charts import snapshot_charts  # Importing Altair is slow.

    return snapshot_charts(state, theme)


def _tone(state: WatchState) -> Tone:
    if state.ended:
        return "good" if state.status == "ok" else "alert"
    return "alert" if state.ratio and state.ratio > SLOWER else "plain"


def _figures(state: WatchState) -> Iterator[Figure]:
    if state.step_time_s is None:
        yield unknown_figure("Step", "no step has a time yet")
    else:
        past = None
        if state.usual_s is not None and state.ratio is not None:
            usual = f"{significant(state.usual_s)} s before (n = {state.usual_n})"
            past = f"{state.ratio:.2f} times the {usual}"
        yield Figure(
            "Step", f"{significant(state.step_time_s)} s", f"n = {state.n}", _joined_details(past)
        )
    if state.tokens_per_s:
        rate = f"{significant(state.samples_per_s)} samples/s" if state.samples_per_s else None
        mfu = f"MFU {percent(state.mfu)}" if state.mfu else None
        yield Figure(
            "Throughput", f"{state.tokens_per_s:,.0f} tokens/s", "", _joined_details(mfu, rate)
        )
    else:
        yield unknown_figure("Throughput", "the run does not report tokens")
    if state.comm_wait_fraction is None:
        yield unknown_figure("Waits for ranks", "the run marks no waits for collectives")
    else:
        late = None if state.waited_for is None else f"the others wait for rank {state.waited_for}"
        yield Figure(
            "Waits for ranks", percent(state.comm_wait_fraction), "of a step", _joined_details(late)
        )
    if state.eta_s is None:
        why = "the run has ended" if state.ended else "the pace or the number of steps is not known"
        yield unknown_figure("Left", why)
    else:
        yield Figure("Left", seconds(state.eta_s), "at the recent pace")


def _joined_details(*details: str | None) -> tuple[str, ...]:
    return tuple(filter(None, details))


_GAUGES = {
    "step": "Last finished step.",
    "steps_requested": "Number of steps of the run.",
    "loss": "Last loss.",
    "last_sign_s": "Seconds since a rank last wrote to a file.",
    "step_time_s": "Median time of the recent steps in seconds.",
    "usual_s": "Median time of all earlier steps in seconds.",
    "tokens_per_s": "Tokens per second over all devices.",
    "samples_per_s": "Samples per second over all devices.",
    "mfu": "Model FLOPs utilization, 0 to 1.",
    "data_wait_fraction": "Fraction of the recent steps spent waiting for data.",
    "comm_wait_fraction": "Fraction of the recent steps spent waiting for collectives.",
    "memory_bytes": "Largest memory peak of any rank in bytes.",
    "eta_s": "Seconds to the last step.",
}
"""Fields of the state that are exported, with their descriptions."""


def watch_metrics(state: WatchState) -> str:
    """Return the state of a run as OpenMetrics text."""
    labels = {"run": state.run, "recipe": state.recipe}
    gauges = [
        Gauge(f"watch_{name}", getattr(state, name), text, labels) for name, text in _GAUGES.items()
    ]
    running = Gauge("watch_running", float(not state.ended), "1 while the run continues.", labels)
    return openmetrics_text([running, *gauges])
