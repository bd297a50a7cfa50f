"""The page of a ledger: what a training's wall time went to, whole and by attempt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import altair as alt

from paceline.core.text import one_line
from paceline.core.units import all_done, counted, days, percent, seconds
from paceline.report.head import Card, PageHead, card, unknown_card
from paceline.report.html import render_page
from paceline.report.step_charts import finish
from paceline.report.theme import ON_PAGE, Look
from paceline.runs.goodput.ledger import Account, AttemptEntry, GoodputLedger

BAR_HEIGHT = 30
MOST_ATTEMPTS = 32
"""Attempts with a bar of their own."""
LONGEST_LABEL = 28
"""Characters of an attempt's name at its bar."""
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
"""The palette's colour of each account, in the order of the bars."""
UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
Table = tuple[str, tuple[str, ...], list[list[str]], str]


def goodput_html(ledger: GoodputLedger) -> str:
    """The page of one ledger, which loads nothing; names of runs and logs are escaped."""
    return render_page(
        "tables.html.j2",
        _head(ledger),
        goodput_charts(ledger, ON_PAGE),
        tables=list(_tables(ledger)),
        notes=[one_line(note) for note in ledger.notes],
    )


def goodput_charts(ledger: GoodputLedger, look: Look) -> dict[str, alt.LayerChart]:
    """A bar of the whole time and one of each attempt, cut into accounts."""
    length, unit = next(each for each in UNITS if ledger.wall_s >= each[0] or each[0] == 1.0)
    bars: dict[str, dict[Account, float]] = {"all": ledger.seconds}
    for number, entry in enumerate(ledger.attempts[:MOST_ATTEMPTS], 1):
        bars[_label(number, entry)] = entry.seconds
    rows = [row for name, accounts in bars.items() for row in _segments(name, accounts, length)]
    drawn = {row["key"] for row in rows}
    used = [(account, colour) for account, colour in COLOURS.items() if account in drawn]
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
                    domain=[_title(account) for account, _ in used],
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
    notes = [f"Goodput {percent(ledger.goodput)}: the productive share of {_wall(ledger)}."]
    if len(ledger.attempts) > MOST_ATTEMPTS:
        notes.append(f"The first {MOST_ATTEMPTS} of {len(ledger.attempts):,} attempts.")
    height = 60 + BAR_HEIGHT * len(bars)
    title = "Where the time went"
    return {"accounts": finish([chart], look, title, notes, height, _name(ledger))}


def _segments(
    name: str, accounts: Mapping[Account, float], length: float
) -> Iterator[dict[str, Any]]:
    start, whole = 0.0, sum(accounts.values())
    for account in COLOURS:
        if (spent := accounts.get(account, 0.0)) > 0:
            yield {
                "of": name,
                "key": account,
                "account": _title(account),
                "start": start / length,
                "end": (start + spent) / length,
                "time": seconds(spent),
                "share": percent(spent / whole),
            }
            start += spent


def _head(ledger: GoodputLedger) -> PageHead:
    redone = sum(entry.redone for entry in ledger.attempts)
    return PageHead(
        eyebrow="where a training's time went",
        name=_name(ledger),
        chip=f"goodput {percent(ledger.goodput)}",
        tone="plain",
        setup=(_attempts(ledger), f"{seconds(ledger.usual_step_s)} a usual step"),
        sentences=(
            f"Of {_wall(ledger)} over {_attempts(ledger)} {percent(ledger.goodput)} were steps "
            f"that count: {ledger.steps_kept:,} are kept, {redone:,} were done again.",
        ),
        cards=tuple(_cards(ledger)),
    )


def _cards(ledger: GoodputLedger) -> Iterator[Card]:
    bound = None if ledger.whole else "an upper bound: time outside steps is not known"
    yield card("Goodput", percent(ledger.goodput), "of the wall time", [bound])
    yield card("Wall time", seconds(ledger.wall_s), _attempts(ledger))
    losses = {account: s for account, s in ledger.seconds.items() if account != "productive"}
    largest = max(losses, key=lambda account: losses[account])
    if losses[largest] > 0:
        share = f"{percent(losses[largest] / ledger.wall_s)} of the wall time"
        yield card("Largest loss", seconds(losses[largest]), share, [_title(largest)])
    else:
        yield unknown_card("Largest loss", "nothing was lost")
    if ledger.days_left is None or ledger.days_left_at_best is None:
        yield unknown_card("To the end", "nobody said how many steps are asked: --steps N")
        return
    if not ledger.days_left:
        yield card("To the end", "0 days", "", [all_done(ledger.steps_asked or 0)])
        return
    best = f"{days(ledger.days_left_at_best)} if nothing were lost"
    end = f"to step {ledger.steps_asked:,}"
    yield card("To the end", days(ledger.days_left), "at this rate", [end, best])


def _tables(ledger: GoodputLedger) -> Iterator[Table]:
    rows = [
        [_title(account), seconds(spent), percent(spent / ledger.wall_s)]
        for account, spent in ledger.seconds.items()
        if spent
    ]
    note = "Every second belongs to one account; they add up to the wall time."
    yield "The ledger", ("account", "time", "share"), rows, note
    heads = ("attempt", "ended", "steps", "kept", "done again", "productive", "all of it")
    yield "Attempts", heads, [_attempt_row(entry) for entry in ledger.attempts], ""


def _attempt_row(entry: AttemptEntry) -> list[str]:
    steps = "-" if entry.first_step is None else f"{entry.first_step:,}-{entry.last_step:,}"
    return [
        one_line(entry.name),
        entry.status or "-",
        steps,
        f"{entry.kept:,}",
        f"{entry.redone:,}",
        seconds(entry.seconds.get("productive", 0.0)),
        seconds(sum(entry.seconds.values())),
    ]


def _name(ledger: GoodputLedger) -> str:
    """The training by its first attempt."""
    more = len(ledger.attempts) - 1
    first = one_line(ledger.attempts[0].name)
    return f"{first} and {more} more" if more else first


def _label(number: int, entry: AttemptEntry) -> str:
    name = one_line(entry.name)
    short = name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 1]}…"
    return f"{number}. {short}"


def _attempts(ledger: GoodputLedger) -> str:
    return counted(len(ledger.attempts), "attempt")


def _wall(ledger: GoodputLedger) -> str:
    return f"{seconds(ledger.wall_s)} of wall time"


def _title(account: str) -> str:
    return account.replace("_", " ")
