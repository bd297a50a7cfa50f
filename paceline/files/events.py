"""Event lines of the native trainer and of `paceline.steplog`: a JSON object a line, a file a rank.

What a program of somebody else cannot tell is left out or null: None, never a guess.
Schema 1. A `start` line when training begins, a `step` line per optimizer step, a `memory` line
about the step that was watched for it, an `eval` line per evaluation, an `end` line with the status
and the cause. A run that was killed has no `end` line and at most one torn last line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, TypeAdapter, ValidationError, model_validator

from paceline.core.steps import Step
from paceline.core.units import LARGEST_INT
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.documents import parse_json

SCHEMA = 1
CORES = r"\d{1,5}(-\d{1,5})?"
EVENT_BEGINS = '{"event"'
"""How the trainer's lines begin, torn ones included."""
MaybeNan = Annotated[float, Field(allow_inf_nan=True)]
"""What a training that went wrong may say of itself, NaN and infinity included."""
Cause = Literal["own_fault", "peer_lost", "no_progress", "waiting"]
"""Why a rank failed: by itself, because another was gone, or ended by its watchdog, which found it
without progress outside a collective or waiting for other ranks inside one."""


class MemoryPeaks(Value):
    """Peaks so far, by kind; None where the device has no such count."""

    allocated: NonNegativeFloat | None = None
    reserved: NonNegativeFloat | None = None
    resident: NonNegativeFloat | None = None
    device_used: NonNegativeFloat | None = None
    """In use on the device, the driver's context and other programs included."""


class Bound(Value):
    """How a rank was bound to cores before its program started."""

    by: Literal["cpu", "cuda", "file"] | None
    """Even shares, the cores near its GPU, or a file; None where it could not be bound."""
    threads: NonNegativeInt
    """Whole cores that it has."""
    nic: str | None = None
    """The InfiniBand device nearest its GPU."""
    host_cores: str | None = None
    """The hardware threads that it could have used unbound."""
    why: str | None = None
    """Why it could not be bound."""


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
    monotonic_s: float | None = None
    """The same by the host's monotonic clock, which nobody sets; None in older files."""
    torch: str | None = None
    python: str
    cuda: str | None = None
    backend: str | None = None
    device_name: str | None = None
    num_parameters: NonNegativeInt | None = None
    trainable_parameters: NonNegativeInt | None = None
    layout: dict[str, Any] = {}
    dtype: str | None = None
    matmul_precision: str | None = None
    attention: str | None = None
    """Which kernel computes attention: `blocked` is Paceline's own on a CPU, others PyTorch's.

    `windowed` is that of layers with a sliding window: alone where all have one that is shorter
    than the sequence, else behind the kernel of the others, `blocked, windowed`.
    """
    threads: NonNegativeInt | None = None
    cores: Annotated[str, Field(pattern=rf"^{CORES}(,{CORES})*$")] | None = None
    """Hardware threads that the rank may use, `0-3,8`; None where the system does not say."""
    numa_nodes: NonNegativeInt | None = None
    bound: Bound | None = None
    """None where no binding was asked for."""
    data: dict[str, Any] = {}
    first_step: PositiveInt = 1
    """The one after the checkpoint that the run went on from."""

    @property
    def stage(self) -> int:
        """This rank's place on the pipeline axis; 0 where the line does not say."""
        coordinates = self.layout.get("coordinates")
        stage = coordinates.get("pp") if isinstance(coordinates, dict) else None
        return stage if isinstance(stage, int) and 0 <= stage <= LARGEST_INT else 0


class CoreSeconds(Value):
    """What the host gave a rank's process during a step, in seconds; None where it does not say."""

    user_s: NonNegativeFloat | None = None
    """Processor time of all its threads."""
    system_s: NonNegativeFloat | None = None
    """The same inside the kernel."""
    waited_s: NonNegativeFloat | None = None
    """In which the thread that trains could have run and had no core."""
    throttled_s: NonNegativeFloat | None = None
    """In which its control groups had spent their quota of the cores, added up over cores."""


class StepEvent(Value):
    """One optimizer step of one rank; tokens and samples are this rank's own."""

    event: Literal["step"] = "step"
    step: NonNegativeInt
    loss: MaybeNan | None = None
    grad_norm: MaybeNan | None = None
    lr: NonNegativeFloat | None = None
    """The learning rate that it was taken with; None in lines from before it was written."""
    lora_lr: NonNegativeFloat | None = None
    """That of the adapters, None where they have none of their own."""
    tokens: NonNegativeFloat | None = None
    samples: NonNegativeFloat | None = None
    global_batch: NonNegativeInt | None = None
    seq_len: NonNegativeInt | None = None
    step_time_s: NonNegativeFloat
    busy_time_s: NonNegativeFloat | None = None
    """The step minus the time blocked in collectives and by its checkpoint; None where the program
    does not mark such waits."""
    comm_wait_s: NonNegativeFloat | None = None
    data_wait_s: NonNegativeFloat | None = None
    attended_share: NonNegativeFloat | None = None
    """What document masking leaves of the pairs of query and key in the rank's samples, 0-1; None
    without document masking."""
    memory_bytes: MemoryPeaks = MemoryPeaks()
    cores: CoreSeconds = CoreSeconds()
    skipped: bool = False
    checkpoint_s: NonNegativeFloat | None = None
    """Part of the step in which it waited for its checkpoint; None where none was saved."""
    tracked: bool = False
    """Its memory was watched, which takes time: the step time is no figure of the training."""
    profiled: bool = False
    """A profiler was attached to this rank, in a run that is for that."""


