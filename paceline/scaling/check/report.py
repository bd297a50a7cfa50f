"""The report of a check of hosts."""

from __future__ import annotations

from typing import Any

from paceline.core.units import pluralize, si
from paceline.report.document import Column, Document, Notes, Table, Verdict
from paceline.scaling.check.fitness import MEASURES, HostReport
from paceline.scaling.check.preflight import FinishedCheck


def check_document(outcome: FinishedCheck) -> Document:
    """Return the report of a check for every output format."""
    report = outcome.report
    num_suspects = sum(host.verdict == "suspect" for host in report.hosts)
    badge = Verdict("all fit", "good")
    if report.drain_withheld:
        badge = Verdict("most hosts failed", "alert")
    elif report.drain:
        badge = Verdict(f"{len(report.drain)} to drain", "alert")
    elif num_suspects:
        badge = Verdict(f"{num_suspects} suspect", "plain")
    return Document(
        kind=f"check of hosts, {report.created}",
        title=pluralize(len(report.hosts), "host"),
        verdict=badge,
        answer=report.sentences,
        sections=(
            Table(columns=_columns(), rows=[_row(host) for host in report.hosts]),
            Notes(
                title="Evidence",
                lines=[
                    f"{host.host} is {host.verdict}: {line}"
                    for host in report.hosts
                    for line in (*host.evidence, *host.remarks)
                ],
            ),
        ),
        notes=(str(outcome.folder),),
        data={**report.model_dump(mode="json"), "folder": str(outcome.folder)},
    )


def _row(host: HostReport) -> dict[str, Any]:
    rates = {what: figure.value for what, figure in host.figures.items()}
    return {
        "host": host.host,
        "verdict": host.verdict,
        "gpus": len(host.facts.get("gpus") or []) if host.facts else None,
        "cores": host.facts.get("num_cores"),
        **rates,
        "why": "; ".join((*host.evidence, *host.remarks)) or None,
    }


def _columns() -> list[Column]:
    titles = {"gemm": "gemm", "memory": "memory", "collective": "in host", "pair": "pairs"}
    rates = [
        Column(what, titles[what], lambda value, unit=unit: si(value, unit), "right")
        for what, (_, unit) in MEASURES.items()
    ]
    return [
        Column("host", "host"),
        Column("verdict", "verdict"),
        Column("gpus", "GPUs", str, "right"),
        Column("cores", "cores", str, "right"),
        *rates,
        Column("why", "why"),
    ]
