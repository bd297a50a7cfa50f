"""What `paceline estimate` is asked of the whole training, and of other offers beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, TypedDict

import typer

from paceline.core.errors import UserError
from paceline.core.units import LARGEST_INT
from paceline.estimate.costs import Failures, Prices
from paceline.estimate.question import Question
from paceline.files import catalog

Tokens = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Tokens of the whole training, e.g. 15e12, for days and money; default the recipe's, "
        "1e12 where it names none; a recipe may say null, as fine-tuning does.",
    ),
]
Price = Annotated[float | None, typer.Option(min=0, help="Of a device hour, in any currency.")]
SpotPrice = Annotated[
    float | None,
    typer.Option(min=0, help="Of an interruptible device hour."),
]
Pue = Annotated[
    float,
    typer.Option(min=1, help="The site's energy over its machines'."),
]
Carbon = Annotated[
    float | None,
    typer.Option(min=0, metavar="G_PER_KWH", help="Of the electricity."),
]
Mtbf = Annotated[
    float | None,
    typer.Option(min=1, metavar="HOURS", help="Between failures of one device."),
]
Restart = Annotated[
    float | None,
    typer.Option(min=0, metavar="SECONDS", help="After a failure; default 600."),
]
Checkpoint = Annotated[
    float | None,
    typer.Option(min=0, metavar="SECONDS", help="A checkpoint keeps waiting; default 30."),
]
CheckpointEvery = Annotated[
    float | None,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="Of training between two checkpoints; default Young's interval, which loses least.",
    ),
]


RESTART_S, CHECKPOINT_S = 600.0, 30.0
"""Of failures, where nobody says more."""


class Costs(TypedDict):
    """What is asked about the whole training, as a question has it."""

    tokens: float | None
    prices: Prices
    failures: Failures | None


def prices(
    price: float | None, spot_price: float | None, pue: float, carbon: float | None
) -> Prices:
    """What the options say of money and energy; raises BadParameter for what is not finite."""
    return Prices(
        per_device_hour=price, spot_per_device_hour=spot_price, pue=pue, carbon_g_per_kwh=carbon
    )


def failures(
    mtbf: float | None, restart: float | None, checkpoint: float | None, every: float | None
) -> Failures | None:
    """Failures as far as they are known; raises UserError for what counts with them, without."""
    if mtbf is None:
        given = {"--checkpoint-every": every, "--checkpoint": checkpoint, "--restart": restart}
        for option in (name for name, value in given.items() if value is not None):
            raise UserError(option, "counts with failures alone", remedy="add --mtbf")
        return None
    return Failures(
        device_mtbf_h=mtbf,
        restart_s=RESTART_S if restart is None else restart,
        checkpoint_s=CHECKPOINT_S if checkpoint is None else checkpoint,
        interval_s=every,
    )


KINDS = {"device": str, "gpus": int, "price": float, "per_node": int, "intra": str, "inter": str}
FIELDS = {
    "gpus": "devices",
    "per_node": "devices_per_node",
    "intra": "intra_link",
    "inter": "inter_link",
}
"""Of a question, where they are called otherwise."""
LEAST = {"gpus": 1, "per_node": 1, "price": 0}
ALLOWED = {
    "device": "a name that `paceline devices` lists",
    "gpus": f"whole numbers from 1 to {LARGEST_INT:,}",
    "price": f"numbers from 0 to {LARGEST_INT:,}",
    "per_node": f"whole numbers from 1 to {LARGEST_INT:,}",
    "intra": "a link, or a rate: 450 GB/s",
    "inter": "a network, or a rate: 8x400 Gb/s",
}


def offer(first: Question, text: str) -> Question:
    """The question with an offer's changes; raises UserError for what is no offer."""
    changes = dict(_change(text, part) for part in text.split(","))
    _check_links(text, changes)
    price = changes.pop("price", None)
    if price is not None:
        changes["prices"] = first.prices.model_copy(update={"per_device_hour": price})
    return replace(first, **{FIELDS.get(key, key): value for key, value in changes.items()})


def _check_links(text: str, changes: dict[str, Any]) -> None:
    """Raises UserError for a link in the place of another kind, by the offer's own words."""
    for place, other in catalog.OTHER_PLACE.items():
        name = changes.get(place)
        if words := catalog.misplaced(name, place):
            raise UserError(
                f"--compare {text}",
                f"{place} {name} is {words}",
                allowed=f"{catalog.LINK_ALLOWED}, or a rate",
                remedy=f"{other}={name} says it",
            )


def _change(text: str, part: str) -> tuple[str, Any]:
    """One `key=value` of an offer."""
    key, _, word = (piece.strip() for piece in part.partition("="))
    where = f"--compare {text}"
    if key not in KINDS:
        raise UserError(where, f"{part!r} is no KEY=VALUE of an offer", allowed=", ".join(KINDS))
    try:
        value = KINDS[key](word)
        if not word or (key in LEAST and not LEAST[key] <= value <= LARGEST_INT):
            raise ValueError
    except ValueError as error:
        raise UserError(where, f"{key} is {word!r}", allowed=ALLOWED[key]) from error
    return key, value
