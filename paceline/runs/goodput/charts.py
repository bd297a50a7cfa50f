"""Chart of a ledger: the wall time of a training and of each attempt by account."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import altair as alt

from paceline.core.text import one_line
from paceline.core.units import percent, seconds
from paceline.report.step_charts import finish_chart
from paceline.report.theme import ChartTheme
from paceline.runs.goodput.ledger import Account, AttemptEntry, GoodputLedger

BAR_HEIGHT = 30
MAX_ATTEMPTS = 32
"""Maximum number of attempts with their own bar."""
MAX_LABEL_LENGTH = 28
"""Maximum length of an attempt's label in characters."""
COLOURS: dict[Account, str] = {
    "productive": "steady",
    "slow_steps": "steady_soft",
    "checkpoint": "good",
    "evaluation": "good_soft",
    "lost_steps": "accent",
    "compile": "band",
    "initialisation": "warmup",
    "queue": "warmup_soft",
    "stopped": "ink",
    "other": "line",
}
"""Palette colour of each account, in the order of the bar segments."""
UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def goodput_charts(ledger: GoodputLedger, look: ChartTheme) -> dict[str, alt.LayerChart]:
    """Return a chart with a bar of the total time and one per attempt, split by account."""
    length, unit = next(each for each in UNITS if ledger.wall_s >= each[0] or each[0] == 1.0)
    bars: dict[str, dict[Account, float]] = {"all": ledger.seconds}
    for number, entry in enumerate(ledger.attempts[:MAX_ATTEMPTS], 1):
        bars[_label(number, entry)] = entry.seconds
    rows = [row for name, accounts in bars.items() for row in _segments(name, accounts, length)]
    used_accounts = {row["key"] for row in rows}
    used = [(account, colour) for account, colour in COLOURS.items() if account in used_accounts]
    axis = f"wall time ({unit})"
    chart = (
        alt.Chart(alt.Data(values=rows), name="accounts")
        .mark_bar(height=18, stroke=look.palette.card, strokeWidth=1)
        .encode(
            x=alt.X("start:Q", title=axis, axis=alt.Axis(grid=True, tickCount=6)),
            x2="end:Q",
            y=alt.Y("of:N", sort=[*bars], title=None, axis=alt.Axis(grid=False, labelLimit=200)),
            color=alt.Color(
                "account:N",
                scale=alt.Scale(
                    domain=[account.replace("_", " ") for account, _ in used],
                    range=[getattr(look.palette, colour) for _, colour in used],
                ),
                legend=alt.Legend(columns=5),
            ),
            tooltip=[
                alt.Tooltip("of:N"),
                alt.Tooltip("account:N"),
                alt.Tooltip("time:N"),
                alt.Tooltip("share:N", title="of its time"),
            ],
        )
    )
    notes = [f"Goodput {percent(ledger.goodput)}: the productive share of {ledger.wall_text}."]
    if len(ledger.attempts) > MAX_ATTEMPTS:
        notes.append(f"The first {MAX_ATTEMPTS} of {len(ledger.attempts):,} attempts.")
    height = 60 + BAR_HEIGHT * len(bars)
    title = "Where the time went"
    return {"accounts": finish_chart([chart], look, title, notes, height, one_line(ledger.name))}


def _segments(
    name: str, accounts: Mapping[Account, float], length: float
) -> Iterator[dict[str, Any]]:
    start, whole = 0.0, sum(accounts.values())
    for account in COLOURS:
        if (duration := accounts.get(account, 0.0)) > 0:
            yield {
                "of": name,
                "key": account,
                "account": account.replace("_", " "),
                "start": start / length,
                "end": (start + duration) / length,
                "time": seconds(duration),
                "share": percent(duration / whole),
            }
            start += duration


def _label(number: int, entry: AttemptEntry) -> str:
    name = one_line(entry.name)
    short = name if len(name) <= MAX_LABEL_LENGTH else f"{name[: MAX_LABEL_LENGTH - 1]}…"
    return f"{number}. {short}"
