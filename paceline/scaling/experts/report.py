"""Report of an expert measurement: time, bandwidth and throughput by dispatcher and part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from paceline.core.units import percent, pluralize, seconds, si
from paceline.core.value import Value
from paceline.report.document import Column, Document, Notes, Table, Verdict
from paceline.scaling.network.readings import relative_spread

MATRICES = 3
"""GEMMs of a gated MLP: gate, up and down."""
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
TOTAL = "total"
"""Sum of dispatch, experts and combine."""


class ExpertsProblem(Value):
    """Sizes of one measurement; every expert gets equally many rows."""

    tokens: int
    """Tokens per rank."""
    hidden: int
    ffn: int
    experts: int
    top_k: int
    dtype: str

    @property
    def rows(self) -> int:
        """Number of rows that a rank sends and receives, one per token and chosen expert."""
        return self.tokens * self.top_k

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that one rank sends to other ranks in dispatch or in combine."""
        row = self.hidden * ELEMENT_BYTES[self.dtype]
        return self.rows * row * (ranks - 1) / ranks

    @property
    def flops(self) -> float:
        """FLOPs of the expert GEMMs of one rank: 2 x rows x hidden x ffn for each matrix."""
        return 2.0 * MATRICES * self.rows * self.hidden * self.ffn


class ExpertsRow(Value):
    """One part of one dispatcher. The slowest rank decides the time of each repeat."""

    dispatcher: str
    part: str
    time_s: float
    """Median of the repeats."""
    bytes: float | None = None
    """Bytes that one rank sends to other ranks; None for GEMMs."""
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    """FLOP/s of the GEMMs of one rank; None for exchanges."""
    n: int
    spread: float
    """Relative spread of the repeats: 1.4826 x MAD / median."""


class AbsentDispatcher(Value):
    """A dispatcher that was not measured."""

    dispatcher: str
    reason: str


class ExpertsReport(Value):
    """Result of an expert measurement."""

    created: str
    identity: dict[str, Any]
    problem: ExpertsProblem
    ranks: int
    device_name: str
    torch: str
    backend: str
    elapsed_s: float
    rows: tuple[ExpertsRow, ...]
    absent: tuple[AbsentDispatcher, ...]
    wrong: int
    """Elements that came back wrong from experts without effect, over all ranks."""
    faults: tuple[str, ...]


def experts_rows(
    lines: Sequence[Mapping[str, Any]], problem: ExpertsProblem, ranks: int
) -> tuple[ExpertsRow, ...]:
    """Return the rows of every dispatcher that all ranks measured."""
    return tuple(_rows(lines, problem, ranks))


def _rows(
    lines: Sequence[Mapping[str, Any]], problem: ExpertsProblem, ranks: int
) -> Iterator[ExpertsRow]:
    measured = [line for line in lines if line["event"] == "experts"]
    for dispatcher in dict.fromkeys(line["dispatcher"] for line in measured):
        each = [line["times_s"] for line in measured if line["dispatcher"] == dispatcher]
        if len(each) < ranks:
            continue
        parts = {
            part: [max(times) for times in zip(*(line[part] for line in each), strict=False)]
            for part in each[0]
        }
        parts[TOTAL] = [sum(times) for times in zip(*parts.values(), strict=True)]
        for part, times_s in parts.items():
            time_s = median(times_s)
            messages = {"experts": None, TOTAL: 2}.get(part, 1)
            num_bytes = None if messages is None else messages * problem.sent_bytes(ranks)
            exchange = num_bytes if part != TOTAL else None
            flops = problem.flops if part == "experts" else None
            yield ExpertsRow(
                dispatcher=dispatcher,
                part=part,
                time_s=time_s,
                bytes=num_bytes,
                bytes_per_s=None if exchange is None else exchange / time_s,
                flops_per_s=None if flops is None else flops / time_s,
                n=len(times_s),
                spread=relative_spread(times_s),
            )


def absent_dispatchers(lines: Sequence[Mapping[str, Any]]) -> tuple[AbsentDispatcher, ...]:
    """Return every dispatcher that was not measured, once, with the reason."""
    reasons = {line["dispatcher"]: line["reason"] for line in lines if line["event"] == "absent"}
    return tuple(AbsentDispatcher(dispatcher=name, reason=why) for name, why in reasons.items())


def experts_document(report: ExpertsReport, folder: Path) -> Document:
    """Return the report as a document."""
    rows = [row.model_dump(mode="json") for row in report.rows]
    totals = [row for row in rows if row["part"] == TOTAL]
    problem = report.problem
    failed = report.wrong or report.faults
    wrong = (f"{pluralize(report.wrong, 'element')} came back wrong.",) if report.wrong else ()
    return Document(
        kind=f"experts, {report.created}",
        title=f"{pluralize(report.ranks, 'rank')} of {report.device_name}",
        setup=(
            f"{problem.tokens:,} tokens per rank, hidden {problem.hidden:,}, ffn {problem.ffn:,}",
            f"top-{problem.top_k} of {problem.experts} experts, {problem.dtype}, balanced",
            f"{report.backend}, torch {report.torch}",
        ),
        verdict=Verdict("failed" if failed else "measured", "alert" if failed else "good"),
        answer=(*wrong, *_sentences(report)),
        sections=(
            Notes(title="Failed", tone="alert", lines=report.faults),
            Table(columns=_columns(), rows=rows),
            Notes(
                title="Not measured",
                lines=[f"{each.dispatcher}: {each.reason}" for each in report.absent],
            ),
        ),
        notes=(str(folder),),
        data={
            "probe": "experts",
            "device": report.device_name,
            **report.model_dump(mode="json"),
            "best": min(totals, key=lambda row: row["time_s"], default=None),
            "folder": str(folder),
        },
    )


def _sentences(report: ExpertsReport) -> Iterator[str]:
    """Yield the share of the exchange in the time of each dispatcher."""
    for name in dict.fromkeys(row.dispatcher for row in report.rows):
        times = {row.part: row.time_s for row in report.rows if row.dispatcher == name}
        exchange_s = times["dispatch"] + times["combine"]
        share = exchange_s / (exchange_s + times["experts"])
        yield (
            f"{name}: dispatch and combine take {seconds(exchange_s)}, the expert GEMMs "
            f"{seconds(times['experts'])}: {percent(share)} of the time is exchange."
        )


def _columns() -> list[Column]:
    return [
        Column("dispatcher", "dispatcher"),
        Column("part", "part"),
        Column("time_s", "time", seconds, "right"),
        Column("bytes", "sent by a rank", lambda value: si(value, "B"), "right"),
        Column("bytes_per_s", "rate", lambda value: si(value, "B/s"), "right"),
        Column("flops_per_s", "FLOP/s", lambda value: si(value, "FLOP/s"), "right"),
        Column("n", "n", str, "right"),
        Column("spread", "spread", percent, "right"),
    ]
