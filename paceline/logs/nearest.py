"""Reason why no known log format reads a log: another program's table, or the nearest format."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

from paceline.core.units import pluralize
from paceline.engines import format_tables, log_formats
from paceline.engines.log_reading.log_content import LogFormat, excerpt
from paceline.engines.log_reading.records import without_colors
from paceline.engines.log_reading.table_reader import mismatch

MAX_EXCERPT = 100
MAX_BLOCKS = 4
"""Blocks in which marks are searched."""

_READ_BY_PROBE = "`paceline probe network --from FILE` compares it with the links"
_RECORDED = (
    "it has no steps; `paceline run -- COMMAND` records power and clocks together with the steps, "
    "and `paceline explain` uses them"
)
_JOBS = (
    "it has no steps; `paceline runs goodput LOG...` accounts for the time of a training over its "
    "jobs, from their logs"
)
OTHER_TABLES: tuple[tuple[str, str, str], ...] = (
    (r"^#[ \t]+size[ \t].*\balgbw[ \t]+busbw\b", "nccl-tests or rccl-tests", _READ_BY_PROBE),
    (r"#bytes[ \t]+#iterations[ \t]+BW peak\[", "perftest (ib_write_bw)", _READ_BY_PROBE),
    (
        r"^#[ \t]*(?:Date,?[ \t]+Time,?[ \t]+)?gpu\b.*\b(?:pwr|sm|pclk)\b",
        "nvidia-smi dmon",
        _RECORDED,
    ),
    (r"^timestamp, (?:.*, )?(?:power\.draw|utilization\.gpu)", "nvidia-smi --query-gpu", _RECORDED),
    (r"^[ \t]*JobID(?:Raw)?\b.*\b(?:State|Elapsed(?:Raw)?|ExitCode)\b", "Slurm's sacct", _JOBS),
)
"""Pattern of the header, name and use of tables of other programs. Spaces stay within a line,
because a search over line ends takes quadratic time on a file of nothing else."""


def refusal_of(reason: str, blocks: Iterable[bytes]) -> str:
    """Return why no format reads the lines: what else they are, or `reason` and the nearest
    format."""
    text = b"".join(islice(blocks, MAX_BLOCKS)).replace(b"\r", b"\n")
    for pattern, name, use in OTHER_TABLES:
        if re.search(pattern.encode(), text, re.MULTILINE):
            return f"it is output of {name}: {use}"
    return f"{reason}; {_nearest_format(text)}"


def _nearest_format(text: bytes) -> str:
    """Return the number of lines and formats, and the nearest format with its first mismatch."""
    lines = [line for line in without_colors(text).split(b"\n") if line.strip()]
    formats = log_formats()
    scope = f"{pluralize(len(lines), 'line')} compared with {len(formats)} log formats"
    all_lines = b"\n".join(lines)
    hits = {name: hit for name, kind in formats.items() if (hit := _first_hit(all_lines, kind))}
    if not hits:
        return f"{scope}: no line contains the identifying text of a format"
    tables = format_tables()
    reasons = {
        name: mismatch(tables[name], lines[number]) if name in tables else None
        for name, (_, number) in hits.items()
    }
    lengths = {name: (why[0] if why else 0, hits[name][0]) for name, why in reasons.items()}
    name = max(lengths, key=lambda name: lengths[name])
    kind, why = formats[name], reasons[name]
    return (
        f"{scope}; nearest: {kind.title} (--log-format {name}), but in the line "
        f"'{excerpt(lines[hits[name][1]])[:MAX_EXCERPT]}' "
        f"{why[1] if why else f'the rest does not match {kind.example}'}"
    )


def _first_hit(text: bytes, kind: LogFormat) -> tuple[int, int] | None:
    """Return the length of the longest mark in a text, and the number of its first line."""
    for mark in sorted(kind.marks, key=len, reverse=True):
        if (at := text.find(mark)) >= 0:
            return len(mark), text.count(b"\n", 0, at)
    return None
