"""`paceline tune`: which layout is fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import Json
from paceline.cli.output import Column, TableForm, TableFormat, emit_table


def tune(
    recipe: Annotated[
        str, typer.Argument(help="Name of a recipe, or a YAML file.", metavar="RECIPE")
    ],
    device: Annotated[str, typer.Option(help="A device of `paceline devices`, e.g. H100.")],
    gpus: Annotated[int, typer.Option(min=1, help="Number of devices.")],
    estimate_only: Annotated[
        bool, typer.Option("--estimate-only", help="Rank by estimate; nothing runs.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Layouts that are listed.")] = 50,
    variant: Annotated[str | None, typer.Option(help="A variant that the recipe defines.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe field."),
    ] = None,
    per_node: Annotated[int, typer.Option(min=1, help="Devices of a node.")] = 8,
    intra: Annotated[
        str | None, typer.Option(metavar="LINK", help="Link inside a node, e.g. NVLink4.")
    ] = None,
    inter: Annotated[
        str | None, typer.Option(metavar="LINK", help="Network, e.g. InfiniBand-NDR.")
    ] = None,
    stack: Annotated[str, typer.Option(help="fused, torch or softmax.")] = "fused",
    most_tp: Annotated[int, typer.Option(min=1, help="Largest tensor-parallel size.")] = 8,
    most_cp: Annotated[int, typer.Option(min=1, help="Largest context-parallel size.")] = 16,
    evidence: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Coefficients of a calibrated machine, not the shipped ones."
        ),
    ] = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Rank every layout of a recipe by estimated step time, those that fit into memory first.

    Examples:

      paceline tune llama31-405b --device H100 --gpus 16384 --estimate-only

      paceline tune llama31-70b --device B200 --gpus 64 --estimate-only --top 5 --json

    Layouts whose sizes do not divide are counted, those that would run out of memory with more than
    even odds are pruned. This version ranks; trying the best ones is still to come, `paceline run
    RECIPE --set layout.tp=...` does it one by one.
    """
    from paceline.errors import UserError
    from paceline.estimate.evidence import read_evidence, shipped
    from paceline.estimating import Question
    from paceline.search.layouts import Space
    from paceline.tuning import rank

    if stack not in ("fused", "torch", "softmax"):
        raise typer.BadParameter("must be fused, torch or softmax", param_hint="--stack")
    if not estimate_only:
        raise UserError("paceline tune", "runs nothing in this version",
                        remedy="add --estimate-only to rank the layouts")  # fmt: skip
    question = Question(
        recipe, device, gpus, variant, tuple(overrides or ()), per_node, intra, inter, stack,  # type: ignore[arg-type]
    )  # fmt: skip
    space = Space(most_tp=most_tp, most_cp=most_cp)
    found = rank(question, read_evidence(evidence) if evidence else shipped(), space, top)
    form = TableFormat.json if as_json else form
    rows = [_row(one.model_dump(mode="json")) for one in found.layouts]
    emit_table(rows, _COLUMNS, form, document=found.model_dump(mode="json"))
    if form is TableFormat.text:
        own = found.recipe_layout
        typer.echo(
            f"{found.n_layouts:,} layouts estimated, {found.n_infeasible:,} cannot run, "
            f"{found.n_pruned:,} {found.bound}",
            err=True,
        )
        told = f"{own.label}: {own.step_time_s:.4g} s" if own else "does not divide the devices"
        typer.echo(f"the recipe's own layout: {told}", err=True)


def _row(one: dict[str, Any]) -> dict[str, Any]:
    layout = one.pop("layout")
    return {**one, **{key: layout[key] for key in ("micro_batch", "recompute")}}


def _seconds(value: float) -> str:
    return f"{value:.4g}"


_COLUMNS = [
    Column("label", "layout"),
    Column("micro_batch", "micro-batch", justify="right"),
    Column("recompute", "recompute"),
    Column("step_time_s", "step s", _seconds, "right"),
    Column("low_s", "low", _seconds, "right"),
    Column("high_s", "high", _seconds, "right"),
    Column("memory_bytes", "memory GB", lambda value: f"{value / 1e9:.1f}", "right"),
    Column("p_oom", "P(OOM)", lambda value: f"{value:.0%}", "right"),
    Column("fits", "fits", lambda value: "yes" if value else "no"),
]
