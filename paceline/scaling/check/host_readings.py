"""What the processes of a check wrote, put together host by host."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.hardware import Cluster
from paceline.core.units import counted
from paceline.machines import JobEnd
from paceline.machines.probe import health
from paceline.scaling.check.fitness import Reading


def read_lines(folder: Path, program: str = "check") -> list[dict[str, Any]]:
    """Every whole line that the ranks wrote into the folder that their program names."""
    lines: list[dict[str, Any]] = []
    for path in sorted((folder / program).glob("rank-*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                content = json.loads(line)
            except json.JSONDecodeError:  # the last one of a rank that was killed
                continue
            if isinstance(content, dict) and "event" in content and "node" in content:
                lines.append(content)
    return lines


def host_readings(
    cluster: Cluster, lines: Sequence[Mapping[str, Any]], verdict: JobEnd | None
) -> list[Reading]:
    """What each host of the job told."""
    names = host_names(cluster, lines)
    return [
        _reading(
            name, cluster, node, [line for line in lines if line["node"] == node], names, verdict
        )
        for node, name in enumerate(names)
    ]


def host_names(cluster: Cluster, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The hosts by node; Slurm orders them itself, so there each says its name."""
    names = {line["node"]: str(line["host"]) for line in lines if line["event"] == "facts"}
    if cluster.runs_here:
        return [platform.node()]
    if cluster.capabilities.needs_hosts or (
        cluster.hosts and set(names.values()) - set(cluster.hosts)
    ):
        return list(cluster.hosts)
    silent = [host for host in cluster.hosts if host not in names.values()]
    return [
        names[node] if node in names else silent.pop(0) if silent else f"node {node}"
        for node in range(cluster.nodes)
    ]


def _reading(
    name: str,
    cluster: Cluster,
    node: int,
    lines: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    verdict: JobEnd | None,
) -> Reading:
    """One host: its rates are of its slowest device, its pair's that with the best partner."""
    facts = next((line for line in lines if line["event"] == "facts"), {})
    state = next(
        (line["gpus"] for line in lines if line["event"] == "health"), facts.get("gpus", [])
    )
    faults, remarks = health.faults(facts, state), health.remarks(state)
    ended, started = sum(line["event"] == "end" for line in lines), cluster.devices_per_node
    if ended < started:
        what = f"{started - ended:,} of {counted(started, 'process')}"
        why = f"{what} did not finish the check{f': {verdict.reason}' if verdict else ''}"
        # The end of one host ends what the launcher has on the others: that is no fault of theirs.
        by_another = verdict is not None and verdict.hosts and name not in verdict.hosts
        (remarks if by_another else faults).append(why)
    failed = [line for line in lines if line["event"] == "fault"]
    grave = [line for line in failed if line["part"] in ("gemm", "memory", "rates")]
    faults += dict.fromkeys(f"{line['part']} failed: {line['reason']}" for line in grave)
    remarks += dict.fromkeys(
        f"{_part(line['part'], names)} failed: {line['reason']}"
        for line in failed
        if line not in grave
    )
    kept = {key: value for key, value in facts.items() if key not in ("event", "rank", "schema")}
    return Reading(name, kept, _rates(lines), tuple(faults), tuple(remarks))


def _part(part: str, names: Sequence[str]) -> str:
    before, word, number = part.rpartition("with node ")
    return f"{before}with {names[int(number)]}" if word else part


def _rates(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {}
    for what in ("gemm", "memory"):
        measured = [line for line in lines if line["event"] == "rate" and line["what"] == what]
        if measured:
            rates[what] = list(min(measured, key=lambda line: line["value"])["rates"])
    inside = [line["bus_bytes_per_s"] for line in lines if line["event"] == "collective"]
    rates |= {"collective": [min(inside)]} if inside else {}
    partners: dict[int, float] = {}
    for line in lines:
        if line["event"] == "pair":  # ranks of one node use the network at the same time
            partner = line["partner"]
            partners[partner] = partners.get(partner, 0.0) + line["bus_bytes_per_s"]
    # A good host has slow pairs with slow partners; a slow one has no other.
    return rates | ({"pair": [max(partners.values())]} if partners else {})
