"""Coefficients adjusted to measured steps: of a table, a published source, or one run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from paceline.compare.published import row_facts
from paceline.core.errors import UserError
from paceline.core.layout import AXIS_FIELDS
from paceline.core.run_report import RunReport
from paceline.core.shape import DecoderShape
from paceline.estimate.calibrate.lookup import machine_for
from paceline.estimate.fit.origin import IMPLEMENTATION_OF, software_of, year_of
from paceline.estimate.fit.published import (
    NO_EXPERTS,
    UnsupportedRowError,
    kind_of,
    read_row,
)
from paceline.estimate.measured_step import measured_run
from paceline.estimate.model.case import Case
from paceline.estimate.run_case import case_of
from paceline.estimate.run_case import software_of as software_of_run
from paceline.estimate.validation import modelled_steps, read_table
from paceline.files.references import Row

FUSED_SOFTMAX_UNTIL = 2022
"""Last year in which Megatron's publications stored attention's scores with a fused softmax."""


def published_steps(name: str, rows: Sequence[Row]) -> list[tuple[Case, float]]:
    """Return the steps of published rows that can be modelled; raises UserError without any."""
    steps, reasons = list[tuple[Case, float]](), set[str]()
    for row in rows:
        if row.step_time_s is None:
            continue
        try:
            step = read_row(_cells(row))
        except UnsupportedRowError as reason:
            reasons.add(str(reason))
        else:
            steps.append((step.case, step.measured_s))
    if not steps:
        why = "; ".join(sorted(reasons)) or "it states no step time"
        raise UserError(f"reference {name!r}", f"has no row that can be modelled: {why}")
    return steps


def step_of_run(report: RunReport) -> tuple[Case, float]:
    """Return the step of a run on GPUs; raises UserError as `measured_run` and `machine_for` do."""
    run = measured_run(report)
    spec = run.measured_spec
    machine = machine_for(spec.cluster, spec.training.dtype)
    if machine.generation == "cpu":
        raise UserError(
            f"run {run.name}",
            "is of a CPU, whose estimates follow its calibration",
            remedy="`paceline probe calibrate`",
        )
    return case_of(spec, machine, software_of_run(spec)), run.step_time_s


def _cells(row: Row) -> dict[str, str]:
    """Return a published row as cells of a table (docs/reference/tables.md)."""
    facts = row_facts(row)
    shape, layout = facts.model, row.layout
    if not isinstance(shape, DecoderShape):
        raise UnsupportedRowError("its model is not a decoder")
    values: dict[str, Any] = {
        "id": row.id,
        "source": row.source,
        "model": f"{row.model or row.recipe or ''}{' LoRA' if facts.lora else ''}",
        "layers": shape.num_layers,
        "hidden": shape.hidden_size,
        "heads": shape.num_heads,
        "kv_heads": shape.kv_heads,
        "ffn": shape.ffn_size,
        "vocab": shape.vocab_size,
        "mlp_kind": "gated" if shape.gated_ffn else "plain",
        "seq_len": facts.seq_len,
        "gpu": facts.device,
        "gpus_per_node": facts.devices_per_node,
        "num_gpus": facts.num_devices,
        "dtype": facts.dtype,
        "gbs": facts.global_batch,
        "mbs": layout.micro_batch,
        "zero": layout.zero_stage,
        "seq_parallel": layout.sequence_parallel,
        "recompute": layout.recompute if "recompute" in layout.model_fields_set else None,
        "step_time_s": row.step_time_s,
        "notes": row.note,
        "release": _release(row.table),
        "attention_impl": _attention({"source": row.source}),
    } | {axis: getattr(layout, axis) for axis in AXIS_FIELDS}
    if shape.num_experts > 1:
        values |= {"n_experts": shape.num_experts, "topk": shape.experts_per_token}
    cells = {name: str(value) for name, value in values.items() if value is not None}
    if row.experts_per_token and kind_of(cells) != "moe":
        raise UnsupportedRowError(NO_EXPERTS)
    return cells


def _release(table: str) -> str | None:
    """Return the release in a table's id: 26.04 for megatron-bridge-260401; None without one."""
    match = re.search(r"-(2\d)(0\d|1[0-2])(?:\d\d)?$", table)
    return f"{match[1]}.{match[2]}" if match else None


def _attention(row: dict[str, str]) -> str:
    """Return the attention of a publication by its software, because references do not state it.

    vTrain measured Megatron-DeepSpeed of 2022. Software of PyTorch modules has the attention of
    its date.
    """
    software, year = software_of(row), year_of(row)
    is_early = "vtrain" in row["source"].lower() or (year or inf) <= FUSED_SOFTMAX_UNTIL
    if software.startswith("megatron") and is_early:
        return "unfused-softmax"
    if software == "composer":
        return "flash"
    return "flash (TE)" if IMPLEMENTATION_OF[software] != "torch" else ""


def steps_of_table(path: Path) -> list[tuple[Case, float]]:
    """Return the steps of a CSV file that can be modelled; raises UserError if there are none."""
    steps = modelled_steps(read_table(path))
    if not steps:
        raise UserError(
            str(path),
            "has no row that can be modelled",
            remedy=f"`paceline table validate {path}` lists the reasons",
        )
    return steps
