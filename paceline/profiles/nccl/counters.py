"""What the native trainer counted at its process groups: traffic/rank-NNNNN.jsonl, schema 1."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from paceline.core.problem import refusal
from paceline.core.traffic import Collective
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.documents import read_lines
from paceline.profiles.nccl.communication import Communication, Membership, Tally


class TrafficStart(Value):
    """A rank's first line."""

    event: Literal["start"]
    schema_version: Literal[1] = Field(alias="schema")
    rank: NonNegativeInt
    world_size: PositiveInt
    backend: str | None = None
    axes: dict[str, tuple[NonNegativeInt, ...]] = {}
    """World ranks along each axis."""


class CountedMessage(Value):
    """Calls of one size in one step."""

    axis: str
    collective: Collective
    ranks: PositiveInt
    num_bytes: NonNegativeInt = Field(alias="bytes")
    calls: PositiveInt


class TrafficStep(Value):
    """What one step of a rank exchanged."""

    event: Literal["traffic"]
    step: PositiveInt
    messages: tuple[CountedMessage, ...]


def read_counters(
    paths: Iterable[Path], first_step: int = 1, last_step: int | None = None
) -> tuple[Communication, frozenset[int]]:
    """(the table of those steps, the ranks that counted); a torn last line is left out.

    Raises UserError for a file of something else.
    """
    tally, ranks, steps, torn = Tally(), set[int](), set[int](), 0
    world_ranks: dict[str, tuple[int, ...]] = {}
    for path in paths:
        start: TrafficStart | None = None
        for number, line in enumerate(read_lines(path), start=1):
            try:
                if start is None:
                    start = TrafficStart.model_validate(json.loads(line))
                    ranks.add(start.rank)
                    continue
                step = TrafficStep.model_validate(json.loads(line))
            except ValidationError as error:
                raise refusal(f"{path}:{number}", error) from error
            except ValueError:
                torn += 1
                continue
            if step.step < first_step or (last_step is not None and step.step > last_step):
                continue
            steps.add(step.step)
            for message in step.messages:
                members = start.axes.get(message.axis, ())
                name = f"{message.axis} {members}"
                world_ranks[name] = members
                process = f"rank {start.rank}"
                member = Membership(process, name, message.ranks, start.rank, message.axis)
                tally.add(member, message.collective, message.num_bytes, message.calls)
    table = Communication(
        source="trainer counters",
        ranks=len(ranks),
        steps=len(steps) or None,
        rows=tally.rows(world_ranks),
        torn_lines=torn,
    )
    return table, frozenset(ranks)
