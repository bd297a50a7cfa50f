"""Snapshot of a run as a document: progress, figures and ranks, and a chart of the ranks' waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.core.secrets import redact
from paceline.core.text import one_line
from paceline.core.units import gib, percent, pluralize, seconds, significant
from paceline.report.document import Column, Document, Figure, Table, Tone, Verdict, unknown_figure
from paceline.report.openmetrics import Gauge, openmetrics_text
from paceline.runs.watch.reader import DevicesNow, RankNow, WatchState

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import ChartTheme

MAX_RANKS = 16
"""Maximum number of ranks with their own line; the busiest are shown."""
SLOWER = 1.05
"""Ratio to the usual step time above which the verdict is red."""
RANK_COLUMNS = (
    Column("rank", "rank", str, "right"),
    Column("host", "host"),
    Column("step", "step", str, "right"),
    Column("busy_time_s", "busy s", significant, "right"),
    Column("comm_wait_s", "waits s", significant, "right"),
    Column("data_wait_s", "data s", significant, "right"),
    Column("memory_bytes", "memory", gib, "right"),
)
BAR_HEIGHT = 26
COLOURS = {"works": "steady", "waits for data": "accent", "waits for ranks": "good_soft"}
"""Palette colour of each part of a step."""


def snapshot_document(state: WatchState) -> Document:
    """Return the snapshot as a document with its figures and ranks."""
    of_steps = f" of {state.steps_requested:,}" if state.steps_requested else ""
    progress = "no step yet" if state.step is None else f"step {state.step:,}{of_steps}"
    run = _clean(state.run)
    return Document(
        kind="a run at one moment",
        title=run,
        headline=f"{state.recipe or run}: {state.status}, {progress}",
        source=run,
        verdict=Verdict(state.status, _tone(state)),
        setup=(progress,),
        answer=(_clean(state.reason),) if state.reason else (),
        figures=tuple(_figures(state)),
        sections=(
            Table(
                title="Ranks",
                columns=RANK_COLUMNS,
                rows=[
                    {**rank.model_dump(), "host": rank.host and _clean(rank.host)}
                    for rank in busiest_ranks(state)
                ],
                note="Median seconds of a recent step.",
            ),
        ),
        notes=("The run has ended." if state.ended else "The run goes on: it has moved since.",),
        charts=lambda theme: snapshot_charts(state, theme),
        data=state,
    )


def state_line(state: WatchState) -> str:
    """Return the snapshot as one line, for output without a terminal."""
    document = snapshot_document(state)
    known_figures = [each for each in document.figures if each.value[:1].isdigit()][:5]
    figures = (f"{figure.label.lower()} {figure.value}" for figure in known_figures)
    return " · ".join([document.title, state.status, *document.setup, *figures])


def busiest_ranks(state: WatchState) -> list[RankNow]:
    """Return up to MAX_RANKS of the busiest ranks, in the order of their numbers."""
    busiest = sorted(state.ranks, key=lambda rank: -(rank.busy_time_s or 0.0))[:MAX_RANKS]
    return sorted(busiest, key=lambda rank: rank.rank)


def _clean(text: str) -> str:
    """Return untrusted text on one line and without secrets."""
    return redact(one_line(text), os.environ)


def _tone(state: WatchState) -> Tone:
    if state.ended:
        return "good" if state.status == "ok" else "alert"
    return "alert" if state.ratio and state.ratio > SLOWER else "plain"


def _figures(state: WatchState) -> Iterator[Figure]:
    if state.step_time_s is None:
        yield unknown_figure("Step", "no step has a time yet")
    else:
        past = ""
        if state.usual_s is not None and state.ratio is not None:
            usual = f"{significant(state.usual_s)} s before (n = {state.usual_n})"
            past = f"{state.ratio:.2f} times the {usual}"
        yield Figure("Step", f"{significant(state.step_time_s)} s", f"n = {state.n}", (past,))
    samples = f"{significant(state.samples_per_s)} samples/s" if state.samples_per_s else ""
    if state.tokens_per_s:
        yield Figure("Throughput", f"{state.tokens_per_s:,.0f} tokens/s", "", (samples,))
    elif samples:
        yield Figure("Throughput", samples)
    else:
        yield unknown_figure("Throughput", "the run does not report tokens")
    if state.comm_wait_fraction is None:
        yield unknown_figure("Waits for ranks", "the run marks no waits for collectives")
    else:
        late = ""
        if state.waited_for is not None and state.waited_for_excess is not None:
            busier = percent(state.waited_for_excess, 0)
            late = f"the others wait for rank {state.waited_for}, which is {busier} busier"
        yield Figure("Waits for ranks", percent(state.comm_wait_fraction), "of a step", (late,))
    if state.eta_s is None:
        why = "the run has ended" if state.ended else "the pace or the number of steps is not known"
        yield unknown_figure("Left", why)
    else:
        yield Figure("Left", seconds(state.eta_s), "at the recent pace")
    others: dict[str, tuple[float | None, Callable[[float], str]]] = {
        "MFU": (state.mfu or None, percent),
        "Of achievable": (state.achievable_fraction or None, percent),
        "Data wait": (state.data_wait_fraction, percent),
        "Loss": (state.loss, "{:.4g}".format),
        "Memory": (state.memory_bytes or None, gib),
    }
    yield from (
        Figure(name, form(value)) for name, (value, form) in others.items() if value is not None
    )
    if state.devices and (devices := _devices(state.devices)):
        yield Figure("Devices", devices)
    if state.last_sign_s is not None and not state.ended:
        yield Figure("Last sign", f"{state.last_sign_s:.0f} s ago")


def _devices(devices: DevicesNow) -> str:
    parts: list[str] = []
    if devices.clock_mhz is not None and devices.lowest_clock_mhz is not None:
        parts.append(f"{devices.clock_mhz:,.0f} MHz (lowest {devices.lowest_clock_mhz:,.0f})")
    if devices.power_w is not None:
        parts.append(f"{devices.power_w:,.0f} W")
    if devices.hottest_c is not None:
        parts.append(f"{devices.hottest_c:.0f} °C")
    return ", ".join(parts)


def snapshot_charts(state: WatchState, theme: ChartTheme) -> dict[str, LayerChart]:
    """Return a chart with one bar per rank, for the busiest ranks; {} before the first step."""
    import altair as alt  # It takes long to import.

    from paceline.report.step_charts import finish_chart

    rows = [row for rank in busiest_ranks(state) for row in _segments(rank)]
    if not rows:
        return {}
    names = [name for name in COLOURS if any(row["what"] == name for row in rows)]
    ranks = [f"rank {rank.rank}" for rank in busiest_ranks(state)]
    colours = [getattr(theme.palette, COLOURS[name]) for name in names]
    bars = (
        alt.Chart(alt.Data(values=rows), name="ranks")
        .mark_bar(height=16, stroke=theme.palette.card, strokeWidth=1)
        .encode(
            x=alt.X("start:Q", title="seconds of a step", axis=alt.Axis(grid=True, tickCount=6)),
            x2="end:Q",
            y=alt.Y("rank:N", sort=ranks, title=None, axis=alt.Axis(grid=False)),
            color=alt.Color("what:N", scale=alt.Scale(domain=names, range=colours)),
            tooltip=[
                alt.Tooltip("rank:N"),
                alt.Tooltip("what:N"),
                alt.Tooltip("seconds:Q", format=".4~f"),
            ],
        )
    )
    notes = [f"Medians of the last {pluralize(state.n, 'step')}, each part by itself."]
    if len(ranks) < len(state.ranks):
        notes.append(f"The {len(ranks)} busiest of {len(state.ranks):,} ranks.")
    height, run = 60 + BAR_HEIGHT * len(ranks), _clean(state.run)
    return {"ranks": finish_chart([bars], theme, "Who waits for whom", notes, height, run)}


def _segments(rank: RankNow) -> Iterator[dict[str, Any]]:
    start, data_s = 0.0, rank.data_wait_s or 0.0
    # Data wait counts as busy time, because it delays the other ranks as compute does.
    works_s = max(0.0, (rank.busy_time_s or 0.0) - data_s)
    for what, duration in zip(COLOURS, (works_s, data_s, rank.comm_wait_s), strict=True):
        if duration:
            yield {
                "rank": f"rank {rank.rank}",
                "what": what,
                "start": start,
                "end": start + duration,
                "seconds": duration,
            }
            start += duration


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
