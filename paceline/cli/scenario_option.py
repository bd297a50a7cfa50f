"""Scenarios of `paceline estimate --compare`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from paceline.core.errors import UserError
from paceline.core.quantity import MONEY_FORMS, parse_money
from paceline.core.units import LARGEST_INT
from paceline.estimate.request import EstimateRequest
from paceline.files import catalog


class _ScenarioKey(NamedTuple):
    """Setting of a scenario: its field of the request and its allowed values."""

    field: str
    type: type[str | int | float]
    allowed: str
    minimum: int = 0


_WHOLE_NUMBERS = f"whole numbers from 1 to {LARGEST_INT:,}"
SCENARIO_KEYS = {
    "device": _ScenarioKey("device", str, "a name listed by `paceline recipes devices`"),
    "gpus": _ScenarioKey("devices", int, _WHOLE_NUMBERS, 1),
    "price": _ScenarioKey("prices", float, MONEY_FORMS),
    "per_node": _ScenarioKey("devices_per_node", int, _WHOLE_NUMBERS, 1),
    "intra": _ScenarioKey("intra_link", str, "a link, or a bandwidth: 450 GB/s"),
    "inter": _ScenarioKey("inter_link", str, "a network, or a bandwidth: 8x400 Gb/s"),
}


def scenario(first: EstimateRequest, text: str) -> EstimateRequest:
    """Return the request with a scenario's changes; raise UserError for invalid ones."""
    changes = dict(_parsed_setting(text, part) for part in text.split(","))
    for place, other in catalog.OTHER_PLACE.items():
        name = changes.get(place)
        if words := catalog.link_place_problem(name, place):
            raise UserError(
                f"--compare {text}",
                f"{place} {name} is {words}",
                allowed=f"{catalog.LINK_ALLOWED}, or a bandwidth",
                remedy=f"use {other}={name}",
            )
    if "price" in changes:
        price = {"per_device_hour": changes["price"]}
        changes["price"] = first.prices.model_copy(update=price)
    return replace(first, **{SCENARIO_KEYS[key].field: value for key, value in changes.items()})


def _parsed_setting(text: str, part: str) -> tuple[str, Any]:
    """Return key and value of one `key=value` of a scenario."""
    key, _, word = (piece.strip() for piece in part.partition("="))
    where = f"--compare {text}"
    if key not in SCENARIO_KEYS:
        keys = ", ".join(SCENARIO_KEYS)
        raise UserError(where, f"{part!r} is not a KEY=VALUE pair of a scenario", allowed=keys)
    setting = SCENARIO_KEYS[key]
    try:
        value = parse_money(word)[0] if key == "price" else setting.type(word)
        if not word:
            raise ValueError
        if not isinstance(value, str) and not setting.minimum <= value <= LARGEST_INT:
            raise ValueError
    except ValueError as error:
        raise UserError(where, f"{key} is {word!r}", allowed=setting.allowed) from error
    return key, value
