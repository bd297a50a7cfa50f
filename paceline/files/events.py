"""Event lines of the native trainer and of `paceline.steplog`: one file per rank, JSON per line.

A value that a program does not know is omitted or null, never a guess.
Schema 1: a `start` line when training begins, a `step` line per optimizer step, a `memory` line
about the step whose memory was traced, an `eval` line per evaluation, and an `end` line with the
status and the cause. A killed run has no `end` line and at most one truncated last line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, TypeAdapter, ValidationError, model_validator

from paceline.core.steps import MIN_STEP_TIME_S, Step
from paceline.core.units import LARGEST_INT
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.documents import parse_json

SCHEMA = 1
CORES = r"\d{1,5}(-\d{1,5})?"
EVENT_BEGINS = '{"event"'
"""Start of the trainer's lines, including truncated ones."""
MaybeNan = Annotated[float, Field(allow_inf_nan=True)]
"""A number that may be NaN or infinite, such as the loss of a diverged training."""
Cause = Literal["own_fault", "peer_lost", "no_progress", "waiting"]
"""Cause of a rank's failure: its own fault, the loss of another rank, or its watchdog, which found
it without progress outside a collective or waiting for other ranks inside one."""


class MemoryPeaks(Value):
    """Memory peaks so far in bytes, by kind; None if the device has no such counter."""

    allocated: NonNegativeFloat | None = None
    reserved: NonNegativeFloat | None = None
    resident: NonNegativeFloat | None = None
    device_used: NonNegativeFloat | None = None
    """Memory in use on the device, including the driver's context and other programs."""


class Bound(Value):
    """Binding of a rank to cores before its program started."""

    by: Literal["cpu", "cuda", "file"] | None
    """Equal shares, the cores near its GPU, or a file; None if the rank could not be bound."""
    threads: NonNegativeInt
    """Number of whole cores."""
    nic: str | None = None
    """The InfiniBand device nearest its GPU."""
    host_cores: str | None = None
    """Hardware threads that were available without binding."""
    why: str | None = None
    """Reason why it could not be bound."""


class InterfaceUse(Value):
    """Bytes that an interface or RDMA port of the host sent during the fabric probe."""

    name: Annotated[str, Field(max_length=64)]
    kind: Annotated[str, Field(max_length=32)]
    """`net`, or the link layer of an RDMA port: `InfiniBand`, `Ethernet` (RoCE), or `EFA`."""
    address: Annotated[str, Field(max_length=64)] = ""
    sent_bytes: int


class PayloadTime(Value):
    """Time of an all-reduce of all ranks with one payload."""

    num_bytes: PositiveInt = Field(alias="bytes")
    """Payload."""
    time_s: NonNegativeFloat
    """Median time of a call in seconds."""
    spread: NonNegativeFloat
    """1.4826 x MAD / median of the calls."""


class FabricProbe(PayloadTime):
    """Timed all-reduces of all ranks before the first step, with a large and a small payload."""

    calls: PositiveInt
    """Timed calls with each payload."""
    small: PayloadTime
    """The same with a payload whose time is mostly latency."""
    interfaces: tuple[InterfaceUse, ...] = ()
    """Active interfaces of the host; empty except for the first rank of a host."""


class StartEvent(Value):
    """First line of a rank: its identity and configuration."""

    event: Literal["start"] = "start"
    # A mapping named `schema` would shadow pydantic's own attribute, hence the alias.
    schema_version: Literal[1] = Field(alias="schema")
    rank: NonNegativeInt
    world_size: NonNegativeInt
    local_rank: NonNegativeInt
    host: str
    pid: NonNegativeInt
    time_unix: float
    """Time at which training was ready to start."""
    monotonic_s: float | None = None
    """The same time by the host's monotonic clock, which is never adjusted."""
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
    """Attention kernel: `blocked` is Paceline's own on a CPU, the others are PyTorch's.

    `windowed` is the kernel of layers with a sliding window shorter than the sequence. It stands
    alone if all layers have one, else after the kernel of the others: `blocked, windowed`.
    """
    threads: NonNegativeInt | None = None
    cores: Annotated[str, Field(pattern=rf"^{CORES}(,{CORES})*$")] | None = None
    """Hardware threads that the rank may use, `0-3,8`; None if the system does not report them."""
    numa_nodes: NonNegativeInt | None = None
    bound: Bound | None = None
    """None if no binding was requested."""
    data: dict[str, Any] = {}
    first_step: PositiveInt = 1
    """First step of this run, after the checkpoint that it resumed from."""
    fabric: FabricProbe | None = None
    """None for a single rank, and for programs without a probe."""

    @property
    def stage(self) -> int:
        """This rank's pipeline stage; 0 if the line does not state it."""
        coordinates = self.layout.get("coordinates")
        stage = coordinates.get("pp") if isinstance(coordinates, dict) else None
        return stage if isinstance(stage, int) and 0 <= stage <= LARGEST_INT else 0


