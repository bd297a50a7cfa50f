"""Snapshot of a run as a terminal page, or as lines without a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.core.secrets import redact
from paceline.core.text import one_line
from paceline.core.units import gib, percent, seconds, significant
from paceline.runs.watch.state import DevicesNow, RankNow, WatchState

MAX_RANKS = 16
"""Maximum number of ranks with their own line; the busiest are shown."""
SLOWER = 1.05
"""Ratio to the usual step time above which the page shows the step in red."""
RANK_HEADS = ("rank", "host", "step", "busy s", "waits s", "data s", "memory")
"""Column titles of `rank_cells`."""


def state_line(state: WatchState) -> str:
    """Return the snapshot as one line, for output without a terminal."""
    figures = state_figures(state)
    return " · ".join(
        [figures[0][1], state.status, *(f"{name} {value}" for name, value in figures[2:8])]
    )


def state_page(state: WatchState) -> RenderableType:
    """Return the snapshot as a panel: progress, figures, ranks."""
    figures = Table.grid(padding=(0, 2))
    (_, run), (_, status), *other_figures = state_figures(state)
    for name, value in other_figures:
        slow = name == "step" and state.ratio is not None and state.ratio > SLOWER
        figures.add_row(Text(name, style="dim"), Text(value, style="red" if slow else ""))
    parts: list[RenderableType] = []
    if state.steps_requested:
        # A bare progress bar does not end its line, so the next part would be cut off.
        line = Table.grid(expand=True)
        line.add_row(ProgressBar(total=state.steps_requested, completed=state.step or 0))
        parts.append(line)
    parts.append(figures)
    if len(state.ranks) > 1:
        parts.append(_rank_table(state))
    title = Text(f"{run} · {status}")
    return Panel(Group(*parts), title=title, title_align="left")


def state_figures(state: WatchState) -> list[tuple[str, str]]:
    """Return name and value of every known figure, with the run and its status first."""
    return [(name, clean(value)) for name, value in _fields(state) if value]


def busiest_ranks(state: WatchState) -> list[RankNow]:
    """Return up to MOST_RANKS of the busiest ranks, in the order of their numbers."""
    busiest = sorted(state.ranks, key=lambda rank: -(rank.busy_time_s or 0.0))[:MAX_RANKS]
    return sorted(busiest, key=lambda rank: rank.rank)


def clean(text: str) -> str:
    """Return untrusted text that is safe to print on a terminal."""
    return redact(one_line(text), os.environ)


def _fields(state: WatchState) -> Iterator[tuple[str, str]]:
    yield "run", state.run
    yield "status", state.status + (f" ({state.reason})" if state.reason else "")
    of = f" of {state.steps_requested}" if state.steps_requested else ""
    yield "done", f"step {state.step}{of}" if state.step is not None else "no step yet"
    yield "step", _step(state)
    yield "tokens/s", f"{state.tokens_per_s:,.0f}" if state.tokens_per_s else ""
    yield "samples/s", significant(state.samples_per_s) if state.samples_per_s else ""
    yield "MFU", percent(state.mfu) if state.mfu else ""
    yield "of achievable", percent(state.achievable_fraction) if state.achievable_fraction else ""
    yield "left", seconds(state.eta_s) if state.eta_s is not None else ""
    yield "loss", f"{state.loss:.4g}" if state.loss is not None else ""
    yield "data wait", _percent(state.data_wait_fraction)
    yield "collectives wait", _percent(state.comm_wait_fraction)
    if state.waited_for is not None and state.waited_for_excess is not None:
        busier = percent(state.waited_for_excess, 0)
        yield "waited for", f"rank {state.waited_for}, busier than the others by {busier}"
    yield "memory", gib(state.memory_bytes) if state.memory_bytes else ""
    yield "devices", _devices(state.devices) if state.devices else ""
    quiet = state.last_sign_s is not None and not state.ended
    yield "last sign", f"{state.last_sign_s:.0f} s ago" if quiet else ""


def _step(state: WatchState) -> str:
    if state.step_time_s is None:
        return ""
    now = f"{significant(state.step_time_s)} s (n = {state.n})"
    if state.ratio is None or state.usual_s is None:
        return now
    usual = f"{significant(state.usual_s)} s before (n = {state.usual_n})"
    return f"{now}, {state.ratio:.2f} times the {usual}"


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else percent(fraction)


def _devices(devices: DevicesNow) -> str:
    parts: list[str] = []
    if devices.clock_mhz is not None and devices.lowest_clock_mhz is not None:
        parts.append(f"{devices.clock_mhz:,.0f} MHz (lowest {devices.lowest_clock_mhz:,.0f})")
    if devices.power_w is not None:
        parts.append(f"{devices.power_w:,.0f} W")
    if devices.hottest_c is not None:
        parts.append(f"{devices.hottest_c:.0f} °C")
    return ", ".join(parts)


def _rank_table(state: WatchState) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in RANK_HEADS:
        table.add_column(title, justify="left" if title == "host" else "right")
    for rank in busiest_ranks(state):
        style = "red" if rank.rank == state.waited_for else ""
        table.add_row(*(Text(cell, style=style) for cell in rank_cells(rank)))
    return table


def rank_cells(rank: RankNow) -> list[str]:
    """Return the cells of one rank, in the order of RANK_HEADS."""

    def number(value: float | None) -> str:
        return "-" if value is None else significant(value)

    return [
        str(rank.rank),
        clean(rank.host or "-"),
        "-" if rank.step is None else str(rank.step),
        number(rank.busy_time_s),
        number(rank.comm_wait_s),
        number(rank.data_wait_s),
        gib(rank.memory_bytes) if rank.memory_bytes else "-",
    ]
