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
    hosts_to_look_at = [host.host for host in report.hosts if host.verdict == "look"]
    tone = "alert" if report.drain else "plain" if hosts_to_look_at else "good"
    words = (
        f"{len(report.drain)} to drain" if report.drain else f"{len(hosts_to_look_at)} to look at"
    )
    return Document(
        kind=f"check of hosts, {report.created}",
        title=pluralize(len(report.hosts), "host"),
        verdict=Verdict(words if report.drain or hosts_to_look_at else "all fit", tone),
        answer=report.sentences,
        sections=(
            Table(columns=_columns(), rows=[_row(host) for host in report.hosts]),
            Notes(
                title="Evidence",
                lines=[
                    *(f"drain {h.host}: {line}" for h in report.hosts for line in h.evidence),
                    *(f"look at {h.host}: {line}" for h in report.hosts for line in h.remarks),
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
