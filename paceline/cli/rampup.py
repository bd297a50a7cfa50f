"""`paceline estimate rampup`: plan the stages of a batch-size ramp-up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from paceline.cli import model_options as model
from paceline.cli.options import ClusterName, EngineName, Overrides, Panel, Variant, with_engine
from paceline.cli.output import TableOptions, emit
from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.units import GIB, compact, day_count, days, step_seconds
from paceline.files import catalog
from paceline.layouts.rampup.check import CheckedSchedule, check_schedule, read_schedule
from paceline.layouts.rampup.plan import RampOptions, RampPlan, plan_ramp_up
from paceline.layouts.rampup.timing import ramp_context
from paceline.report.document import Column, Document, Table


def rampup(
    recipe: model.Recipe,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device name, as listed by `paceline recipes devices`, e.g. V100-32GB.",
            rich_help_panel=Panel.hosts,
        ),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="32,64,128,...",
            help="First batch size of each stage; default: repeated doubling of the recipe's "
            "first batch.",
            rich_help_panel=Panel.search,
        ),
    ] = None,
    max_nodes: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum number of nodes per stage.", rich_help_panel=Panel.search
        ),
    ] = 64,
    min_efficiency: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Minimum throughput per device of a stage, as a fraction of the best one at the"
            " last batch; 0 takes the fastest layout.",
            rich_help_panel=Panel.search,
        ),
    ] = 0.8,
    samples: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Samples per stage: a list, or one number for all stages but the last.",
            rich_help_panel=Panel.search,
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            min=1, help="Tokens of the whole training, e.g. 3.3e11.", rich_help_panel=Panel.recipe
        ),
    ] = None,
    all_batches: Annotated[
        bool,
        typer.Option(
            "--all-batches",
            help="Train all batch sizes of the ramp-up within a stage, so that each stage"
            " can resume from the previous one.",
            rich_help_panel=Panel.search,
        ),
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE",
            help="Check an existing schedule (CSV or Markdown: nodes, batch, micro_batch, tp, "
            "pp, ...).",
            rich_help_panel=Panel.criteria,
        ),
    ] = None,
    every_size: Annotated[
        bool,
        typer.Option(
            "--all",
            help="List the best layout for every number of nodes.",
            rich_help_panel=Panel.output,
        ),
    ] = False,
    cluster: ClusterName = None,
    variant: Variant = None,
    overrides: Overrides = None,
    engine: EngineName = None,
    per_node: model.PerNode = None,
    intra: model.Intra = None,
    inter: model.Inter = None,
    software: model.StackName = None,
    max_tp: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum tensor-parallel size; default: the devices per node, up to 8.",
            rich_help_panel=Panel.search,
        ),
    ] = None,
    calibration: model.EvidenceFile = None,
    *,
    output: TableOptions,
) -> None:
    """Plan a batch-size ramp-up: layout, nodes, device-hours and days of every stage.

    Examples:

      paceline estimate rampup gpt-1b3 --variant ramp-up --stages 32,64,128,256,512
      --device V100-32GB --per-node 4

      paceline estimate rampup gpt-1b3 --variant ramp-up --cluster jean-zay-v100-16g
      --set layout.pp=2 --check table.md

    Nothing runs. Each stage gets the fastest layout that fits in memory, on the largest number of
    nodes that keeps its devices efficient. Pipeline bubbles and exposed gradient communication are
    included. --check reads an existing schedule and reports stages that cannot run, run out of
    memory or are slow, with the reason.
    """
    if all_batches and samples:
        raise UserError(
            "--all-batches",
            "takes the samples per stage from the recipe's ramp-up",
            remedy="leave out --samples",
        )
    site = _site(cluster, device, per_node)
    where = _devices(site, device, per_node)
    file_evidence = model.given_evidence(calibration)
    question = model.question(
        recipe, where.device, where.per_node, software,
        variant=variant, overrides=with_engine(overrides, engine),
        per_node=where.per_node, intra=intra or where.intra, inter=inter or where.inter,
        evidence=file_evidence,
    )  # fmt: skip
    setting = ramp_context(question, model.chosen_evidence(file_evidence, question))
    batches = tuple(int(n) for n in _numbers("--stages", stages, whole=True))
    each = _numbers("--samples", samples)
    options = RampOptions(
        batches=batches,
        max_nodes=max_nodes,
        min_efficiency=min_efficiency,
        samples=each,
        tokens=tokens,
        one_stage_per_batch=all_batches,
        max_tp=max_tp,
    )
    schedule = read_schedule(check, setting.recipe.layout) if check else None
    plan = plan_ramp_up(setting, options)
    checked_schedule = check_schedule(setting, options, schedule, plan) if schedule else None
    emit(_document(plan, checked_schedule, every_size), output.output_format)


def _site(cluster: str | None, device: str | None, per_node: int | None) -> Cluster | None:
    """Return the cluster, or None if a device is given."""
    if cluster and (device or per_node):
        raise UserError(
            "--cluster", "already states the devices", remedy="leave --device and --per-node out"
        )
    if cluster:
        return catalog.cluster(cluster)
    if device is None:
        raise UserError("paceline estimate rampup", "needs devices", remedy="--device or --cluster")
    return None


class _Devices(NamedTuple):
    """Devices and links of a cluster or of the options."""

    device: str
    per_node: int
    intra: str | None = None
    inter: str | None = None


def _devices(site: Cluster | None, device: str | None, per_node: int | None) -> _Devices:
    """Return the devices and links of the cluster, else of the options."""
    if site:
        return _Devices(site.device, site.devices_per_node, site.intra_link, site.inter_link)
    return _Devices(device or "", per_node or model.DEVICES_PER_NODE)


def _numbers(option: str, text: str | None, whole: bool = False) -> tuple[float, ...]:
    """Return the numbers in an option's list; raise UserError for one below 1."""
    numbers: list[float] = []
    for part in (text or "").split(",") if text else []:
        try:
            number = float(int(part)) if whole else float(part)
        except ValueError:
            number = 0.0
        if not 1 <= number < 1e15:
            raise UserError(
                f"{option} {text}", f"{part!r} is not a number of at least 1", allowed="32,64,128"
            )
        numbers.append(number)
    return tuple(numbers)


