"""Options for the length, the prices and the failures of a whole training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypedDict

import typer

from paceline.cli import quantities
from paceline.core.errors import UserError
from paceline.estimate.costs import CHECKPOINT_S, RESTART_S, Failures, Prices


class Costs(TypedDict):
    """Cost inputs of an estimate request."""

    tokens: float | None
    prices: Prices
    failures: Failures | None


@dataclass(frozen=True)
class CostOptions:
    """Length, prices and failures of a training."""

    panel: ClassVar[str] = "Cost"
    tokens: Annotated[
        float | None,
        typer.Option(
            parser=quantities.tokens,
            metavar="N",
            help="Tokens of the whole training, e.g. 15T; default: as in the recipe, else 1T.",
        ),
    ] = None
    price: Annotated[
        Any,
        typer.Option(
            parser=quantities.money,
            metavar="MONEY",
            help="Price per GPU-hour, e.g. $2.5; in any currency.",
        ),
    ] = None
    spot_price: Annotated[
        Any,
        typer.Option(
            parser=quantities.money,
            metavar="MONEY",
            help="Price per GPU-hour of interruptible (spot) capacity.",
        ),
    ] = None
    pue: Annotated[float, typer.Option(min=1, help="Power usage effectiveness of the site.")] = 1.0
    carbon: Annotated[
        float | None,
        typer.Option(min=0, metavar="G_PER_KWH", help="Carbon intensity of the electricity."),
    ] = None
    mtbf: Annotated[
        float | None,
        typer.Option(
            parser=quantities.hours,
            metavar="TIME",
            help="Mean time between failures of one device, e.g. 50k (hours) or 5 years.",
            rich_help_panel="Failures",
        ),
    ] = None
    restart_time: Annotated[
        float | None,
        typer.Option(
            parser=quantities.seconds,
            metavar="TIME",
            help="Time from a failure to the next training step (default 600s).",
            rich_help_panel="Failures",
        ),
    ] = None
    checkpoint_time: Annotated[
        float | None,
        typer.Option(
            parser=quantities.seconds,
            metavar="TIME",
            help="Time that training stops for a checkpoint (default 30s).",
            rich_help_panel="Failures",
        ),
    ] = None
    checkpoint_interval: Annotated[
        float | None,
        typer.Option(
            parser=quantities.seconds,
            metavar="TIME",
            help="Training time between two checkpoints; default: Young's optimal interval.",
            rich_help_panel="Failures",
        ),
    ] = None

    @property
    def costs(self) -> Costs:
        """Tokens, prices and failures as fields of an estimate request."""
        price, currency = self.price or (None, "")
        spot_price, spot_currency = self.spot_price or (None, "")
        prices = Prices(
            per_device_hour=price,
            spot_per_device_hour=spot_price,
            currency=currency or spot_currency,
            pue=self.pue,
            carbon_g_per_kwh=self.carbon,
        )
        return Costs(tokens=self.tokens, prices=prices, failures=self._failures())

    def _failures(self) -> Failures | None:
        """Return the failure settings; raise UserError for one without --mtbf."""
        if self.mtbf is None:
            settings = {
                "--checkpoint-interval": self.checkpoint_interval,
                "--checkpoint-time": self.checkpoint_time,
                "--restart-time": self.restart_time,
            }
            for option in (name for name, value in settings.items() if value is not None):
                raise UserError(option, "has an effect only with failures", remedy="add --mtbf")
            return None
        return Failures(
            device_mtbf_h=self.mtbf,
            restart_s=RESTART_S if self.restart_time is None else self.restart_time,
            checkpoint_s=CHECKPOINT_S if self.checkpoint_time is None else self.checkpoint_time,
            interval_s=self.checkpoint_interval,
        )
