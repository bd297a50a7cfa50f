"""Options for the layout and the training that mean the same on several verbs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass
from typing import Annotated, ClassVar

import typer

from paceline.cli import quantities
from paceline.cli.options import Panel
from paceline.core.axes import AXES
from paceline.core.errors import UserError, unknown_name
from paceline.core.layout import AXIS_FIELDS, MODEL_AXES, Layout

SHORT_NAMES = {
    "zero": "zero_stage",
    "mbs": "micro_batch",
    "micro-batch": "micro_batch",
    "micro_batch_size": "micro_batch",
    "sp": "sequence_parallel",
}
"""Short names of layout fields, as on the command line and in reports."""
FIELD_OF = {
    **{axis: f"layout.{axis}" for axis in AXIS_FIELDS},
    "zero": "layout.zero_stage",
    "mbs": "layout.micro_batch",
    "recompute": "layout.recompute",
    "gbs": "training.global_batch",
    "seq_len": "training.seq_len",
    "dtype": "training.dtype",
    "steps": "training.steps",
}
_PRINTED = re.compile(r"([A-Za-z][\w-]*)[ =]+([\w.]+)")


def _size(text: str) -> object:
    return typer.Option(
        parser=quantities.whole_number, metavar="N", help=text, rich_help_panel=Panel.recipe
    )


@dataclass(frozen=True)
class TrainingOptions:
    """Settings of the training; each overrides the recipe's."""

    panel: ClassVar[Panel] = Panel.recipe
    gbs: Annotated[int | None, _size("Global batch size, in sequences.")] = None
    seq_len: Annotated[
        int | None,
        typer.Option(
            parser=quantities.sequence_length,
            metavar="TOKENS",
            help="Sequence length in tokens, e.g. 8k.",
        ),
    ] = None
    dtype: Annotated[str | None, typer.Option(help="Data type of the GEMMs, e.g. bf16.")] = None

    @property
    def overrides(self) -> tuple[str, ...]:
        """The options as overrides of recipe fields."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return tuple(
            f"{FIELD_OF[name]}={value}"
            for name, value in values.items()
            if value is not None and name in FIELD_OF
        )


AxisOptions: type[TrainingOptions] = make_dataclass(
    "AxisOptions",
    [
        (axis.name, Annotated[int | None, _size(f"Number of {axis.size_name}.")], None)
        for axis in AXES
        if axis.name in AXIS_FIELDS
    ],
    bases=(TrainingOptions,),
    frozen=True,
)
"""Options of TrainingOptions and the size of each axis that is a field of a layout."""


@dataclass(frozen=True)
class LayoutOptions(AxisOptions):
    """Layout and settings of the training; each overrides the recipe's."""

    dp: Annotated[int | None, _size("Data-parallel size; it determines the number of GPUs.")] = None
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage, 0 to 3.")] = None
    mbs: Annotated[int | None, _size("Micro-batch size, in sequences.")] = None
    steps: Annotated[int | None, _size("Number of training steps.")] = None
    recompute: Annotated[
        str | None, typer.Option(help="Activation checkpointing: none, selective or full.")
    ] = None


def devices_per_host(
    gpus: int | None, dp: int | None, layout: Layout, per_host: int | None, hosts: int
) -> int | None:
    """Return the devices per host for a total number of GPUs, or for `dp` replicas of a layout.

    Raises UserError for a total that the hosts do not share evenly.
    """
    total = devices_of_layout(layout, dp, gpus)
    if total is None:
        return per_host
    if total % hosts or (per_host is not None and per_host * hosts != total):
        raise UserError(
            f"--gpus {total}" if gpus else f"--dp {dp}",
            f"is not the same number on each of {hosts:,} hosts"
            if per_host is None
            else f"is not {per_host} on each of {hosts:,} hosts",
            remedy="leave out --gpus-per-node, or change --nodes",
        )
    return total // hosts


def parse_layout(text: str | None) -> tuple[list[str], int | None]:
    """Return `--layout` as recipe fields, and its data-parallel size.

    Both `tp=4,zero_stage=1` and the printed form `dp 8 tp 4 zero 1` are understood. Raises
    UserError for another text.
    """
    where = f"--layout {text}"
    pairs = _PRINTED.findall(text or "")
    remainder = _PRINTED.sub("", text or "").replace(",", " ").strip()
    if remainder:
        raise UserError(
            where, "is not AXIS=N,...", allowed="tp=4,pp=4,zero=1, or as printed: dp 8 tp 4 zero 1"
        )
    settings: dict[str, str] = {}
    for short, value in pairs:
        name = SHORT_NAMES.get(short, short.replace("-", "_"))
        if name != "dp" and name not in Layout.model_fields:
            names = ("dp", *AXIS_FIELDS, "zero", "mbs", "recompute")
            aliases = (*SHORT_NAMES, *Layout.model_fields)
            what = f"{short} is not part of a layout"
            raise unknown_name(where, what, short, names, aliases=aliases)
        if name in settings:
            raise UserError(
                where, f"sets {short} twice", allowed="each axis once", remedy="leave one out"
            )
        settings[name] = value
    dp = settings.pop("dp", None)
    if dp is not None and not (dp.isdigit() and int(dp)):
        raise UserError(where, f"dp {dp} is not a size", allowed="a whole number")
    return [f"layout.{name}={value}" for name, value in settings.items()], int(dp) if dp else None


def devices_of_layout(layout: Layout, dp: int | None, gpus: int | None) -> int | None:
    """Return the number of devices of a layout with `dp` replicas.

    Raises UserError if it is not `gpus`.
    """
    if dp is None:
        return gpus
    devices = dp * layout.model_devices
    if gpus is not None and gpus != devices:
        raise UserError(
            f"--dp {dp}",
            f"with {layout.label(devices)} is {devices:,} GPUs, not {gpus:,}",
            remedy="leave out --dp or --gpus",
        )
    return devices


def other_axes_of_one(layout: Layout, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return overrides that set the axes of a layout to 1 that `overrides` do not name."""
    names = _field_names(overrides)
    reset = [
        name
        for name in (*MODEL_AXES, "vp")
        if getattr(layout, name) > 1 and name not in names and "layout" not in names
    ]
    changes = [f"layout.{name}=1" for name in reset]
    if layout.sequence_parallel and "tp" in reset:
        changes.append("layout.sequence_parallel=false")
    if layout.schedule != "1f1b" and "pp" in reset:
        changes.append("layout.schedule=1f1b")
    return tuple(changes)


def without_other_axes(
    layout: Layout, overrides: Sequence[str], devices: int
) -> tuple[tuple[str, ...], str | None]:
    """Return overrides that set the unnamed axes to 1 if the layout does not divide the devices.

    Only if an axis is named: then the recipe's other axes were meant for another cluster. The note
    says what changed.
    """
    if _field_names(overrides).isdisjoint(AXIS_FIELDS) or devices % layout.model_devices == 0:
        return tuple(overrides), None
    changes = other_axes_of_one(layout, overrides)
    names = [change.removeprefix("layout.").partition("=")[0] for change in changes]
    axes = " ".join(f"{name} {getattr(layout, name)}" for name in names if name in AXIS_FIELDS)
    if not axes:
        return tuple(overrides), None
    note = f"{axes} of the recipe does not fit {devices:,} GPUs; 1 is used"
    return (*changes, *overrides), note


def _field_names(overrides: Sequence[str]) -> set[str]:
    names = {change.partition("=")[0].strip() for change in overrides}
    return {name.removeprefix("layout.") for name in names}
