"""System of an MLPerf run, from the output of NVIDIA's launch scripts around the result lines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from paceline.core.text import encodable
from paceline.engines.log_reading.log_content import LogContent

MAX_TRIES = 8
LONGEST_LINE = 1 << 14

_LAUNCH, _SYSTEM = b":::DLPAL ", b":::SYSJSON "
_HOSTS = re.compile(r"\S{1,4096} \d{1,19} (\d{1,5}) \S")
"""Pattern of image, job, number of hosts and list of hosts."""
_PLATFORM = re.compile(r"([1-9]\d{0,4})x(?=\D)")
_CONFIGURATION = re.compile(
    r"_(\d{1,5})x(\d{1,3})x\d{1,6}xtp(\d{1,4})pp(\d{1,4})cp(\d{1,4})(?=[_'\"\s]|$)"
)


@dataclass(frozen=True)
class DeviceCount:
    """Number of nodes and devices per node, from the evidence in a run."""

    nodes: int
    per_node: int
    doubt: str | None = None
    """Sentence about contradictory evidence, or None."""

    @property
    def num_devices(self) -> int:
        return self.nodes * self.per_node


class System:
    """Devices and parallel sizes from the output of the launch scripts.

    The launch line has Slurm's number of hosts and the configuration's name (`_18x4x1xtp1pp1cp2`:
    nodes, devices per node, batch, parallel sizes), which is reused on more nodes. The system
    description is detected on one node and may cover only that node.
    """

    def __init__(self) -> None:
        self._hosts: int | None = None
        self._configuration: tuple[int, ...] | None = None
        self._description: dict[str, Any] | None = None

    def read(self, block: bytes) -> None:
        """Read the first line of each kind; shells first echo both lines in quotes."""
        if self._configuration is None and _LAUNCH in block:
            for line in _lines_behind(block, _LAUNCH):
                if self._hosts is None and (launch := _HOSTS.match(line)):
                    self._hosts = int(launch[1]) or None
                if match := _CONFIGURATION.search(line):
                    self._configuration = tuple(int(group) for group in match.groups())
                    break
        if self._description is None and _SYSTEM in block:
            descriptions = (_object(line) for line in _lines_behind(block, _SYSTEM))
            self._description = next((system for system in descriptions if system), None)

    def keep(self, log: LogContent) -> None:
        """Store known values in the log's facts, and a contradiction in its remarks."""
        if self._configuration and 0 not in self._configuration:
            log.facts.update(zip(("tp", "pp", "cp"), self._configuration[2:], strict=True))
        platform = log.facts.get("platform")
        if devices := self.devices(str(platform) if platform else None):
            log.facts["num_devices"] = devices.num_devices
            if devices.doubt:
                log.remark(devices.doubt)
        if self.accelerator:
            log.facts["device"] = self.accelerator

    @property
    def accelerator(self) -> str | None:
        """Accelerator name in the log's system description, or None."""
        name = (self._description or {}).get("accelerator_model_name")
        return name[:100] if isinstance(name, str) and name else None

    def devices(
        self, platform: str | None = None, submitted: Mapping[str, Any] | None = None
    ) -> DeviceCount | None:
        """Return the devices of the run; None if the number per node is unknown.

        `platform` is the system's name in the result lines, `submitted` its description in a
        submission. Nodes come from the host count, else that description, else the larger of the
        log's description and the configuration's name, since each may report too few. Devices per
        node come from that description, else from the configuration's name, which starts the ranks.
        """
        submitted_counts, described_counts = counts_of(submitted), counts_of(self._description)
        configured_counts = (
            self._configuration[:2]
            if self._configuration and 0 not in self._configuration
            else None
        )
        counts = [pair for pair in (submitted_counts, configured_counts, described_counts) if pair]
        if not counts:
            return None
        larger = max(nodes for nodes, _ in counts)
        nodes = self._hosts or (submitted_counts[0] if submitted_counts else larger)
        sources = {
            "hosts in the launch line": str(self._hosts or ""),
            "by the submitted description": _pair(submitted_counts),
            "by the system description": _pair(described_counts),
            "by the configuration's name": _pair(configured_counts),
            "by the platform's name": _nodes_of(platform),
        }
        per_node = counts[0][1]
        agreeing = {"", str(nodes), f"{nodes} x {per_node}", str(nodes * per_node), str(per_node)}
        if set(sources.values()) <= agreeing:
            return DeviceCount(nodes, per_node)
        words = ", ".join(f"{count} {source}" for source, count in sources.items() if count)
        doubt = f"sources for the device count disagree ({words}): {nodes} x {per_node} is used"
        return DeviceCount(nodes, per_node, doubt)


def counts_of(description: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Return (nodes, devices per node) of a system description, or None."""
    system = description or {}
    nodes, per_node = system.get("number_of_nodes"), system.get("accelerators_per_node")
    if not (_counts(nodes) and _counts(per_node)):
        return None
    return int(cast("str", nodes)), int(cast("str", per_node))


def _pair(counts: tuple[int, ...] | None) -> str:
    return f"{counts[0]} x {counts[1]}" if counts else ""


def _nodes_of(platform: str | None) -> str:
    """Return `4` for `4xNVIDIA B200`: nodes, or the devices of one node."""
    match = _PLATFORM.match(platform or "")
    return match[1] if match else ""


def _counts(value: object) -> bool:
    """Return whether `value` is a count in the description's form, a string of digits."""
    return isinstance(value, str) and value.isascii() and value.isdigit() and 0 < int(value) < 10**6


def _lines_behind(block: bytes, token: bytes) -> list[str]:
    """Return the text after the first few tokens, each to the end of its line."""
    parts = block.split(token, MAX_TRIES)[1:]
    lines = (part[:LONGEST_LINE].splitlines() for part in parts)
    return [line[0].decode("utf-8", "replace") if line else "" for line in lines]


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = encodable(json.JSONDecoder().raw_decode(text)[0], text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
