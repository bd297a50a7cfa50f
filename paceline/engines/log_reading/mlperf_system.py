"""The machine of an MLPerf run, from what NVIDIA's launch scripts print around the result lines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from paceline.engines.log_reading.log_content import LogContent

MOST_TRIES = 8
LONGEST_LINE = 1 << 14

_LAUNCH, _SYSTEM = b":::DLPAL ", b":::SYSJSON "
_HOSTS = re.compile(r"\S{1,4096} \d{1,19} (\d{1,5}) \S")
"""Image, job, number of hosts, their list."""
_PLATFORM = re.compile(r"([1-9]\d{0,4})x(?=\D)")
_CONFIGURATION = re.compile(
    r"_(\d{1,5})x(\d{1,3})x\d{1,6}xtp(\d{1,4})pp(\d{1,4})cp(\d{1,4})(?=[_'\"\s]|$)"
)


@dataclass(frozen=True)
class DeviceCount:
    """Nodes and devices a node, as the witnesses of a run are weighed."""

    nodes: int
    per_node: int
    doubt: str | None = None
    """Who says otherwise, in one sentence."""

    @property
    def num_devices(self) -> int:
        return self.nodes * self.per_node


class System:
    """Devices and parallel sizes, by what the launch scripts print.

    The launch line has the number of hosts that Slurm gave, and the configuration's name
    (`_18x4x1xtp1pp1cp2`: nodes, devices a node, batch, parallel sizes), which is reused on more
    nodes. The system description is detected on one node and may know no other.
    """

    def __init__(self) -> None:
        self._hosts: int | None = None
        self._launched: tuple[int, ...] | None = None
        self._described: dict[str, Any] | None = None

    def read(self, block: bytes) -> None:
        """Take the first of each; shells echo both lines, quoted, before they print them."""
        if self._launched is None and _LAUNCH in block:
            for line in _lines_behind(block, _LAUNCH):
                if self._hosts is None and (launch := _HOSTS.match(line)):
                    self._hosts = int(launch[1]) or None
                if match := _CONFIGURATION.search(line):
                    self._launched = tuple(int(group) for group in match.groups())
                    break
        if self._described is None and _SYSTEM in block:
            described = (_object(line) for line in _lines_behind(block, _SYSTEM))
            self._described = next((system for system in described if system), None)

    def keep(self, log: LogContent) -> None:
        """Put what is known into the log's facts, and a contradiction into its remarks."""
        if self._launched and 0 not in self._launched:
            log.facts.update(zip(("tp", "pp", "cp"), self._launched[2:], strict=True))
        platform = log.facts.get("platform")
        if devices := self.devices(str(platform) if platform else None):
            log.facts["num_devices"] = devices.num_devices
            if devices.doubt:
                log.remark(devices.doubt)
        if self.accelerator:
            log.facts["device"] = self.accelerator

    @property
    def accelerator(self) -> str | None:
        """The accelerator's name by the log's own description, None where there is none."""
        name = (self._described or {}).get("accelerator_model_name")
        return name[:100] if isinstance(name, str) and name else None

    def devices(
        self, platform: str | None = None, submitted: Mapping[str, Any] | None = None
    ) -> DeviceCount | None:
        """The devices of the run; None where nobody says how many a node has.

        `platform` is the system's name by the result lines, `submitted` its description in a
        submission. Nodes: the hosts, else that description, else the larger of what the log's own
        description and the configuration's name say, as each of them errs by too few. Devices a
        node: that description, else the name, by which the ranks are started.
        """
        written, detected = counts_of(submitted), counts_of(self._described)
        launched = self._launched[:2] if self._launched and 0 not in self._launched else None
        counts = [pair for pair in (written, launched, detected) if pair]
        if not counts:
            return None
        larger = max(nodes for nodes, _ in counts)
        nodes = self._hosts or (written[0] if written else larger)
        told = {
            "hosts in the launch line": str(self._hosts or ""),
            "by the submitted description": _pair(written),
            "by the system description": _pair(detected),
            "by the configuration's name": _pair(launched),
            "by the platform's name": _nodes_of(platform),
        }
        per_node = counts[0][1]
        agreeing = {"", str(nodes), f"{nodes} x {per_node}", str(nodes * per_node), str(per_node)}
        if set(told.values()) <= agreeing:
            return DeviceCount(nodes, per_node)
        words = ", ".join(f"{count} {source}" for source, count in told.items() if count)
        doubt = f"the witnesses of the devices disagree ({words}): {nodes} x {per_node} is used"
        return DeviceCount(nodes, per_node, doubt)


def counts_of(description: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """(nodes, devices a node) of a system description, None where it lacks either."""
    system = description or {}
    nodes, per_node = system.get("number_of_nodes"), system.get("accelerators_per_node")
    if not (_counts(nodes) and _counts(per_node)):
        return None
    return int(cast("str", nodes)), int(cast("str", per_node))


def _pair(counts: tuple[int, ...] | None) -> str:
    return f"{counts[0]} x {counts[1]}" if counts else ""


def _nodes_of(platform: str | None) -> str:
    """`4` of `4xNVIDIA B200`: nodes, or the devices of one node."""
    match = _PLATFORM.match(platform or "")
    return match[1] if match else ""


def _counts(value: object) -> bool:
    """Whether `value` is a count as the description writes them, a text of digits."""
    return isinstance(value, str) and value.isascii() and value.isdigit() and 0 < int(value) < 10**6


def _lines_behind(block: bytes, token: bytes) -> list[str]:
    """What stands behind the first few tokens, each to the end of its line."""
    parts = block.split(token, MOST_TRIES)[1:]
    lines = (part[:LONGEST_LINE].splitlines() for part in parts)
    return [line[0].decode("utf-8", "replace") if line else "" for line in lines]


def _object(text: str) -> dict[str, Any] | None:
    try:
        decoded = json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", decoded) if isinstance(decoded, dict) else None
