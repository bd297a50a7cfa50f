"""`paceline table convert`: convert a published figure to another FLOPs convention or peak."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, get_args

import typer

from paceline.audit.conversion import (
    CONVENTION_NAMES,
    Conversion,
    Peaks,
    StatedFigure,
    from_tokens_per_s,
    parse_quantity,
    read_flops_per_s,
    resolve_peaks,
)
from paceline.audit.conversion import convert as convert_figure
from paceline.cli import quantities
from paceline.cli.log_options import DeviceName, DtypeName, GlobalBatch, NumDevices
from paceline.cli.options import Json
from paceline.cli.output import TableForm, TableFormat, emit_json, emit_table
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.flops import FlopsInput, convention_of, flops_input
from paceline.core.layout import Layout, Recompute
from paceline.core.quantity import SpeedFigure
from paceline.core.rates import tokens_per_s
from paceline.files import catalog
from paceline.files.recipe import load_recipe
from paceline.report.document import Column

OF_SPEED = ("step_time_s", "tokens_per_s_per_device")
"""Kinds of figures that are independent of a FLOPs convention."""


def convert(
    figure: Annotated[
        str,
        typer.Argument(
            help="Published figure: MFU (54.1%), FLOP/s per GPU (1249TFLOP/s), tokens/s per GPU "
            "(`10,500 tokens/s/GPU`) or step time (12.5s).",
            metavar="FIGURE",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="Trained model: recipe, or config.json or name of a Hugging Face model.",
        ),
    ],
    published: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help="Framework that printed the figure (megatron, nemo, torchtitan, ...), or its "
            "FLOPs convention.",
        ),
    ] = None,
    target: Annotated[
        str, typer.Option("--to", help="FLOPs convention, or framework, to convert to.")
    ] = "causal",
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            parser=quantities.sequence_length,
            metavar="TOKENS",
            help="Sequence length in tokens, e.g. 8k; default: as in the recipe.",
        ),
    ] = None,
    device: DeviceName = None,
    dtype: DtypeName = None,
    from_peak: Annotated[
        str | None,
        typer.Option(help="Peak FLOP/s that the published MFU divides by, e.g. 1979e12."),
    ] = None,
    peak: Annotated[
        str | None,
        typer.Option("--peak", help="Dense peak FLOP/s for the converted MFU, e.g. 989TFLOP/s."),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            help="Activation checkpointing of the run: none, selective or full; default: as in "
            "the recipe."
        ),
    ] = None,
    nominal_parameters: Annotated[
        float | None,
        typer.Option(
            parser=quantities.parameters,
            metavar="N",
            help="Rounded parameter count used with six-n, e.g. 1.3B.",
        ),
    ] = None,
    global_batch: GlobalBatch = None,
    gpus: NumDevices = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Convert a published MFU, TFLOP/s or step time to another FLOPs convention.

    Conventions: full-attention, causal, palm, six-n, narayanan, megatron-deepspeed. None of them
    counts recomputation. Append +recompute to count it too (HFU), as set by --recompute. A step
    time needs --global-batch and --gpus. Tokens/s and step times need no --from.

    Examples:

      paceline table convert 400TFLOP/s --from megatron --model llama31-70b --device H100

      paceline table convert "10,500 tokens/s/GPU" --model meta-llama/Llama-3.1-8B --device H100

      paceline table convert 54.1% --from full-attention --model llama31-70b

      paceline table convert 29s --to six-n+recompute --model gpt-1b3
      --global-batch 512 --gpus 8
    """
    quantity = parse_quantity(figure, figure)
    x = _flops_input(model, seq_len, recompute, nominal_parameters)
    peaks = _peaks(device, dtype, from_peak, peak)
    target, target_note = convention_of(target)
    published, note = (None, "") if published is None else convention_of(published)
    conversion = _convert(quantity, published, target, x, peaks, (global_batch, gpus))
    form = TableFormat.json if as_json else form
    if form is TableFormat.text:
        _print_text(figure, quantity, conversion)
    elif form is TableFormat.json:
        emit_json(_document(quantity, conversion))
    else:
        emit_table(_rows(quantity, conversion), _columns(), form)
    for sentence in filter(None, (note, target_note, *conversion.notes)):
        echo(f"note: {sentence}", err=True)


