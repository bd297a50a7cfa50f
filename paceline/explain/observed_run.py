"""A run with everything that a diagnosis needs: step breakdown, settings, environment, clocks.

Its profile has a breakdown of a step, which shows parts that step times alone do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from paceline.compare.over_time.environment import environment_items
from paceline.core.binding import Place, oversubscription
from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.result import Result
from paceline.core.run import RunSettings, RunSpec
from paceline.core.run_report import RunReport
from paceline.core.telemetry import read_telemetry
from paceline.explain.step_breakdown import (
    MAX_STEPS,
    MIN_STEPS,
    RankEvents,
    StepBreakdown,
    break_down_steps,
    rank_events,
)
from paceline.files.documents import read_json, read_lines, read_value
from paceline.files.events import StepEvent
from paceline.files.run_folder import find_run
from paceline.logs.facts import UserSettings
from paceline.machines.probe.telemetry import FOLDER as TELEMETRY_FOLDER
from paceline.profiles.profile import PROFILE_FILE, Profile
from paceline.runs.comparison_inputs import NO_SETTINGS, report_of_file
from paceline.runs.outcome import evaluate, rank_place


@dataclass(frozen=True)
class ProfiledStep:
    """A profiled step by part, in shares because profiling itself lengthens the step."""

    shares: Mapping[str, float]
    """Shares of the step by category of the profile."""
    n: int
    """Number of steps times ranks."""
    source: str

    @property
    def host_gap(self) -> float:
        """Share of the step in which the device was idle, known waits excluded."""
        return self.shares.get("host_gap", 0.0)


def load_profiled_step(root: Path, name: str) -> ProfiledStep:
    """Return the profile `name`: a profile.json, or a run that has one.

    Raises UserError if there is none or if it has no breakdown of a step.
    """
    path = Path(name)
    path = path if path.is_file() else find_run(root, name) / PROFILE_FILE
    if not path.exists():
        raise UserError(
            f"--profile {name}", "was not profiled", remedy=f"paceline probe profile {name}"
        )
    step = _step(path)
    if step is None:
        raise UserError(
            str(path), "has no step breakdown", remedy="profile with --tool torch or nsys"
        )
    return step


def own_profiled_step(folder: Path) -> ProfiledStep | None:
    """Return the run's own profile; None without one that breaks a step down."""
    path = folder / PROFILE_FILE
    return _step(path) if path.is_file() else None


def _step(path: Path) -> ProfiledStep | None:
    profile = read_value(path, Profile)
    if not profile.step_time_s or not profile.parts:
        return None
    shares = {name: seconds / profile.step_time_s for name, seconds in profile.parts.items()}
    return ProfiledStep(shares, profile.n, f"profile of {profile.run or path.name}, {profile.tool}")


CAMPAIGN_RESULT = "scale.json"
REMEDY = "give one with more steady steps; `paceline parse` shows which steps of a log count"


@dataclass(frozen=True)
class ObservedRun:
    """One run with all data in which causes are searched."""

    report: RunReport
    account: StepBreakdown
    num_microbatches: int | None
    """Micro-batches of a step on one replica; None if the settings do not tell."""
    places: tuple[Place, ...]
    environment: Mapping[str, str]
    clock: tuple[float, float | None, int] | None
    """Mean clock, maximum clock (both MHz) and number of samples; None without telemetry."""
    flagged_hosts: Mapping[str, str]
    """Hosts that a scaling test in the same folder flagged as slow, with the test's name."""

    @property
    def result(self) -> Result:
        return self.report.result

    @property
    def facts(self) -> RunSettings:
        return self.report.facts

    @property
    def spec(self) -> RunSpec | None:
        return self.report.spec

    @property
    def layout(self) -> Layout:
        """The layout; that of one device if the run states none."""
        return self.facts.layout or Layout()

    @property
    def threads(self) -> int | None:
        """Threads of the first rank."""
        return self.places[0].threads if self.places else None

    @property
    def overcommitment(self) -> str | None:
        """A description of ranks bound to too few cores; None if there are enough."""
        return oversubscription(self.places)

    @property
    def source(self) -> str:
        """The run and steps to which the figures belong."""
        window = self.result.window
        steps = f", steps {window.first_step}-{window.last_step}" if window else ""
        return f"run {self.result.run}{steps}"


def find_source(root: Path, name: str) -> Path:
    """Return a training log by its path, or the folder of a stored run; raise UserError if none."""
    path = Path(name)
    return path if path.is_file() else find_run(root, name)


