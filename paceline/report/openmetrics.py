"""OpenMetrics text: gauges for Prometheus and for the textfile collector of its node exporter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True)
class Gauge:
    """One value of a metric; None and values that are not finite are omitted."""

    name: str
    value: float | None
    help: str
    labels: Mapping[str, str | None]


def openmetrics_text(gauges: Iterable[Gauge]) -> str:
    """Return gauges as OpenMetrics text, grouped by name; also valid in Prometheus' own format."""
    families: dict[str, list[Gauge]] = {}
    for gauge in gauges:
        if gauge.value is not None and math.isfinite(gauge.value):
            families.setdefault(f"paceline_{_NOT_IN_NAMES.sub('_', gauge.name)}", []).append(gauge)
    lines: list[str] = []
    for name, members in families.items():
        lines += [f"# HELP {name} {members[0].help.translate(_ESCAPES)}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels(gauge.labels)} {gauge.value!r}" for gauge in members]
    return "\n".join([*lines, "# EOF", ""])


def _labels(labels: Mapping[str, str | None]) -> str:
    pairs = [f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items() if text]
    return f"{{{','.join(pairs)}}}" if pairs else ""