def _flops_input(
    model: str, seq_len: int | None, recompute: str | None, nominal: float | None
) -> FlopsInput:
    recipe = load_recipe(model)
    layouts: dict[str | None, Layout] = {
        name: Layout(recompute=name) for name in get_args(Recompute) if name != "budget"
    }
    if recompute is not None and recompute not in layouts:
        allowed = ", ".join(map(str, layouts))
        raise UserError(f"--recompute {recompute}", "is unknown", allowed=allowed)
    return flops_input(
        recipe.model,
        seq_len or recipe.training.seq_len,
        layouts.get(recompute, recipe.layout),
        recipe.lora,
        nominal or recipe.nominal_parameters,
    )


def _peaks(device: str | None, dtype: str | None, from_peak: str | None, peak: str | None) -> Peaks:
    return resolve_peaks(
        device,
        catalog.dtype(dtype) if dtype else None,
        read_flops_per_s(from_peak, f"--from-peak {from_peak}") if from_peak else None,
        read_flops_per_s(peak, f"--peak {peak}") if peak else None,
    )


def _convert(
    quantity: SpeedFigure,
    published: str | None,
    target: str,
    x: FlopsInput,
    peaks: Peaks,
    job: tuple[int | None, int | None],
) -> Conversion:

    batch, gpus = job
    if quantity.kind in OF_SPEED:
        if published is not None:
            raise UserError(
                f"--from {published}",
                "does not apply to a step time or tokens/s",
                remedy="leave it out",
            )
        rate = quantity.value
        if quantity.kind == "step_time_s":
            if batch is None or gpus is None:
                raise UserError(
                    "a step time",
                    "can be converted only if the size of the job is known",
                    remedy="add --global-batch and --gpus",
                )
            rate = tokens_per_s(x.seq_len, batch, quantity.value) / gpus
        return from_tokens_per_s(rate, target, x, peaks)
    if published is None:
        raise UserError(
            "--from",
            "is required, because figures in different conventions are not comparable",
            allowed=CONVENTION_NAMES,
        )
    return convert_figure(quantity, published, target, x, peaks)


def _print_text(figure: str, quantity: SpeedFigure, conversion: Conversion) -> None:
    published, converted = conversion.published, conversion.converted
    sides = [converted] if published == converted else [published, converted]
    if quantity.kind in OF_SPEED:
        per = " per step" if quantity.kind == "step_time_s" else ""
        echo(f"{figure}{per} -> {_amounts(converted)} ({converted.convention})")
    else:
        result = _amounts(converted, first=quantity.kind)
        echo(f"{figure} ({published.convention}) -> {result} ({converted.convention})")
        echo(f"ratio {conversion.ratio:.4f}")
    for side in sides:
        peak = side.peak_flops_per_s
        against = "" if peak is None else f", peak {_tera(peak)}"
        echo(f"\n{side.convention}: {side.flops_per_token:.5g} FLOPs per token{against}")
        echo(f"  {side.formula}")
        if side.source:
            echo(f"  {side.source}")


def _amounts(side: StatedFigure, first: str = "flops_per_s_per_device") -> str:
    """Return the known figures of a side, starting with the kind of the input figure."""
    share = None if side.mfu is None else f"{100 * side.mfu:.2f}% {side.share}"
    rate = None if side.flops_per_s_per_device is None else _tera(side.flops_per_s_per_device)
    both = [share, rate] if first == "mfu" else [rate, share]
    return ", ".join(filter(None, both))


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:,.5g} TFLOP/s"


def _rows(quantity: SpeedFigure, conversion: Conversion) -> list[dict[str, Any]]:
    sides = {"published": conversion.published, "converted": conversion.converted}
    if quantity.kind in OF_SPEED:
        sides = {"converted": conversion.converted}
    return [{"side": name, **asdict(side)} for name, side in sides.items()]


def _document(quantity: SpeedFigure, conversion: Conversion) -> dict[str, Any]:
    sides = {row.pop("side"): row for row in _rows(quantity, conversion)}
    return {
        "kind": quantity.kind,
        "value": quantity.value,
        "ratio": conversion.ratio,
        **sides,
        "notes": list(conversion.notes),
    }


def _columns() -> list[Column]:
    return [
        Column("side", "side"),
        Column("convention", "convention"),
        Column("mfu", "MFU", lambda v: f"{100 * v:.2f}%", "right"),
        Column("flops_per_s_per_device", "FLOP/s a device", _tera, "right"),
        Column("flops_per_token", "FLOPs a token", lambda v: f"{v:.5g}", "right"),
        Column("peak_flops_per_s", "peak", _tera, "right"),
        Column("formula", "formula"),
        Column("source", "source", wraps=True),
    ]