class CoreSeconds(Value):
    """CPU time of a rank's process during a step in seconds; None if the host does not report
    it."""

    user_s: NonNegativeFloat | None = None
    """CPU time of all its threads in user mode."""
    system_s: NonNegativeFloat | None = None
    """CPU time of all its threads in the kernel."""
    waited_s: NonNegativeFloat | None = None
    """Time in which the training thread was runnable but had no core."""
    throttled_s: NonNegativeFloat | None = None
    """Time in which its control groups had used up their CPU quota, summed over cores."""


class RoutingLoad(Value):
    """Spread of a step's tokens over the experts, by layer, summed over all ranks.

    It covers the layers of the rank's pipeline stage.
    """

    experts: PositiveInt
    """Experts per layer."""
    layers: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    """Layers with experts, from 0."""
    overload: tuple[NonNegativeFloat, ...]
    """Largest load of an expert over the mean load."""
    variation: tuple[NonNegativeFloat, ...]
    """Standard deviation of the load over the mean load."""
    dead: tuple[NonNegativeInt, ...]
    """Number of experts without tokens."""
    rank_overload: tuple[NonNegativeFloat, ...] = ()
    """Largest load of an expert-parallel rank over the mean load; empty with all experts on every
    rank."""

    @property
    def mean_overload(self) -> float | None:
        """Mean overload factor of the layers."""
        return fmean(self.overload) if self.overload else None

    @property
    def dead_share(self) -> float | None:
        """Share of all experts that have no tokens."""
        return fmean(self.dead) / self.experts if self.dead else None


class StepEvent(Value):
    """One optimizer step of one rank; tokens and samples are those of this rank."""

    event: Literal["step"] = "step"
    step: NonNegativeInt
    loss: MaybeNan | None = None
    grad_norm: MaybeNan | None = None
    mtp_loss: MaybeNan | None = None
    """Mean loss of the multi-token prediction layers, which `loss` does not include; None without
    such layers."""
    lr: NonNegativeFloat | None = None
    """Learning rate of the step."""
    lora_lr: NonNegativeFloat | None = None
    """Learning rate of the adapters, None if they have none of their own."""
    tokens: NonNegativeFloat | None = None
    samples: NonNegativeFloat | None = None
    global_batch: NonNegativeInt | None = None
    seq_len: NonNegativeInt | None = None
    step_time_s: NonNegativeFloat
    busy_time_s: NonNegativeFloat | None = None
    """Step time minus the time blocked in collectives and by its checkpoint; None if the program
    does not mark such waits."""
    comm_wait_s: NonNegativeFloat | None = None
    data_wait_s: NonNegativeFloat | None = None
    attended_share: NonNegativeFloat | None = None
    """Fraction (0-1) of the query-key pairs in the rank's samples that document masking keeps; None
    without document masking."""
    experts_s: NonNegativeFloat | None = None
    """Time between the two exchanges of tokens of each expert layer, forward and backward: the
    experts' GEMMs; None unless ranks hold different experts."""
    dispatch_s: NonNegativeFloat | None = None
    """Time of the exchanges of tokens, waits for other ranks included; None like `experts_s`."""
    routing: RoutingLoad | None = None
    """Load of the experts; None without experts."""
    memory_bytes: MemoryPeaks = MemoryPeaks()
    cores: CoreSeconds = CoreSeconds()
    skipped: bool = False
    checkpoint_s: NonNegativeFloat | None = None
    """Time that the step waited for its checkpoint; None if none was saved."""
    tracked: bool = False
    """True if its memory was traced, which takes time: the step time does not count."""
    profiled: bool = False
    """True if a profiler was attached to this rank."""


