"""The table of a sweep: its flat rows, its columns, and what stands below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.core.flops import with_recompute
from paceline.core.layout import AXIS_FIELDS
from paceline.core.units import TERA, gib, significant
from paceline.layouts.sweep.result import SweepResult, SweepRow, certainty

NO_SPEED = "x"
"""Where a run ended without one."""
ENDED_WITHOUT = ("oom", "nan", "timeout", "failed", "incomplete")
"""Statuses of runs that were started and have no speed."""
STATUS_WORDS = {"oom": "OOM", "nan": "NaN"}
MOST_REASON = 80
"""Signs of an error's text that a table shows."""
LAYOUT_FIELDS = (*AXIS_FIELDS, "zero_stage", "micro_batch", "recompute")
ALWAYS_SHOWN = ("layout.tp", "layout.pp", "layout.micro_batch", "layout.recompute")
"""Fields that every table has a column for, whether they vary or not."""
CSV_KEYS = (
    *("status", "reason", "best", "p_best", "level", "pareto", "key", "nodes", "devices"),
    *(*AXIS_FIELDS, "dp", "zero_stage", "micro_batch", "recompute"),
    *("global_batch", "seq_len", "step_time_s", "low_s", "high_s", "spread", "n"),
    *("samples_per_s", "tokens_per_s", "model_flops_per_s_per_device"),
    *("hardware_flops_per_s_per_device", "mfu", "memory_bytes", "memory_kind"),
    *("predicted_s", "predicted_low_s", "predicted_high_s", "prediction_error"),
    *("predicted_memory_bytes", "p_oom", "predicted_memory", "runs"),
)
"""Columns of the table as CSV, after those that vary."""


@dataclass(frozen=True)
class SweepColumn:
    """One column for people: its key in the rows, its title, and how a value is written."""

    key: str
    title: str
    write: Callable[[Any], str] = str
    is_number: bool = True


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
            "predicted_memory": expected and expected.memory,
            "prediction_error": row.prediction_error,
            "runs": " ".join(row.runs),
            "notes": notes(row),
        }


def for_people(row: dict[str, Any]) -> dict[str, Any]:
    """The row with an x where a run ended without a speed, and in the units of the table."""
    flops, failed = row["hardware_flops_per_s_per_device"], row["status"] in ENDED_WITHOUT
    return {
        **row,
        "step_time_s": NO_SPEED if failed else row["step_time_s"],
        "tflops": NO_SPEED if failed else flops and flops / TERA,
        "memory": memory_text(row["memory_bytes"]),
        "predicted_gib": memory_text(row["predicted_memory_bytes"]),
    }


def sweep_columns(result: SweepResult) -> list[SweepColumn]:
    """Those of published studies, those of other settings that vary, and predictions if any."""
    varied = [field for field in result.dimensions if field not in ALWAYS_SHOWN]
    columns = [
        SweepColumn("nodes", "nodes"),
        SweepColumn("tp", "TP"),
        SweepColumn("pp", "PP"),
        SweepColumn("dp", "DP"),
        SweepColumn("micro_batch", "MBS"),
        SweepColumn("recompute", "recompute", is_number=False),
        *(SweepColumn(field, field.rpartition(".")[2]) for field in varied),
        SweepColumn("step_time_s", "s/iteration", _number),
        SweepColumn("tokens_per_s", "tokens/s", lambda value: f"{value:,.0f}"),
        SweepColumn("tflops", "TFLOP/s", _number),
        SweepColumn("memory", "memory GiB"),
    ]
    if any(row.prediction for row in result.rows):
        columns += [
            SweepColumn("predicted_s", "predicted s", _number),
            SweepColumn("prediction_error", "error", lambda error: f"{100 * error:+.1f} %"),
            SweepColumn("predicted_gib", "predicted GiB"),
            SweepColumn("p_oom", "P(OOM)", lambda odds: f"{odds:.0%}"),
        ]
    return [*columns, SweepColumn("notes", "notes", is_number=False)]


def notes(row: SweepRow) -> str:
    """What a table says of a row in words: why it has no figure, or what sets it apart."""
    if row.status != "ok":
        words = [STATUS_WORDS.get(row.status, row.status), *_borderline(row)]
        # An error's whole text is in the JSON; why something was refused is what a reader needs.
        short = row.status in ("refused", "pruned") or len(row.reason or "") <= MOST_REASON
        reason = row.reason if short else f"{(row.reason or '')[:MOST_REASON]}..."
        return ": ".join(filter(None, (", ".join(words), reason)))
    marks = ["best"] if row.best else ["level with the best"] if row.level else []
    if marks and row.p_best is not None:
        marks = [f"{marks[0]} ({certainty(row.p_best)})"]
    marks += ["on the front"] if row.pareto else []
    return ", ".join([*marks, *_borderline(row)])


def table_note(result: SweepResult) -> str:
    """What stands below the table: how FLOPs are counted, and of what the memory is.

    Empty where every combination was refused.
    """
    if result.flops_convention is None:
        return ""
    flops_note = (
        f"TFLOP/s of a device, recomputation counted ({with_recompute(result.flops_convention)}); "
        "layouts are ranked by tokens/s."
    )
    stack = f" Expected as of the stack {result.stack}." if result.stack else ""
    return f"{flops_note}{stack} {memory_note(result)}".strip()


def memory_note(result: SweepResult) -> str:
    """Of what the memory is, as the rows say it."""
    kinds = dict.fromkeys(row.memory_kind for row in result.rows if row.memory_kind)
    words = {
        "device_used": "in use on the device",
        "reserved": "reserved by the allocator",
        "resident": "resident set of the process",
    }
    peaks = " or ".join(words.get(kind, kind) for kind in kinds)
    return f"Memory: peak {peaks}, largest rank." if peaks else ""


def memory_text(value: float | None) -> str:
    """GiB with two decimals, without the unit."""
    return "-" if value is None else gib(value).removesuffix(" GiB")


def _borderline(row: SweepRow) -> list[str]:
    """Said of a row of which nothing surer is known."""
    if row.prediction is None or row.status in ("oom", "pruned"):
        return []
    if row.status == "waiting" and row.prediction.memory == "out of memory":
        return ["probably out of memory"]
    return ["memory borderline"] if row.prediction.memory == "borderline" else []


def _number(value: Any) -> str:
    return value if isinstance(value, str) else significant(value, 3)
