"""An outlook in lines and table rows, for terminal and page alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from paceline.core.units import count, day_count, si
from paceline.estimate.costs import Bill
from paceline.estimate.outlook import Outlook, Span

OUTLOOK_HEADS = ("figure", "expected", "80 %")
REACH_HEADS = ("exchange", "ranks", "crosses", "reached by a rank")
NO_LENGTH = "not known: how long the training is; --tokens says it"
TO_TARGET = "it trains to a target: --mlperf ROUND says how long, --tokens states another length"
PERIOD_HEADS = ("from", "terms", "device hour", "days", "money")


def outlook_lines(outlook: Outlook, bill: Bill | None, without: Iterable[str]) -> Iterator[str]:
    """All of it, a line a subject, `without` for a bill; what is not known last."""
    rows = outlook_rows(outlook)
    if rows and bill:
        shown = ", ".join(f"{name} {value} ({ends})" for name, value, ends in rows)
        yield f"{count(bill.total_tokens)} tokens on {outlook.cluster}: {shown}; in brackets 80 %"
    if outlook.cluster_mtbf_h and outlook.checkpoint_every_s and outlook.young_interval_s:
        own = outlook.checkpoint_every_s != outlook.young_interval_s
        beside = f" (Young's interval: {outlook.young_interval_s:,.0f} s)" if own else " (Young's)"
        yield (
            f"a node fails every {outlook.cluster_mtbf_h:,.3g} h, {outlook.spare_nodes} spare; "
            f"a checkpoint every {outlook.checkpoint_every_s:,.0f} s of training{beside}"
        )
    for row in period_rows(outlook) if len(outlook.periods) > 1 else ():
        yield f"{row[0]}: {row[1]} at {row[2]} a device hour, {row[3]} days, {row[4]}"
    spans = [
        f"{name} {ranks} in {level}, {rate}" for name, ranks, level, rate in reach_rows(outlook)
    ]
    if spans:
        yield f"exchanges: {'; '.join(spans)}"
    if bill is None:
        yield from without
    yield from (f"not known: {words}" for words in outlook.unknown)


def outlook_rows(outlook: Outlook) -> list[tuple[str, str, str]]:
    """(figure, expected, ends of 80 %) of what is known."""
    unit = f" {outlook.currency}" if outlook.currency else ""
    whole = "{:,.0f}".format
    figures: tuple[tuple[str, Span | None, Callable[[float], str], float, str], ...] = (
        ("days", outlook.days, day_count, 1, ""),
        ("goodput", outlook.goodput, "{:.1f}".format, 100, " %"),
        ("failures", outlook.failures, whole, 1, ""),
        ("money", outlook.money, whole, 1, unit),
        ("energy", outlook.energy_kwh, whole, 1, " kWh"),
        ("CO2", outlook.carbon_kg, whole, 1, " kg"),
    )
    return [
        (
            name,
            f"{written(span.value * scale)}{unit}",
            f"{written(span.low * scale)} to {written(span.high * scale)}",
        )
        for name, span, written, scale, unit in figures
        if span is not None
    ]


def reach_rows(outlook: Outlook) -> list[tuple[str, str, str, str]]:
    """Under REACH_HEADS."""
    return [
        (each.exchange, f"{each.ranks:,}", each.level, si(each.bytes_per_s, "B/s"))
        for each in outlook.reaches
    ]


def period_rows(outlook: Outlook) -> list[tuple[str, ...]]:
    """Under PERIOD_HEADS."""
    unit = f" {outlook.currency}" if outlook.currency else ""
    return [
        (
            str(each.since or "the start"),
            each.terms,
            f"{each.per_device_hour:g}{unit}",
            day_count(each.days),
            f"{each.money:,.0f}{unit}",
        )
        for each in outlook.periods
    ]
