"""The second pass: each suspect beside nodes that have proved themselves, which it must slow down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.scaling.blame import Blame, Judged
from paceline.core.scaling.measured import Measured

PARTNERS = 2
"""Proven nodes that a suspect is paired with, so that no partner can be its excuse."""
CONTROLS = 4
"""Pairs of proven nodes measured at the same time."""
PROVEN_Z = -2.0
SHOWN = 0.5
"""Share of its loss alone that every pair of a slow node must show."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Confirmation:
    """What a suspect's pairs say."""

    host: str
    confirmed: bool | None
    """None without enough pairs to tell."""
    loss: float | None
    """Mean loss of its pairs against pairs of proven nodes."""


def proven_hosts(blame: Blame) -> list[str]:
    """Hosts that are surely not slow, the most ordinary first."""
    sound = [n for n in blame.nodes if not n.flagged and n.z is not None and n.z > PROVEN_Z]
    return [node.host for node in sorted(sound, key=lambda node: abs(node.z or 0.0))]


def second_pass(blame: Blame) -> list[list[Pair]]:
    """Rounds of pairs: every flagged node with a proven one, another one in each round.

    Four pairs of proven nodes run beside them, as far as there are any. Empty without flagged nodes
    or without proven ones for all.
    """
    suspects = [node.host for node in blame.flagged]
    proven = proven_hosts(blame)
    if not suspects or len(proven) < len(suspects):
        return []
    rounds: list[list[Pair]] = []
    for number in range(PARTNERS):
        turn = number * len(suspects) % len(proven)
        order = [*proven[turn:], *proven[:turn]]
        partners, rest = order[: len(suspects)], order[len(suspects) :][: 2 * CONTROLS]
        controls = list(zip(rest[::2], rest[1::2], strict=False))
        rounds.append([*zip(suspects, partners, strict=True), *controls])
    return rounds


def confirmations(blame: Blame, measured: Sequence[Measured]) -> list[Confirmation]:
    """Every flagged node by its pairs: confirmed when each shows more than half of its loss alone.

    The controls are all pairs without a flagged node; their median counts.
    """
    suspects = {node.host for node in blame.flagged}
    pairs = [one for one in measured if one.nodes == 2 and one.samples_per_s is not None]
    controls = [one.samples_per_s for one in pairs if not suspects & set(one.hosts)]
    centre = float(np.median([value for value in controls if value])) if controls else None
    return [_of(node, pairs, suspects, centre) for node in blame.flagged]


def _of(
    node: Judged, pairs: Sequence[Measured], suspects: set[str], centre: float | None
) -> Confirmation:
    own = [
        one.samples_per_s or 0.0
        for one in pairs
        if one.purpose == "second pass" and suspects & set(one.hosts) == {node.host}
    ]
    if not own or centre is None:
        return Confirmation(node.host, None, None)
    losses = [1 - value / centre for value in own]
    return Confirmation(node.host, min(losses) > SHOWN * node.loss, float(np.mean(losses)))
