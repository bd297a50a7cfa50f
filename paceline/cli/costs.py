"""Options of `paceline estimate` about the whole training: its length, money, energy and failures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

if TYPE_CHECKING:
    from paceline.estimate.costs import Failures, Prices

MONEY, FAILING = "Cost", "Failures"

Tokens = Annotated[
    float | None, typer.Option(min=1, help="Tokens of the whole training, e.g. 15e12.")
]
Price = Annotated[
    float | None, typer.Option(min=0, help="Of a device hour.", rich_help_panel=MONEY)
]
SpotPrice = Annotated[
    float | None,
    typer.Option(min=0, help="Of an interruptible device hour.", rich_help_panel=MONEY),
]
Pue = Annotated[
    float,
    typer.Option(min=1, help="The site's energy over its machines'.", rich_help_panel=MONEY),
]
Carbon = Annotated[
    float | None,
    typer.Option(min=0, metavar="G_PER_KWH", help="Of the electricity.", rich_help_panel=MONEY),
]
Mtbf = Annotated[
    float | None,
    typer.Option(
        min=1, metavar="HOURS", help="Between failures of one device.", rich_help_panel=FAILING
    ),
]
Restart = Annotated[
    float,
    typer.Option(min=0, metavar="SECONDS", help="After a failure.", rich_help_panel=FAILING),
]
Checkpoint = Annotated[
    float,
    typer.Option(
        min=0, metavar="SECONDS", help="A checkpoint keeps waiting.", rich_help_panel=FAILING
    ),
]
CheckpointEvery = Annotated[
    float | None,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="Of training between two checkpoints; default Young's interval, which loses least.",
        rich_help_panel=FAILING,
    ),
]


class Costs(TypedDict):
    """What is asked about the whole training, as a question has it."""

    tokens: float | None
    prices: Prices
    failures: Failures | None


def prices(
    price: float | None, spot_price: float | None, pue: float, carbon: float | None
) -> Prices:
    """What the options say of money and energy; raises BadParameter for what is not finite."""
    from paceline.estimate.costs import Prices

    finite({"--price": price, "--spot-price": spot_price, "--pue": pue, "--carbon": carbon})
    return Prices(per_device_hour=price, spot_per_device_hour=spot_price, pue=pue,
                  carbon_g_per_kwh=carbon)  # fmt: skip


def failures(
    mtbf: float | None, restart: float, checkpoint: float, every: float | None
) -> Failures | None:
    """Failures as far as they are known; raises UserError for an interval without them."""
    from paceline.core.errors import UserError
    from paceline.estimate.costs import Failures

    finite({"--mtbf": mtbf, "--restart": restart, "--checkpoint": checkpoint,
            "--checkpoint-every": every})  # fmt: skip
    if mtbf is None:
        if every is not None:
            raise UserError("--checkpoint-every", "counts with failures alone", remedy="add --mtbf")
        return None
    return Failures(
        device_mtbf_h=mtbf, restart_s=restart, checkpoint_s=checkpoint, interval_s=every
    )


def finite(numbers: dict[str, float | None]) -> None:
    """Raises BadParameter for an option that is no finite number."""
    from math import isfinite

    for name, value in numbers.items():
        if value is not None and not isfinite(value):
            raise typer.BadParameter("must be a finite number", param_hint=name)
