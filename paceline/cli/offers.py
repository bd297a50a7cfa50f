"""`--compare` of `paceline estimate`: another offer as changes of the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.estimate.estimate import Question

KINDS = {"device": str, "gpus": int, "price": float, "per_node": int, "intra": str, "inter": str}
FIELDS = {
    "gpus": "devices", "per_node": "devices_per_node", "intra": "intra_link", "inter": "inter_link",
}  # fmt: skip
"""Of a question, where they are called otherwise."""
LEAST = {"gpus": 1, "per_node": 1, "price": 0}


def offer(first: Question, text: str) -> Question:
    """The question with an offer's changes; raises UserError for what is no offer."""
    from dataclasses import replace

    changes = dict(_change(text, part) for part in text.split(","))
    price = changes.pop("price", None)
    if price is not None:
        changes["prices"] = first.prices.model_copy(update={"per_device_hour": price})
    return replace(first, **{FIELDS.get(key, key): value for key, value in changes.items()})


def _change(text: str, part: str) -> tuple[str, Any]:
    """One `key=value` of an offer."""
    from math import isfinite

    from paceline.core.errors import UserError

    key, _, word = (piece.strip() for piece in part.partition("="))
    try:
        value = KINDS[key](word)
        if key in LEAST and not (isfinite(value) and value >= LEAST[key]):
            raise ValueError
    except (KeyError, ValueError) as error:
        raise UserError(f"--compare {text}", f"{part!r} cannot be read",
                        allowed=", ".join(KINDS)) from error  # fmt: skip
    return key, value
