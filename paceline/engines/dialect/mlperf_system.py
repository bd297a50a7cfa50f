"""The machine of an MLPerf run, from what NVIDIA's launch scripts print around the result lines."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from paceline.engines.dialect.log_content import LogContent

MOST_TRIES = 8
LONGEST_LINE = 1 << 14

_LAUNCH, _SYSTEM = b":::DLPAL ", b":::SYSJSON "
_CONFIGURATION = re.compile(
    r"_(\d{1,5})x(\d{1,3})x\d{1,6}xtp(\d{1,4})pp(\d{1,4})cp(\d{1,4})(?=[_'\"\s]|$)"
)


class System:
    """Devices and parallel sizes.

    The configuration's name (`_18x4x1xtp1pp1cp2`: nodes, devices a node, batch, parallel sizes) is
    what was launched; the system description is detected on one node and may know neither.
    """

    def __init__(self) -> None:
        self._launched: tuple[int, ...] | None = None
        self._described: dict[str, Any] | None = None

    def read(self, block: bytes) -> None:
        """Take the first of each; shells echo both lines, quoted, before they print them."""
        if self._launched is None and _LAUNCH in block:
            for line in _lines_behind(block, _LAUNCH):
                if match := _CONFIGURATION.search(line):
                    self._launched = tuple(int(group) for group in match.groups())
                    break
        if self._described is None and _SYSTEM in block:
            described = (_object(line) for line in _lines_behind(block, _SYSTEM))
            self._described = next((system for system in described if system), None)

    def keep(self, log: LogContent) -> None:
        """Put what is known into the log's facts, and a contradiction into its remarks."""
        detected = self._detected()
        if self._launched:
            nodes, per_node, *axes = self._launched
            if 0 not in self._launched:
                log.facts["num_devices"] = nodes * per_node
                log.facts.update(zip(("tp", "pp", "cp"), axes, strict=True))
            if detected and detected != (nodes, per_node):
                log.remark(
                    f"the launched configuration has {nodes} x {per_node} devices, the system "
                    f"description {detected[0]} x {detected[1]}: the former is used"
                )
        elif detected:
            log.facts["num_devices"] = detected[0] * detected[1]
        name = (self._described or {}).get("accelerator_model_name")
        if isinstance(name, str) and name:
            log.facts["device"] = name[:100]

    def _detected(self) -> tuple[int, int] | None:
        """(nodes, devices a node) of the system description."""
        system = self._described or {}
        nodes, per_node = system.get("number_of_nodes"), system.get("accelerators_per_node")
        if not (_counts(nodes) and _counts(per_node)):
            return None
        return int(cast("str", nodes)), int(cast("str", per_node))


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