class MemoryEvent(Value):
    """Memory of one rank by part, from one early traced step."""

    event: Literal["memory"] = "memory"
    step: NonNegativeInt
    kind: Literal["tracked", "allocated"] | None
    """Total that `at_peak_bytes` adds up to: the tracked tensors, or the allocator's peak."""
    tracker: str | None
    why: str | None = None
    """Reason why nothing was tracked, or which parts of the peak could not be separated."""
    watcher_bytes: NonNegativeFloat | None = None
    """Bytes that loading the tracker added to the resident set for good."""
    parts_bytes: dict[str, NonNegativeFloat | None]
    """Weights, gradients, optimizer and buffers as allocated; the other parts at the peak;
    context."""
    at_peak_bytes: dict[str, float] | None
    """Bytes by part at the time of the peak."""
    peak_bytes: dict[str, NonNegativeFloat | None]
    """Peaks by kind: allocated, reserved, device_used, resident, tracked."""


class EvalEvent(Value):
    """One evaluation on held-out samples; every rank reports the same loss."""

    event: Literal["eval"] = "eval"
    step: NonNegativeInt
    """The last step before it."""
    samples: NonNegativeInt
    """Training samples so far, over all ranks."""
    num_samples: NonNegativeInt
    """Held-out samples of the evaluation."""
    loss: float | None
    """Mean over their targets; None if it is not finite."""
    target: float | None = None
    reached: bool
    """True if the loss is at or below the target; False without one, and on random samples."""
    eval_time_s: NonNegativeFloat
    """Time of the evaluation, which is not part of any step."""


class EndEvent(Value):
    """Last line of a rank that was not killed."""

    event: Literal["end"] = "end"
    status: Literal["ok", "oom", "nan", "failed"]
    reason: str | None
    steps: NonNegativeInt
    time_unix: float
    reached: bool | None = None
    """True if an evaluation reached the target, which ends a training; None without a target."""
    cause: Cause | None = None
    """None if the status is ok."""
    silent_s: NonNegativeFloat | None = None
    """Time without progress when its watchdog ended it; None if the watchdog did not."""
    doing: str | None = None
    """Activity of the rank during that time."""

    @model_validator(mode="before")
    @classmethod
    def _has_a_cause(cls, fields: dict[str, Any]) -> dict[str, Any]:
        lacks_cause = fields.get("status") != "ok" and "cause" not in fields
        return {**fields, **_cause_in_words(fields)} if lacks_cause else fields


OUT_OF_MEMORY = ("memoryerror", "out of memory", "cannot allocate memory", "unable to allocate")
LOST_PEER = ("closed by peer", "reset by peer", "broken pipe", "remote process", "timed out")
_NO_PROGRESS = re.compile(
    r"no progress for ([0-9.]+(?:e[+-]?[0-9]+)?) s (.*): "
    r"(waiting for other ranks|not inside a collective)"
)


def _cause_in_words(fields: dict[str, Any]) -> dict[str, Any]:
    """Infer the cause from the reason, for end lines of `paceline.steplog`, which have no
    `cause`."""
    reason = str(fields.get("reason"))
    if reason.startswith("another rank ended first"):
        return {"cause": "peer_lost"}
    if match := _NO_PROGRESS.fullmatch(reason):
        waits = match[3] == "waiting for other ranks"
        return {
            "cause": "waiting" if waits else "no_progress",
            "silent_s": match[1],
            "doing": match[2],
        }
    words = reason.lower()
    is_peer_lost = any(sign in words for sign in LOST_PEER)
    is_out_of_memory = fields.get("status") == "failed" and any(
        sign in words for sign in OUT_OF_MEMORY
    )
    return {
        **({"status": "oom"} if is_out_of_memory else {}),
        "cause": "peer_lost" if is_peer_lost else "own_fault",
    }


