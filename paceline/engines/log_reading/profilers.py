"""Detection of profilers in a log: a profiled run is not a measure of speed.

Sources of the lines: the commands of Nsight Systems, NVIDIA's dgxc-benchmarking (`ENABLE_PROFILE`,
`ENABLE_NCCL_TRACE`), NCCL's collective trace, PyTorch's Kineto, torchtitan, Megatron-LM's and
MaxText's settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from paceline.engines.log_reading.log_content import LogContent, excerpt

MAX_BYTES = 64 << 20
"""Number of searched bytes: a profiler starts early, unless the log is that of a long run."""

_ON = rb"[=: \"']{1,3}(?:[Tt]rue|TRUE|1)\b"
TRACES: tuple[tuple[str, bytes, re.Pattern[bytes]], ...] = (
    (
        "Nsight Systems",
        b"nsys",
        re.compile(
            rb"\bnsys (?:profile|launch) +-|\S\.nsys-rep\b|--enable_nsys\b(?![= ]*[Ff]alse)"
            rb"|\bnsys_profile(?:\.|:[^\n]{0,40}\n[^\n]{0,40}\b)enabled" + _ON
        ),
    ),
    ("a profiler", b"ENABLE_P", re.compile(rb"\bENABLE_(?:PYTORCH_)?PROFILE" + _ON)),
    ("the NCCL trace", b"ENABLE_NCCL_TRACE", re.compile(rb"\bENABLE_NCCL_TRACE" + _ON)),
    (
        "the NCCL trace",
        b"NCCL_DEBUG_SUBSYS",
        re.compile(
            rb"NCCL_DEBUG_SUBSYS(?:[=:\"' ]{1,3}| set by environment to )"
            rb"(?:[A-Z]+,)*(?:COLL|P2P|ALL)\b"
        ),
    ),
    ("the NCCL trace", b": opCount ", re.compile(rb"NCCL INFO \w+: opCount [0-9a-f]+ ")),
    (
        "the PyTorch profiler",
        b"ActivityProfilerController",
        re.compile(rb"ActivityProfilerController\.cpp:\d+\] Completed Stage"),
    ),
    (
        "the PyTorch profiler",
        b"Profiling active. ",
        re.compile(rb"Profiling active\. Traces will be saved"),
    ),
    (
        "a profiler",
        b"profile",
        re.compile(rb"\b(?:use_pytorch_)?profiler? \.{4,} True\b|\"profiled\": ?true"),
    ),
    (
        "a profiler",
        b"Config param profiler",
        re.compile(rb"Config param profiler: (?:xplane|nsys)"),
    ),
)
"""Profiler name, a literal of the line, and its full pattern."""


def watch_profilers(blocks: Iterable[bytes], log: LogContent) -> Iterator[bytes]:
    """Yield `blocks`; store the first sign of a profiler in the facts and remarks of `log`."""
    num_bytes = 0
    for block in blocks:
        if num_bytes < MAX_BYTES and "profiled" not in log.facts:
            _keep_trace(block, log)
        num_bytes += len(block)
        yield block


def _keep_trace(block: bytes, log: LogContent) -> None:
    for tool, literal, pattern in TRACES:
        if literal in block and (match := pattern.search(block)):
            log.facts["profiled"] = tool
            start = max(block.rfind(b"\n", 0, match.start()) + 1, match.start() - 40)
            line = excerpt(block[start : match.end()].replace(b"\n", b" "))
            log.remark(f"profiled by {tool}: {line!r}")
            return
