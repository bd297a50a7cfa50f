"""Reader of the native trainer's traffic counters: traffic/rank-NNNNN.jsonl, schema 1."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from paceline.core.problem import invalid_input
from paceline.core.traffic import Collective
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.documents import read_lines
from paceline.profiles.nccl.communication import Communication, Membership, Tally


class TrafficStart(Value):
    """First line of a rank's file."""

    event: Literal["start"]
    schema_version: Literal[1] = Field(alias="schema")
    rank: NonNegativeInt
    world_size: PositiveInt
    backend: str | None = None
    axes: dict[str, tuple[NonNegativeInt, ...]] = {}
    """World ranks along each axis."""


class CountedMessage(Value):
    """Calls of one message size in one step."""

    axis: str
    collective: Collective
    ranks: PositiveInt
    num_bytes: NonNegativeInt = Field(alias="bytes")
    calls: PositiveInt


class TrafficStep(Value):
    """Traffic of one step of a rank."""

    event: Literal["traffic"]
    step: PositiveInt
    messages: tuple[CountedMessage, ...]


def read_counters(
    paths: Iterable[Path], first_step: int = 1, last_step: int | None = None
) -> tuple[Communication, frozenset[int]]:
    """Return (traffic of those steps, ranks with counters); an incomplete last line is skipped.

    Raises UserError for a file of another format.
    """
    tally, ranks, steps, num_incomplete = Tally(), set[int](), set[int](), 0
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
                raise invalid_input(f"{path}:{number}", error) from error
            except ValueError:
                num_incomplete += 1
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
        torn_lines=num_incomplete,
    )
    return table, frozenset(ranks)