Event = StartEvent | StepEvent | MemoryEvent | EvalEvent | EndEvent
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


@dataclass
class SkippedLines:
    """Event lines that were skipped."""

    lines: int = 0
    newest_schema: int | None = None
    """Largest newer schema version in a start line."""

    @property
    def warning(self) -> str | None:
        """Warning about skipped lines; None if every line was read."""
        if self.newest_schema is not None:
            return (
                f"the event lines have schema {self.newest_schema} and this version reads schema "
                f"{SCHEMA}: {self.lines:,} of them were skipped; update Paceline"
            )
        if not self.lines:
            return None
        what = "1 event line is" if self.lines == 1 else f"{self.lines:,} event lines are"
        return f"{what} not valid in schema {SCHEMA} and skipped"


def read_events(lines: Iterable[str], skipped_lines: SkippedLines | None = None) -> Iterator[Event]:
    """Yield the events in `lines`, skip other lines, and count invalid event lines.

    A truncated last line is not counted, because the file of a killed or running rank ends so.
    """
    skipped_lines = skipped_lines or SkippedLines()
    is_torn = False
    for line in lines:
        if not line.startswith("{"):
            continue
        skipped_lines.lines += is_torn
        is_torn = False
        try:
            fields = parse_json(line, nan=True)
        except ValueError:
            is_torn = line.startswith(EVENT_BEGINS)
            continue
        if not isinstance(fields, dict) or "event" not in fields:
            continue
        try:
            yield _EVENT.validate_python(fields)
        except (ValidationError, OverflowError):
            _count(fields, skipped_lines)


def _count(fields: dict[str, Any], skipped_lines: SkippedLines) -> None:
    skipped_lines.lines += 1
    schema = fields.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        skipped_lines.newest_schema = max(schema, skipped_lines.newest_schema or 0)


@dataclass(frozen=True)
class RankLog:
    """The events of one rank; None if it did not get that far."""

    start: StartEvent | None
    steps: tuple[Step, ...]
    end: EndEvent | None
    skipped_lines: SkippedLines = field(default_factory=SkippedLines)
    memory: MemoryEvent | None = None
    """Last memory event, if its memory was traced."""
    tracked_step: StepEvent | None = None
    """Step whose memory was traced."""
    evaluations: tuple[EvalEvent, ...] = ()


def read_rank(lines: Iterable[str]) -> RankLog:
    """Read all event lines of one rank."""
    start: StartEvent | None = None
    end: EndEvent | None = None
    memory: MemoryEvent | None = None
    tracked_step: StepEvent | None = None
    steps: list[Step] = []
    evaluations: list[EvalEvent] = []
    skipped_lines = SkippedLines()
    for event in read_events(lines, skipped_lines):
        if isinstance(event, StartEvent):
            start = event
        elif isinstance(event, EndEvent):
            end = event
        elif isinstance(event, MemoryEvent):
            memory = event
        elif isinstance(event, EvalEvent):
            evaluations.append(event)
        else:
            tracked_step = event if event.tracked else tracked_step
            steps.append(to_step(event))
    return RankLog(
        start=start,
        steps=tuple(steps),
        end=end,
        skipped_lines=skipped_lines,
        memory=memory,
        tracked_step=tracked_step,
        evaluations=tuple(evaluations),
    )


def to_step(event: StepEvent) -> Step:
    """Convert the event to the Step that all log formats share.

    A traced step gets no time, and neither does one of 0 s.
    """
    memory = event.memory_bytes
    has_time = not event.tracked and event.step_time_s >= MIN_STEP_TIME_S
    return Step(
        index=event.step,
        step_time_s=event.step_time_s if has_time else None,
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
        expert_overload=event.routing and event.routing.mean_overload,
        dead_experts=event.routing and event.routing.dead_share,
        checkpoint_s=event.checkpoint_s,
        allocated_bytes=memory.allocated,
        reserved_bytes=memory.reserved,
        resident_bytes=memory.resident,
        device_used_bytes=memory.device_used,
        skipped=event.skipped,
    )