def observed_run(source: Path, settings: UserSettings = NO_SETTINGS) -> ObservedRun:
    """Return the run that a run folder or a training log holds.

    `settings` add what a log does not state. Of a log only the step times, the settings and what it
    prints are known. Raises UserError if there are too few steady steps.
    """
    is_log = source.is_file()
    report = report_of_file(source, settings) if is_log else evaluate(source)
    window, name = report.result.window, f"run {report.result.run}"
    if window is None or window.first_step is None or window.last_step is None:
        why = report.result.reason or f"its status is {report.result.status}"
        raise UserError(name, f"has no steady steps: {why}", remedy=REMEDY)
    first, last = window.first_step, window.last_step
    ranks = {} if is_log else rank_events(source, first, last)
    count = _num_microbatches(report)
    ranks = ranks or {0: RankEvents(None, printed_steps(report, first, last))}
    account = break_down_steps(
        ranks,
        report.facts.layout,
        count,
        {rank: events.start.stage for rank, events in ranks.items() if events.start},
        on_cores=report.facts.device == "cpu",
    )
    if account is None:
        what = f"has fewer than {MIN_STEPS} recorded steps that all ranks completed"
        raise UserError(name, what, remedy=REMEDY)
    starts = {rank: events.start for rank, events in sorted(ranks.items())}
    return ObservedRun(
        report=report,
        account=account,
        num_microbatches=count,
        places=tuple(rank_place(rank, start) for rank, start in starts.items() if start),
        environment=environment_items(
            report.inventory, report.result.versions, fabric=report.result.fabric
        ),
        clock=None if is_log else _clock(source, report, ranks),
        flagged_hosts={} if is_log else _flagged_hosts(source.parent),
    )


def printed_steps(report: RunReport, first: int, last: int) -> tuple[StepEvent, ...]:
    """Return the steps `first` to `last` as a log prints them: times of the whole run, no ranks."""
    steps = report.steps.select((report.steps.index >= first) & (report.steps.index <= last))
    default = report.facts.global_batch
    return tuple(
        StepEvent(
            step=int(step),
            step_time_s=seconds,
            samples=next((size for size in (samples, batch) if math.isfinite(size)), default),
            data_wait_s=None if math.isnan(data_s) else data_s,
        )
        for step, seconds, samples, batch, data_s in zip(
            steps.index,
            *(steps[name] for name in ("step_time_s", "samples", "global_batch", "data_wait_s")),
            strict=True,
        )
        if math.isfinite(seconds)
    )[-MAX_STEPS:]


def _num_microbatches(report: RunReport) -> int | None:
    """Return the micro-batches of a step on one replica; None if the settings do not tell."""
    layout, devices, batch = (
        report.facts.layout,
        report.facts.num_devices,
        report.facts.global_batch,
    )
    if report.spec is not None:
        layout, devices = report.spec.layout, report.spec.world_size
        batch = report.spec.training.global_batch
    if report.result.window and report.result.window.global_batch:
        batch = report.result.window.global_batch
    if layout is None or devices is None or batch is None or devices % layout.model_devices:
        return None
    return layout.num_microbatches(devices, batch)


def _clock(
    folder: Path, report: RunReport, ranks: Mapping[int, RankEvents]
) -> tuple[float, float | None, int] | None:
    """Return mean and maximum clock of all devices during training, in MHz, and the samples."""
    start_unix = min((r.start.time_unix for r in ranks.values() if r.start), default=None)
    end_unix = max((r.end.time_unix for r in ranks.values() if r.end), default=None)
    if start_unix is None or end_unix is None:
        return None
    clocks: list[float] = []
    for path in sorted((folder / TELEMETRY_FOLDER).glob("*.jsonl")):
        telemetry = read_telemetry(read_lines(path))
        inside = (
            [s for s in telemetry.samples if start_unix <= s.time_unix <= end_unix]
            if telemetry
            else []
        )
        clocks += [gpu.sm_clock_mhz for s in inside for gpu in s.gpus if gpu.sm_clock_mhz]
        if report.facts.device == "cpu":
            clocks += [s.cpu_clock_mhz for s in inside if s.cpu_clock_mhz]
    gpus = report.inventory.get("gpus")
    first = gpus[0] if isinstance(gpus, list) and gpus else None
    highest = first.get("max_sm_clock_mhz") if isinstance(first, dict) else None
    limit = float(highest) if isinstance(highest, int | float) else None
    return (fmean(clocks), limit, len(clocks)) if clocks else None


def _flagged_hosts(root: Path) -> dict[str, str]:
    """Return the hosts flagged by scaling tests that are stored in the same folder."""
    hosts: dict[str, str] = {}
    for path in sorted(root.glob(f"*/{CAMPAIGN_RESULT}")):
        names = read_json(path).get("flagged")
        hosts_flagged = [w for w in names if isinstance(w, str)] if isinstance(names, list) else []
        hosts |= dict.fromkeys(hosts_flagged, path.parent.name)
    return hosts
