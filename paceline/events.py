"""The trainer's event lines: one JSON object a line, one file a rank.

Schema 1. A `start` line when training begins, a `step` line per optimizer step, an `end` line with
the status. A run that was killed has no `end` line and at most one torn last line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, TypeAdapter, ValidationError

from paceline.core.steps import Step
from paceline.core.value import Value

SCHEMA = 1


class MemoryBytes(Value):
    """Peaks so far, by kind; None where the device has no such count."""

    allocated: NonNegativeFloat | None = None
    reserved: NonNegativeFloat | None = None
    resident: NonNegativeFloat | None = None


class StartEvent(Value):
    """The first line of a rank: what it is and runs."""

    event: Literal["start"] = "start"
    # A mapping named `schema` would shadow pydantic's own attribute, hence the alias.
    schema_version: Literal[1] = Field(alias="schema")
    rank: NonNegativeInt
    world_size: NonNegativeInt
    local_rank: NonNegativeInt
    host: str
    pid: NonNegativeInt
    time_unix: float
    """When training was ready to begin."""
    torch: str
    python: str
    cuda: str | None
    backend: str | None
    device_name: str
    num_parameters: NonNegativeInt
    trainable_parameters: NonNegativeInt
    layout: dict[str, Any]
    dtype: str
    matmul_precision: str
    threads: NonNegativeInt | None
    data: dict[str, Any]


class StepEvent(Value):
    """One optimizer step of one rank; tokens and samples are this rank's own."""

    event: Literal["step"] = "step"
    step: NonNegativeInt
    loss: float | None
    grad_norm: float | None
    tokens: NonNegativeFloat
    samples: NonNegativeFloat
    global_batch: NonNegativeInt
    seq_len: NonNegativeInt
    step_time_s: NonNegativeFloat
    busy_time_s: NonNegativeFloat
    """The step minus the time blocked in collectives."""
    comm_wait_s: NonNegativeFloat
    data_wait_s: NonNegativeFloat
    memory_bytes: MemoryBytes
    skipped: bool = False


class EndEvent(Value):
    """The last line of a rank that ended on its own terms."""

    event: Literal["end"] = "end"
    status: Literal["ok", "oom", "nan", "failed"]
    reason: str | None
    steps: NonNegativeInt
    time_unix: float


Event = StartEvent | StepEvent | EndEvent
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def read_events(lines: Iterable[str]) -> Iterator[Event]:
    """The events in `lines`; what is no event (a torn or foreign line) is passed over."""
    for line in lines:
        if not line.startswith("{"):
            continue
        try:
            yield _EVENT.validate_python(json.loads(line))
        except (json.JSONDecodeError, ValidationError):
            continue


@dataclass(frozen=True)
class RankLog:
    """What one rank's event lines say; None = it did not come that far."""

    start: StartEvent | None
    steps: tuple[Step, ...]
    end: EndEvent | None


def read_rank(lines: Iterable[str]) -> RankLog:
    """Everything in one rank's event lines."""
    start: StartEvent | None = None
    end: EndEvent | None = None
    found: list[Step] = []
    for event in read_events(lines):
        if isinstance(event, StartEvent):
            start = event
        elif isinstance(event, EndEvent):
            end = event
        else:
            found.append(to_step(event))
    return RankLog(start, tuple(found), end)


def to_step(event: StepEvent) -> Step:
    """The event as the Step that all log dialects share."""
    memory = event.memory_bytes
    return Step(
        index=event.step,
        step_time_s=event.step_time_s,
        loss=event.loss,
        grad_norm=event.grad_norm,
        tokens=event.tokens,
        samples=event.samples,
        global_batch=event.global_batch,
        seq_len=event.seq_len,
        busy_time_s=event.busy_time_s,
        comm_wait_s=event.comm_wait_s,
        data_wait_s=event.data_wait_s,
        allocated_bytes=memory.allocated,
        reserved_bytes=memory.reserved,
        resident_bytes=memory.resident,
        skipped=event.skipped,
    )