class MemoryEvent(Value):
    """What one rank's memory was used for, from one early step that was watched."""

    event: Literal["memory"] = "memory"
    step: NonNegativeInt
    kind: Literal["tracked", "allocated"] | None
    """What `at_peak_bytes` adds up to: the tensors that were tracked, or the allocator's peak."""
    tracker: str | None
    why: str | None = None
    """Why nothing was tracked, or what of the peak could not be told apart."""
    watcher_bytes: NonNegativeFloat | None = None
    """What loading the tracker added to the resident set, which keeps it from then on."""
    parts_bytes: dict[str, NonNegativeFloat | None]
    """Weights, gradients, optimizer and buffers as held; the other parts at the peak; context."""
    at_peak_bytes: dict[str, float] | None
    """By part at the moment of the peak."""
    peak_bytes: dict[str, NonNegativeFloat | None]
    """Peaks by kind: allocated, reserved, device_used, resident, tracked."""


class EvalEvent(Value):
    """One evaluation on held-out samples; every rank tells the same loss."""

    event: Literal["eval"] = "eval"
    step: NonNegativeInt
    """The last step before it."""
    samples: NonNegativeInt
    """Samples that the training has seen, over all ranks."""
    num_samples: NonNegativeInt
    """Held-out samples that it went over."""
    loss: float | None
    """Mean over their targets; None where it is no finite number."""
    target: float | None = None
    reached: bool
    """Whether the loss is not above the target; False without one, and on random samples."""
    eval_time_s: NonNegativeFloat
    """Not part of any step."""


class EndEvent(Value):
    """The last line of a rank that ended on its own terms."""

    event: Literal["end"] = "end"
    status: Literal["ok", "oom", "nan", "failed"]
    reason: str | None
    steps: NonNegativeInt
    time_unix: float
    reached: bool | None = None
    """Whether an evaluation reached the target, which ends a training; None without a target."""
    cause: Cause | None = None
    """None where the status is ok."""
    silent_s: NonNegativeFloat | None = None
    """How long nothing had moved when its watchdog ended it; None where that did not."""
    doing: str | None = None
    """What the rank did all that time."""

    @model_validator(mode="before")
    @classmethod
    def _has_a_cause(cls, fields: dict[str, Any]) -> dict[str, Any]:
        untold = fields.get("status") != "ok" and "cause" not in fields
        return {**fields, **_cause_in_words(fields)} if untold else fields


OUT_OF_MEMORY = ("memoryerror", "out of memory", "cannot allocate memory", "unable to allocate")
LOST_PEER = ("closed by peer", "reset by peer", "broken pipe", "remote process", "timed out")
_NO_PROGRESS = re.compile(
    r"no progress for ([0-9.]+(?:e[+-]?[0-9]+)?) s (.*): "
    r"(waiting for other ranks|not inside a collective)"
)


def _cause_in_words(fields: dict[str, Any]) -> dict[str, Any]:
    """What the reason tells, of end lines without `cause`: old ones and `paceline.steplog`'s."""
    reason = str(fields.get("reason"))
    if reason.startswith("another rank ended first"):
        return {"cause": "peer_lost"}
    if stopped := _NO_PROGRESS.fullmatch(reason):
        waits = stopped[3] == "waiting for other ranks"
        return {
            "cause": "waiting" if waits else "no_progress",
            "silent_s": stopped[1],
            "doing": stopped[2],
        }
    words = reason.lower()
    lost = any(sign in words for sign in LOST_PEER)
    full = fields.get("status") == "failed" and any(sign in words for sign in OUT_OF_MEMORY)
    return {
        **({"status": "oom"} if full else {}),
        "cause": "peer_lost" if lost else "own_fault",
    }


Event = StartEvent | StepEvent | MemoryEvent | EvalEvent | EndEvent
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
            fields = parse_json(line, nan=True)
        except ValueError:
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
    memory: MemoryEvent | None = None
    """The last one, if its memory was watched."""
    tracked: StepEvent | None = None
    """The step that was watched for it."""
    evaluations: tuple[EvalEvent, ...] = ()


def read_rank(lines: Iterable[str]) -> RankLog:
    """Everything in one rank's event lines."""
    start: StartEvent | None = None
    end: EndEvent | None = None
    memory: MemoryEvent | None = None
    tracked: StepEvent | None = None
    steps: list[Step] = []
    evaluations: list[EvalEvent] = []
    unread = Unread()
    for event in read_events(lines, unread):
        if isinstance(event, StartEvent):
            start = event
        elif isinstance(event, EndEvent):
            end = event
        elif isinstance(event, MemoryEvent):
            memory = event
        elif isinstance(event, EvalEvent):
            evaluations.append(event)
        else:
            tracked = event if event.tracked else tracked
            steps.append(to_step(event))
    return RankLog(start, tuple(steps), end, unread, memory, tracked, tuple(evaluations))


def to_step(event: StepEvent) -> Step:
    """The event as the Step that all log formats share; a watched step has no time in it."""
    memory = event.memory_bytes
    return Step(
        index=event.step,
        step_time_s=None if event.tracked else event.step_time_s,
        loss=event.loss,
        grad_norm=event.grad_norm,
        tokens=event.tokens,
        samples=event.samples,
        global_batch=event.global_batch,
        seq_len=event.seq_len,
        busy_time_s=None if event.tracked else event.busy_time_s,
        comm_wait_s=None if event.tracked else event.comm_wait_s,
        data_wait_s=event.data_wait_s,
        attended_share=event.attended_share,
        checkpoint_s=event.checkpoint_s,
        allocated_bytes=memory.allocated,
        reserved_bytes=memory.reserved,
        resident_bytes=memory.resident,
        device_used_bytes=memory.device_used,
        skipped=event.skipped,
    )
