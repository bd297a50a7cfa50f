"""What programs wait for in the operating system's libraries, where no device has worked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.profiles.nsys.tables import STRINGS, SYSTEM_CALLS, ReportTables
from paceline.profiles.profile import Hot

MOST = 30
LABEL = "system call"


@dataclass(frozen=True)
class SystemCalls:
    """Of one rank, all threads together."""

    span_s: float = 0.0
    """From the first call to the end of the last one."""
    seconds: Counter[str] = field(default_factory=Counter[str])
    calls: Counter[str] = field(default_factory=Counter[str])


def system_calls(tables: ReportTables) -> SystemCalls:
    """Calls by name; empty where they were not recorded."""
    present = tables.columns(SYSTEM_CALLS)
    if not {"start", "end", "nameId"} <= present:
        return SystemCalls()
    # What is nested is in the outer call's time, and the profiler's own marks take none.
    level = "AND IFNULL(o.nestingLevel, 0) = 0" if "nestingLevel" in present else ""
    rows = tables.values(
        f"SELECT s.value, COUNT(*), SUM(o.end - o.start) FROM {SYSTEM_CALLS} o "
        f"JOIN {STRINGS} s ON s.id = o.nameId WHERE o.end > o.start {level} GROUP BY o.nameId"
    )
    ((span,),) = tables.values(f"SELECT IFNULL(MAX(end) - MIN(start), 0) FROM {SYSTEM_CALLS}")
    total = SystemCalls(span_s=span * 1e-9)
    for name, calls, ns in rows:
        total.seconds[str(name)] += ns * 1e-9
        total.calls[str(name)] += calls
    return total


def longest(ranks: Sequence[SystemCalls]) -> tuple[Hot, ...]:
    """The longest calls, the mean of the ranks; shares are of a rank's whole capture."""
    seconds, calls = Counter[str](), Counter[str]()
    for rank in ranks:
        seconds.update(rank.seconds)
        calls.update(rank.calls)
    n, span_s = max(len(ranks), 1), sum(rank.span_s for rank in ranks)
    return tuple(
        Hot(
            name=name,
            label=LABEL,
            n=round(calls[name] / n),
            seconds=total / n,
            share=total / span_s if span_s else 0.0,
        )
        for name, total in seconds.most_common(MOST)
    )
