"""Report of a ledger: the wall time of a training by account, in total and by attempt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paceline.core.units import all_steps_done, days, percent, pluralize, seconds
from paceline.report.document import Column, Document, Figure, Table, Verdict, unknown_figure
from paceline.runs.goodput.ledger import ACCOUNTS, AttemptEntry, GoodputLedger

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import ChartTheme

LEDGER = (
    Column("account", "account", lambda name: str(name).replace("_", " ")),
    Column("seconds", "time", seconds, "right"),
    Column("share", "share", percent, "right"),
)
ATTEMPTS = (
    Column("name", "attempt"),
    Column("status", "ended"),
    Column("steps", "steps"),
    Column("steps_kept", "kept", lambda value: f"{value:,}", "right"),
    Column("steps_repeated", "repeated", lambda value: f"{value:,}", "right"),
    Column("productive", "productive", seconds, "right"),
    Column("whole", "all of it", seconds, "right"),
)


def goodput_document(ledger: GoodputLedger) -> Document:
    """Return goodput, the largest loss, the time to the end, and the ledger by attempt."""
    num_repeated = sum(entry.steps_repeated for entry in ledger.attempts)
    attempts = pluralize(len(ledger.attempts), "attempt")
    rows = [
        {
            "account": account,
            "seconds": ledger.seconds[account],
            "share": ledger.seconds[account] / ledger.wall_s,
        }
        for account in ACCOUNTS
    ]
    return Document(
        kind="where a training's time went",
        title=ledger.name,
        headline=f"Goodput {percent(ledger.goodput)} over {attempts}",
        source=ledger.name,
        verdict=Verdict(f"goodput {percent(ledger.goodput)}"),
        setup=(attempts, f"{seconds(ledger.usual_step_s)} a usual step (n = {ledger.n})"),
        answer=(
            f"Of {ledger.wall_text} over {attempts} {percent(ledger.goodput)} were steps that "
            f"count: {ledger.steps_kept:,} are kept, {num_repeated:,} were repeated.",
        ),
        figures=tuple(_figures(ledger, attempts)),
        sections=(
            Table(
                title="The ledger",
                columns=LEDGER,
                rows=[row for row in rows if row["seconds"]],
                note="Every second belongs to one account; they add up to the wall time.",
            ),
            Table(title="Attempts", columns=ATTEMPTS, rows=list(map(_attempt, ledger.attempts))),
        ),
        notes=ledger.notes,
        charts=lambda theme: _charts(ledger, theme),
        data=ledger,
        csv=Table(columns=LEDGER, rows=rows),
    )


def _charts(ledger: GoodputLedger, theme: ChartTheme) -> Mapping[str, LayerChart]:
    from paceline.runs.goodput.charts import goodput_charts  # Importing Altair is slow.

    return goodput_charts(ledger, theme)


def _figures(ledger: GoodputLedger, attempts: str) -> Iterator[Figure]:
    bound = () if ledger.whole else ("an upper bound: time outside steps is not known",)
    yield Figure("Goodput", percent(ledger.goodput), "of the wall time", bound)
    yield Figure("Wall time", seconds(ledger.wall_s), attempts)
    losses = {account: s for account, s in ledger.seconds.items() if account != "productive"}
    largest = max(losses, key=lambda account: losses[account])
    if losses[largest] > 0:
        share = f"{percent(losses[largest] / ledger.wall_s)} of the wall time"
        name = largest.replace("_", " ")
        yield Figure("Largest loss", seconds(losses[largest]), share, (name,))
    else:
        yield unknown_figure("Largest loss", "nothing was lost")
    if ledger.days_left is None or ledger.days_left_at_best is None:
        yield unknown_figure("To the end", "the number of steps is not known: --steps N")
    elif not ledger.days_left:
        yield Figure("To the end", "0 days", "", (all_steps_done(ledger.steps_requested or 0),))
    else:
        best = f"{days(ledger.days_left_at_best)} if nothing were lost"
        end = f"to step {ledger.steps_requested:,}"
        yield Figure("To the end", days(ledger.days_left), "at this rate", (end, best))


def _attempt(entry: AttemptEntry) -> dict[str, Any]:
    first, last = entry.first_step, entry.last_step
    return {
        **entry.model_dump(),
        "steps": None if first is None else f"{first:,}-{last:,}",
        "productive": entry.seconds.get("productive", 0.0),
        "whole": sum(entry.seconds.values()),
    }
