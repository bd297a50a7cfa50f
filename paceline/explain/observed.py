"""A run as an explanation sees it: its steps' account, its settings, and what surrounded it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from paceline.compare.over_time.environment import environment_items
from paceline.core.binding import Place, overcommitted
from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.result import Result
from paceline.core.run import RunSettings, RunSpec
from paceline.core.run_report import RunReport
from paceline.core.telemetry import read_telemetry
from paceline.explain.account import LEAST_STEPS, Account, account_of
from paceline.explain.rank_events import RankEvents, rank_events
from paceline.files.documents import read_json, read_lines
from paceline.machines.probe.telemetry import FOLDER as TELEMETRY_FOLDER
from paceline.runs.outcome import evaluate, place_of

CAMPAIGN_RESULT = "scale.json"
REMEDY = "explain a run of the native trainer, or one whose loop writes paceline.steplog's lines"


@dataclass(frozen=True)
class ObservedRun:
    """One run with everything that its causes are looked for in."""

    report: RunReport
    account: Account
    places: tuple[Place, ...]
    environment: Mapping[str, str]
    clock: tuple[float, float | None, int] | None
    """Mean clock of its devices, the highest that they allow (MHz), and samples; None without."""
    blamed: Mapping[str, str]
    """Hosts that a scaling campaign beside it flagged as slow, with the campaign's name."""

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
        """Its layout, one device's where nobody said."""
        return self.facts.layout or Layout()

    @property
    def threads(self) -> int | None:
        """Threads of its first rank."""
        return self.places[0].threads if self.places else None

    @property
    def overcommitted(self) -> str | None:
        """How its ranks are bound to too few cores; None where they are not."""
        return overcommitted(self.places)

    @property
    def source(self) -> str:
        """Where its figures come from."""
        window = self.result.window
        steps = f", steps {window.first_step}-{window.last_step}" if window else ""
        return f"run {self.result.run}{steps}"


def observed(folder: Path) -> ObservedRun:
    """The run in a folder.

    Raises UserError where it has no event lines of steps, as an imported log has none.
    """
    report = evaluate(folder)
    window, name = report.result.window, f"run {folder.name}"
    if window is None or window.first_step is None or window.last_step is None:
        why = report.result.reason or f"its status is {report.result.status}"
        raise UserError(name, f"has no steady steps: {why}", remedy=REMEDY)
    ranks = rank_events(folder, window.first_step, window.last_step)
    account = _account(report, ranks)
    if account is None:
        what = f"has no event lines of {LEAST_STEPS} steps that all its ranks have done"
        raise UserError(name, what, remedy=REMEDY)
    starts = {rank: events.start for rank, events in sorted(ranks.items())}
    return ObservedRun(
        report=report,
        account=account,
        places=tuple(place_of(rank, start) for rank, start in starts.items() if start),
        environment=environment_items(report.inventory, report.result.versions),
        clock=_clock(folder, report, ranks),
        blamed=_blamed(folder.parent),
    )


def _account(report: RunReport, ranks: Mapping[int, RankEvents]) -> Account | None:
    spec = report.spec
    count = None
    if spec is not None:
        count = spec.layout.num_microbatches(spec.world_size, spec.training.global_batch)
    return account_of(
        ranks,
        report.facts.layout,
        count,
        {rank: events.start.stage for rank, events in ranks.items() if events.start},
        on_cores=report.facts.device == "cpu",
    )


def _clock(
    folder: Path, report: RunReport, ranks: Mapping[int, RankEvents]
) -> tuple[float, float | None, int] | None:
    """Mean clock of all devices while the ranks trained, and the highest allowed, in MHz."""
    began = min((r.start.time_unix for r in ranks.values() if r.start), default=None)
    ended = max((r.end.time_unix for r in ranks.values() if r.end), default=None)
    if began is None or ended is None:
        return None
    clocks: list[float] = []
    for path in sorted((folder / TELEMETRY_FOLDER).glob("*.jsonl")):
        telemetry = read_telemetry(read_lines(path))
        inside = (
            [s for s in telemetry.samples if began <= s.time_unix <= ended] if telemetry else []
        )
        clocks += [gpu.sm_clock_mhz for s in inside for gpu in s.gpus if gpu.sm_clock_mhz]
        if report.facts.device == "cpu":
            clocks += [s.cpu_clock_mhz for s in inside if s.cpu_clock_mhz]
    gpus = report.inventory.get("gpus")
    first = gpus[0] if isinstance(gpus, list) and gpus else None
    highest = first.get("max_sm_clock_mhz") if isinstance(first, dict) else None
    limit = float(highest) if isinstance(highest, int | float) else None
    return (fmean(clocks), limit, len(clocks)) if clocks else None


def _blamed(root: Path) -> dict[str, str]:
    """Flagged hosts of the campaigns whose folders lie beside the run."""
    hosts: dict[str, str] = {}
    for path in sorted(root.glob(f"*/{CAMPAIGN_RESULT}")):
        flagged = read_json(path).get("flagged")
        words = [w for w in flagged if isinstance(w, str)] if isinstance(flagged, list) else []
        hosts |= dict.fromkeys(words, path.parent.name)
    return hosts
