"""Fitness of hosts: rates compared with other hosts or earlier checks, and system facts."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.core.hardware import Cluster
from paceline.core.hosts import compress
from paceline.core.node_groups import GroupThroughput
from paceline.core.units import percent, pluralize, si
from paceline.core.value import Value
from paceline.files.documents import parse_json, read_text
from paceline.machines import JobEnd
from paceline.machines.probe import health
from paceline.scaling.analysis.node_speeds import NodeSpeeds, node_speeds
from paceline.scaling.analysis.slow_nodes import (
    MIN_COMPARED_NODES,
    MIN_HISTORY,
    MIN_LOSS,
    HealthySpeed,
    NodeVerdict,
    SlowNodeReport,
    judge_nodes,
)

MEASURES = {
    "gemm": ("GEMMs", "FLOP/s"),
    "memory": ("memory copies", "B/s"),
    "collective": ("all-reduce within the host", "B/s"),
    "pair": ("all-reduce with another host", "B/s"),
}
"""Titles and units of the measures of each host. A rate is that of the slowest device (gemm,
memory), the bus rate (collective), or the bus rate with the best partner (pair)."""
COMMON_FACTS = (
    "kernel",
    "python",
    "torch",
    "nccl",
    "cpu",
    "num_cores",
    "governor",
    "driver",
    "gpu",
)
"""Settings that healthy hosts of one cluster have in common."""
Verdict = Literal["fit", "suspect", "slow", "broken", "not reached"]
"""State of a host. `slow` is proven by a repeat or a second measure, `broken` by a fault."""
USABLE: tuple[Verdict, ...] = ("fit", "suspect")
"""States of hosts that a job may use."""


class HostRate(Value):
    """One rate of one host; higher is better."""

    value: float
    unit: str
    n: int
    """Number of blocks or repeats behind the value."""
    z: float | None
    """Z-score in robust standard deviations from the reference value; None without a reference."""
    loss: float
    """1 - value / reference value."""
    by: str
    flagged: bool


class HostReport(Value):
    """Report on one host."""

    host: str
    verdict: Verdict
    evidence: tuple[str, ...] = ()
    """Reasons why the host is slow, broken or not reached."""
    remarks: tuple[str, ...] = ()
    """Observations to investigate that prove nothing yet."""
    figures: dict[str, HostRate] = {}
    facts: dict[str, Any] = {}


class Measure(Value):
    """One rate over all hosts."""

    what: str
    unit: str
    num_hosts: int
    median: float
    spread: float
    """1.4826 x MAD / median of the hosts."""
    smallest_fault: float | None
    """Loss of a host that is found in 9 of 10 cases; None when no host could be judged."""


class CheckReport(Value):
    """The check of some hosts at one time."""

    schema_version: int = 1
    created: str
    identity: dict[str, Any]
    """Properties that must be equal to compare figures of two checks."""
    elapsed_s: float
    hosts: tuple[HostReport, ...]
    measures: dict[str, Measure]
    drain: tuple[str, ...]
    """Hosts to drain: slow, broken or not reached, unless most hosts are."""
    drain_withheld: str | None = None
    """Reason why no host is to be drained although some failed; the check itself is in doubt."""
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """Data that one host reported, before any verdict."""

    host: str
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    """Values of each measure; several values of one host are repeats."""
    faults: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    reached: bool = True
    """False if the host did not answer."""
    timed_out: bool = False
    """True if the time limit of the check ended it."""


@dataclass(frozen=True)
class Past:
    """Earlier values and references that the figures are compared with."""

    earlier: Mapping[str, Mapping[str, Sequence[float]]] = field(
        default_factory=dict[str, Mapping[str, Sequence[float]]]
    )
    """Earlier values by measure and host."""
    references: Mapping[str, HealthySpeed] = field(default_factory=dict[str, HealthySpeed])


def judge(
    readings: Sequence[Reading],
    past: Past,
    identity: dict[str, Any],
    created: str,
    elapsed_s: float,
) -> CheckReport:
    """Return every host with its verdict, and the smallest fault that the check could find."""
    speeds = {what: nodes for what in MEASURES if (nodes := _speeds(readings, what))}
    verdicts = {
        what: judge_nodes(nodes, 0.0, past.references.get(what), past.earlier.get(what))
        for what, nodes in speeds.items()
    }
    deviations, missing_gpus = _deviations(readings), _missing_gpus(readings)
    hosts = tuple(
        _report(
            reading, verdicts, deviations.get(reading.host, []), missing_gpus.get(reading.host, [])
        )
        for reading in readings
    )
    measures = {
        what: Measure(
            what=what,
            unit=MEASURES[what][1],
            num_hosts=len(nodes.hosts),
            median=nodes.base,
            spread=nodes.spread,
            smallest_fault=verdicts[what].smallest_fault,
        )
        for what, nodes in speeds.items()
    }
    drain = tuple(report.host for report in hosts if report.verdict not in USABLE)
    withheld = _drain_withheld(readings, hosts)
    sentences = (
        _count(hosts, elapsed_s),
        *([f"No host is listed to drain: {withheld}."] if withheld else []),
        *(_power(measure, verdicts[what]) for what, measure in measures.items()),
    )
    return CheckReport(
        created=created,
        identity=identity,
        elapsed_s=elapsed_s,
        hosts=hosts,
        measures=measures,
        drain=() if withheld else drain,
        drain_withheld=withheld,
        sentences=sentences,
    )


def _speeds(readings: Sequence[Reading], what: str) -> NodeSpeeds | None:
    return node_speeds(
        [
            GroupThroughput((reading.host,), value)
            for reading in readings
            for value in reading.rates.get(what, ())
        ]
    )


def _report(
    reading: Reading,
    verdicts: Mapping[str, SlowNodeReport],
    deviations: Sequence[str],
    missing_gpus: Sequence[str],
) -> HostReport:
    figures: dict[str, HostRate] = {}
    slow: list[tuple[str, NodeVerdict]] = []
    for what, report in verdicts.items():
        node = next((node for node in report.nodes if node.host == reading.host), None)
        if node is None:
            continue
        figures[what] = HostRate(
            value=node.value,
            unit=MEASURES[what][1],
            n=node.repeats,
            z=node.z,
            loss=node.loss,
            by=node.by,
            flagged=node.flagged,
        )
        if node.flagged or (node.suspected and node.z is None):
            slow.append((_slow(what, node), node))
    # One value is not enough to drain a host: it needs a repeat, or a second measure that is slow.
    is_certain = len(slow) > 1 or any(node.repeated for _, node in slow)
    words = [text if is_certain else f"{text}: repeat before draining" for text, _ in slow]
    evidence = (*reading.faults, *missing_gpus, *(words if is_certain else ()))
    remarks = (*reading.remarks, *deviations, *(() if is_certain else words))
    is_broken = bool(reading.faults or missing_gpus)
    return HostReport(
        host=reading.host,
        verdict=_verdict(reading, broken=is_broken, slow=is_certain, remarks=remarks),
        evidence=evidence,
        remarks=remarks,
        figures=figures,
        facts=dict(reading.facts),
    )


def _verdict(reading: Reading, *, broken: bool, slow: bool, remarks: Sequence[str]) -> Verdict:
    if not reading.reached:
        return "not reached"
    if broken:
        return "broken"
    return "slow" if slow else "suspect" if remarks else "fit"


def _drain_withheld(readings: Sequence[Reading], hosts: Sequence[HostReport]) -> str | None:
    """Return why the failures are more likely the fault of the check than of the hosts, or None.

    That is so if more than half of several hosts fail, or if a single host did not answer or did
    not finish in time.
    """
    failed = [report for report in hosts if report.verdict not in USABLE]
    alone = len(hosts) == 1 and (not readings[0].reached or readings[0].timed_out)
    if not failed or not (alone or (len(hosts) > 1 and 2 * len(failed) > len(hosts))):
        return None
    if all(reading.timed_out for reading in readings):
        return "the check did not finish in time; raise --time-limit"
    verdicts = Counter(report.verdict for report in failed)
    # Numbers differ between hosts that fail for the same reason.
    causes = [re.sub(r"\d[\d.,]*", "N", report.evidence[0]) for report in failed]
    cause, number = Counter(causes).most_common(1)[0]
    example = failed[causes.index(cause)].evidence[0]
    counts = " and ".join(f"{n} {verdict}" for verdict, n in verdicts.items())
    return (
        f"{counts} of {pluralize(len(hosts), 'host')}, {number} of them alike ({example}), so this "
        "machine, its network or name resolution is the more likely cause; check it first"
    )


def _slow(what: str, node: NodeVerdict) -> str:
    title, unit = MEASURES[what]
    z = "by the margin alone: low confidence" if node.z is None else f"z = {node.z:.1f}"
    return f"{title} at {si(node.value, unit)}: {percent(node.loss)} below {node.by} ({z})"


def _deviations(readings: Sequence[Reading]) -> dict[str, list[str]]:
    """Return, by host, the facts that differ from most other hosts, or from the only other host."""
    with_facts = [reading for reading in readings if reading.facts]
    deviations: dict[str, list[str]] = {}
    for name in (*COMMON_FACTS, "memory"):
        values = {reading.host: _fact(reading.facts, name) for reading in with_facts}
        counts = Counter(values.values())
        if len(counts) < 2:
            continue
        typical, number = counts.most_common(1)[0]
        has_majority = 2 * number > len(values)
        for host, value in values.items():
            if not has_majority or value != typical:
                others = (
                    f"{typical} on {number:,} of {pluralize(len(values), 'host')}"
                    if has_majority
                    else "others differ"
                )
                deviations.setdefault(host, []).append(f"{name} {value} here, {others}")
    return deviations


def _missing_gpus(readings: Sequence[Reading]) -> dict[str, list[str]]:
    """Return, by host, a sentence for a host with fewer GPUs than most others."""
    numbers = {
        reading.host: len(reading.facts.get("gpus") or []) for reading in readings if reading.facts
    }
    if not numbers:
        return {}
    typical, times = Counter(numbers.values()).most_common(1)[0]
    if 2 * times <= len(numbers):
        return {}
    usual_count = f"{typical} on {times:,} of {pluralize(len(numbers), 'host')}"
    return {
        host: [f"{pluralize(n, 'GPU')} here, {usual_count}"]
        for host, n in numbers.items()
        if n < typical
    }


def _fact(facts: Mapping[str, Any], name: str) -> str:
    gpus: Sequence[Mapping[str, Any]] = facts.get("gpus") or []
    if name == "memory":
        size = facts.get("memory_bytes")
        return "unknown" if size is None else si(size, "B", digits=2)
    if name in ("gpu", "driver"):
        key = "name" if name == "gpu" else "driver"
        return ", ".join(sorted({str(gpu.get(key)) for gpu in gpus})) or "none"
    return str(facts.get(name) if facts.get(name) is not None else "unknown")


def _count(hosts: Sequence[HostReport], elapsed_s: float) -> str:
    by_verdict = {
        verdict: [report.host for report in hosts if report.verdict == verdict]
        for verdict in get_args(Verdict)
    }
    parts = [f"{len(by_verdict.pop('fit'))} fit"]
    parts += [f"{len(v)} {verdict} ({compress(v)})" for verdict, v in by_verdict.items() if v]
    noun = "host" if len(hosts) == 1 else "hosts"
    return f"{len(hosts)} {noun} checked in {elapsed_s:.1f} s: {', '.join(parts)}."


def _power(measure: Measure, verdicts: SlowNodeReport) -> str:
    title, unit = MEASURES[measure.what]
    noun = "host" if measure.num_hosts == 1 else "hosts"
    figures = f"{title}: median {si(measure.median, unit)} of {measure.num_hosts} {noun}"
    if measure.num_hosts > 1:
        figures += f", spread {percent(measure.spread)}"
    if measure.smallest_fault is None and any(node.by != "nothing" for node in verdicts.nodes):
        return (
            f"{figures}; judged by the margin of {percent(MIN_LOSS, 0)} alone because no spread is "
            "known, so the smallest detectable fault is unknown."
        )
    if measure.smallest_fault is None:
        return (
            f"{figures}; too few to judge: it takes {MIN_COMPARED_NODES} hosts, {MIN_HISTORY} "
            "earlier checks of a host, or a reference check (--against)."
        )
    by = " and ".join(dict.fromkeys(node.by for node in verdicts.nodes if node.z is not None))
    return (
        f"{figures}; judged by {by}, a host {percent(measure.smallest_fault)} slower is detected "
        "in 9 of 10 cases."
    )


def read_lines(folder: Path, program: str = "check") -> list[dict[str, Any]]:
    """Return every complete line that the ranks wrote into the folder of their program."""
    lines: list[dict[str, Any]] = []
    for path in sorted((folder / program).glob("rank-*.jsonl")):
        for line in read_text(path, errors="replace").splitlines():
            try:
                content = parse_json(line, nan=True)
            except ValueError:  # the last line of a killed rank may be incomplete
                continue
            if isinstance(content, dict) and "event" in content and "node" in content:
                lines.append(content)
    return lines


def host_readings(
    cluster: Cluster, lines: Sequence[Mapping[str, Any]], verdict: JobEnd | None
) -> list[Reading]:
    """Return the readings of each host of the job."""
    names = host_names(cluster, lines)
    return [
        _reading(
            name, cluster, node, [line for line in lines if line["node"] == node], names, verdict
        )
        for node, name in enumerate(names)
    ]


def host_names(cluster: Cluster, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the hosts by node. Slurm orders them itself, so there each reports its name."""
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
    """Return one host's reading: the rates of its slowest device, and the best pair rate."""
    facts = next((line for line in lines if line["event"] == "facts"), {})
    state = next(
        (line["gpus"] for line in lines if line["event"] == "health"), facts.get("gpus", [])
    )
    faults, remarks = health.faults(facts, state), health.remarks(state)
    num_ended, num_started = sum(line["event"] == "end" for line in lines), cluster.devices_per_node
    if num_ended < num_started:
        what = f"{num_started - num_ended:,} of {pluralize(num_started, 'process')}"
        why = f"{what} did not finish the check{f': {verdict.reason}' if verdict else ''}"
        # The end of one host makes the launcher end the others, which is not their fault.
        by_another = verdict is not None and verdict.hosts and name not in verdict.hosts
        (remarks if by_another else faults).append(why)
    failed = [line for line in lines if line["event"] == "fault"]
    fatal = [line for line in failed if line["part"] in ("gemm", "memory", "rates")]
    faults += dict.fromkeys(f"{line['part']} failed: {line['reason']}" for line in fatal)
    remarks += dict.fromkeys(
        f"{_part(line['part'], names)} failed: {line['reason']}"
        for line in failed
        if line not in fatal
    )
    host_facts = {
        key: value for key, value in facts.items() if key not in ("event", "rank", "schema")
    }
    timed_out = verdict is not None and verdict.status == "timeout" and num_ended < num_started
    rates = _rates(lines)
    return Reading(name, host_facts, rates, tuple(faults), tuple(remarks), timed_out=timed_out)


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
        # The ranks of one node use the network at the same time, so their rates add up.
        if line["event"] == "pair":
            partner = line["partner"]
            partners[partner] = partners.get(partner, 0.0) + line["bus_bytes_per_s"]
    # A good host is slow with slow partners only; a slow host is slow with all.
    return rates | ({"pair": [max(partners.values())]} if partners else {})
