"""The trainer's event lines: one JSON object a line, one file a rank.

Schema 1. A `start` line when training begins, a `step` line per optimizer step, an `end` line with
the status. A run that was killed has no `end` line and at most one torn last line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, TypeAdapter, ValidationError

from paceline.core.steps import Step
from paceline.core.value import Value

SCHEMA = 1
LARGEST_STEP = 2**53
EVENT_BEGINS = '{"event"'
"""How the trainer's lines begin, torn ones included."""


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
    step: Annotated[int, Field(ge=0, le=LARGEST_STEP)]
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


@dataclass
class Unread:
    """Event lines that were passed over."""

    lines: int = 0
    newest_schema: int | None = None
    """The largest schema beyond ours that a start line has."""

    @property
    def sentence(self) -> str | None:
        """What the reader must know of it; None when every line was understood."""
        if self.newest_schema is not None:
            return (
                f"the event lines are of schema {self.newest_schema} and this version knows schema "
                f"{SCHEMA}: {self.lines:,} of them were passed over; update Paceline"
            )
        if not self.lines:
            return None
        what = "1 event line is" if self.lines == 1 else f"{self.lines:,} event lines are"
        return f"{what} not valid in schema {SCHEMA} and passed over"


def read_events(lines: Iterable[str], unread: Unread | None = None) -> Iterator[Event]:
    """The events in `lines`; what is no event line is passed over, what is no valid one counted.

    A last line that is torn is neither: that is how the file of a killed or running rank ends.
    """
    unread = unread or Unread()
    torn = False
    for line in lines:
        if not line.startswith("{"):
            continue
        unread.lines += torn
        torn = False
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            torn = line.startswith(EVENT_BEGINS)
            continue
        if not isinstance(fields, dict) or "event" not in fields:
            continue
        try:
            yield _EVENT.validate_python(fields)
        except (ValidationError, OverflowError):
            _count(fields, unread)


def _count(fields: dict[str, Any], unread: Unread) -> None:
    unread.lines += 1
    schema = fields.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        unread.newest_schema = max(schema, unread.newest_schema or 0)


@dataclass(frozen=True)
class RankLog:
    """What one rank's event lines say; None = it did not come that far."""

    start: StartEvent | None
    steps: tuple[Step, ...]
    end: EndEvent | None
    unread: Unread = field(default_factory=Unread)


def read_rank(lines: Iterable[str]) -> RankLog:
    """Everything in one rank's event lines."""
    start: StartEvent | None = None
    end: EndEvent | None = None
    found: list[Step] = []
    unread = Unread()
    for event in read_events(lines, unread):
        if isinstance(event, StartEvent):
            start = event
        elif isinstance(event, EndEvent):
            end = event
        else:
            found.append(to_step(event))
    return RankLog(start, tuple(found), end, unread)


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