def _document(
    plan: RampPlan, checked_schedule: CheckedSchedule | None, every_size: bool
) -> Document:
    """Return the plan, followed by the checked schedule, whose table is the csv."""
    data = plan.model_dump(mode="json")
    rows = [_row(stage) for stage in data["alternatives" if every_size else "stages"]]
    tables = [Table(title="Plan", columns=_COLUMNS, rows=rows)]
    if checked_schedule:
        data["checked"] = checked_schedule.model_dump(mode="json")
        checked_rows = [_checked_row(stage) for stage in data["checked"]["stages"]]
        tables.append(Table(title="Checked schedule", columns=_CHECKED_COLUMNS, rows=checked_rows))
    totals = [
        f"{name}: {_hours(schedule.device_hours)} device-hours, {days(schedule.days)}"
        for name, schedule in (("plan", plan), ("checked schedule", checked_schedule))
        if schedule and schedule.days is not None and schedule.device_hours is not None
    ]
    return Document(
        kind="batch-size ramp-up, by estimate",
        title=f"{plan.recipe} on {plan.device}",
        answer=tuple(totals),
        sections=tuple(tables),
        notes=(*plan.notes, f"Rests on {plan.evidence}."),
        data=data,
        csv=tables[-1],
    )


def _row(stage: dict[str, Any]) -> dict[str, Any]:
    layout = stage["layout"]
    return {**stage, **{key: layout[key] for key in ("micro_batch", "recompute")}}


def _checked_row(stage: dict[str, Any]) -> dict[str, Any]:
    keys = ("micro_batches", "step_time_s", "bubble_share", "exchange_share", "efficiency", "p_oom")
    plan = stage["plan"] or {}
    row = {**stage, **{key: plan.get(key) for key in keys}}
    return {**row, "reasons": "; ".join(stage["reasons"]) or None}


def _hours(value: float) -> str:
    return compact(value, 3)


def _share(value: float) -> str:
    return f"{value:.0%}"


_COLUMNS = [
    Column("batch", "batch", justify="right"),
    Column("nodes", "nodes", justify="right"),
    Column("label", "layout"),
    Column("micro_batch", "micro-batch", justify="right"),
    Column("recompute", "recompute"),
    Column("micro_batches", "a replica", justify="right"),
    Column("step_time_s", "step s", step_seconds, "right"),
    Column("low_s", "low", step_seconds, "right"),
    Column("high_s", "high", step_seconds, "right"),
    Column("bubble_share", "bubble", _share, "right"),
    Column("exchange_share", "exposed comm.", _share, "right"),
    Column("memory_bytes", "memory GiB", lambda value: f"{value / GIB:.1f}", "right"),
    Column("p_oom", "P(OOM)", _share, "right"),
    Column("efficiency", "efficiency", _share, "right"),
    Column("samples", "samples", lambda value: f"{value:,}", "right"),
    Column("device_hours", "device hours", _hours, "right"),
    Column("days", "days", day_count, "right"),
]
_CHECKED_COLUMNS = [
    Column("batch", "batch", justify="right"),
    Column("nodes", "nodes", justify="right"),
    Column("label", "layout"),
    Column("micro_batch", "micro-batch", justify="right"),
    Column("micro_batches", "a replica", justify="right"),
    Column("step_time_s", "step s", step_seconds, "right"),
    Column("slowdown", "of the best", lambda value: f"{value:.2f}", "right"),
    Column("bubble_share", "bubble", _share, "right"),
    Column("exchange_share", "exposed comm.", _share, "right"),
    Column("efficiency", "efficiency", _share, "right"),
    Column("p_oom", "P(OOM)", _share, "right"),
    Column("verdict", "verdict"),
    Column("reasons", "why", wraps=True),
]
