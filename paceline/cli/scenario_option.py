"""Scenarios of `paceline estimate --compare`: settings that replace those of the first one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import typer

from paceline.cli import quantities
from paceline.cli.layout_options import FIELD_OF
from paceline.core.errors import UserError, unknown_name
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
    "variant": _ScenarioKey("variant", str, "a variant of the recipe"),
}
ALIASES = {"gpu": "device", "devices": "gpus", "gpus_per_node": "per_node"}
OVERRIDE_KEYS = {key: field for key, field in FIELD_OF.items() if key != "steps"}
"""Options for the layout and the training, which override a field of the recipe."""
_QUANTITIES = {"seq_len": quantities.sequence_length, "gbs": quantities.whole_number}


def scenario(first: EstimateRequest, text: str) -> EstimateRequest:
    """Return the request with a scenario's changes; raise UserError for invalid ones."""
    changes: dict[str, Any] = {}
    overrides: list[str] = []
    for part in text.split(","):
        key, _, word = (piece.strip() for piece in part.partition("="))
        name = key.lower().replace("-", "_")
        if field := OVERRIDE_KEYS.get(name, key if "." in key else None):
            overrides.append(f"{field}={_override(text, name, word)}")
        else:
            name = ALIASES.get(name, name)
            changes[name] = _parsed_setting(text, part, name, word)
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
    network = None if "inter" in changes else first.network
    fields = {SCENARIO_KEYS[key].field: value for key, value in changes.items()}
    return replace(first, **fields, network=network, overrides=(*first.overrides, *overrides))


def _override(text: str, name: str, word: str) -> object:
    """Return the value of a layout or training setting as a recipe has it."""
    if not word:
        raise UserError(f"--compare {text}", f"{name} has no value", allowed=f"{name}=VALUE")
    try:
        return _QUANTITIES[name](word) if name in _QUANTITIES else word
    except typer.BadParameter as error:
        raise UserError(f"--compare {text}", f"{name}: {error.message}") from error


def _parsed_setting(text: str, part: str, key: str, word: str) -> Any:
    """Return the value of one `key=value` of a scenario."""
    where = f"--compare {text}"
    if key not in SCENARIO_KEYS:
        what = f"{part!r} is not a KEY=VALUE pair of a scenario, e.g. dtype=fp8"
        raise unknown_name(where, what, key, (*SCENARIO_KEYS, *OVERRIDE_KEYS))
    setting = SCENARIO_KEYS[key]
    try:
        value = parse_money(word)[0] if key == "price" else setting.type(word)
        if not word:
            raise ValueError
        if not isinstance(value, str) and not setting.minimum <= value <= LARGEST_INT:
            raise ValueError
    except ValueError as error:
        raise UserError(where, f"{key} is {word!r}", allowed=setting.allowed) from error
    return value
