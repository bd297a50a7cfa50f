"""A sweep as flat table rows, and its chart of speed and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import altair as alt

from paceline.core.units import GIB, gib
from paceline.layouts.sweep.result import SweepResult, SweepRow
from paceline.report.step_charts import finish
from paceline.report.theme import Look

HEIGHT = 280
BORDERLINE = 0.2
MOST_REASON = 80
FAILED = {"oom": "OOM", "nan": "NaN"}


def sweep_rows(result: SweepResult) -> Iterator[dict[str, Any]]:
    """One flat row a combination, in base units; what varies beside the layout under its field."""
    for row in result.rows:
        layout = row.layout.model_dump(include=set(LAYOUT_FIELDS))
        plain = row.model_dump(exclude={"settings", "layout", "prediction", "runs"}, mode="json")
        expected = row.prediction
        yield {
            **plain,
            **layout,
            **row.settings,
            "label": row.label,
            "predicted_s": expected and expected.step_time_s,
            "predicted_low_s": expected and expected.low_s,
            "predicted_high_s": expected and expected.high_s,
            "predicted_memory_bytes": expected and expected.memory_bytes,
            "p_oom": expected and expected.p_oom,
            "prediction_error": row.prediction_error,
            "runs": " ".join(row.runs),
            "notes": notes(row),
        }


LAYOUT_FIELDS = ("tp", "pp", "cp", "vp", "zero_stage", "micro_batch", "recompute")


def notes(row: SweepRow) -> str:
    """What a table says of a row in words: why it has no figure, or what sets it apart."""
    if row.status != "ok":
        words = FAILED.get(row.status, row.status) + _risk(row)
        # An error's whole text is in the JSON; why something was refused is what a reader needs.
        short = row.status in ("refused", "pruned") or len(row.reason or "") <= MOST_REASON
        reason = row.reason if short else f"{(row.reason or '')[:MOST_REASON]}..."
        return ": ".join(filter(None, (words, reason)))
    said = ["best"] if row.best else ["level with the best"] if row.level else []
    said += ["on the front"] if row.pareto else []
    return ", ".join(said)


def _risk(row: SweepRow) -> str:
    """The odds of running out of memory of a row that has yet to run, where they are high."""
    if row.status != "waiting" or row.prediction is None or row.prediction.p_oom < BORDERLINE:
        return ""
    return f", out of memory with {row.prediction.p_oom:.0%}"


def front_chart(result: SweepResult, look: Look) -> alt.LayerChart | None:
    """Tokens/s over memory, the front joined by a line; None when fewer than two rows have both."""
    points = [
        {
            "memory": row.memory_bytes / GIB,
            "speed": row.tokens_per_s,
            "label": row.label,
            "pareto": row.pareto,
            "best": row.best,
        }
        for row in result.rows
        if row.ok and row.memory_bytes is not None
    ]
    if len(points) < 2:
        return None
    x = alt.X(
        "memory:Q",
        title="memory of the fullest rank (GiB)",
        scale=alt.Scale(zero=False, padding=14),
    )
    y = alt.Y("speed:Q", title="tokens/s", scale=alt.Scale(zero=False, padding=14))
    front = [one for one in points if one["pareto"]]
    line = (
        alt.Chart(alt.Data(values=front), name="front")
        .mark_line(interpolate="step-after", color=look.palette.warmup, strokeDash=[4, 3])
        .encode(x=x, y=y)
    )
    dots = (
        alt.Chart(alt.Data(values=points), name="layouts")
        .mark_circle(opacity=1, size=60)
        .encode(
            x=x,
            y=y,
            color=alt.condition(
                alt.datum["pareto"], alt.value(look.palette.accent), alt.value(look.palette.steady)
            ),
            tooltip=[
                alt.Tooltip("label:N"),
                alt.Tooltip("speed:Q", title="tokens/s", format=",.0f"),
                alt.Tooltip("memory:Q", title="GiB", format=".2f"),
            ],
        )
    )
    names = (
        alt.Chart(alt.Data(values=front), name="names")
        .mark_text(color=look.palette.accent, align="left", dx=8, dy=-8)
        .encode(x=x, y=y, text="label:N")
    )
    note = "Dot: one layout. Orange: no other is as fast with as little memory. " + memory_note(
        result
    )
    return finish([line, dots, names], look, "Speed and memory", [note], HEIGHT)


def memory_note(result: SweepResult) -> str:
    """Of what the memory is, as the rows say it."""
    kinds = dict.fromkeys(row.memory_kind for row in result.rows if row.memory_kind)
    words = {
        "device_used": "in use on the device",
        "reserved": "reserved by the allocator",
        "resident": "resident set of the process",
    }
    said = " or ".join(words.get(kind, kind) for kind in kinds)
    return f"Memory: peak {said}, largest rank." if said else ""


def memory_text(value: float | None) -> str:
    """GiB with two decimals, without the unit."""
    return "-" if value is None else gib(value).removesuffix(" GiB")
