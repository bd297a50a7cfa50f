"""What the docs show of declarations: JSON Schemas, refused layouts, and log formats.

`python -m paceline.schemas docs/schemas` writes the schemas there and the tables into pages of the
folder above it; tests compare both with this module.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel

from paceline.compare.judgement import Comparison
from paceline.compare.over_time.repeats import SeriesResult
from paceline.compare.sequential.judgement import SequentialComparison
from paceline.core.assets import Manifest
from paceline.core.bundle import Bundle
from paceline.core.hardware import Device, Link
from paceline.core.layout_checks import NATIVE_SIZE_RULES, RULES, SIZE_RULES
from paceline.core.result import Result
from paceline.core.run_inputs import RunInputs
from paceline.core.site import Site
from paceline.core.telemetry import TelemetrySample, TelemetryStart
from paceline.engines import log_formats
from paceline.estimate.calibrate.calibration import Calibration
from paceline.explain.explanation import Explanation
from paceline.files.documents import write_text
from paceline.files.events import EndEvent, EvalEvent, MemoryEvent, StartEvent, StepEvent
from paceline.files.recipe import Recipe
from paceline.files.references import Source
from paceline.files.run_folder import RunRecord
from paceline.layouts.sweep.result import SweepResult
from paceline.layouts.tune.result import TuneResult
from paceline.logs.parsed_log import ParsedLog
from paceline.machines.probe.gemm import GemmProbe
from paceline.machines.slurm.foreign import SubmittedScript
from paceline.machines.slurm.record import SlurmRecord
from paceline.mlperf.run.trials import SeriesAnswer, TrialSeries
from paceline.profiles.profile import Profile
from paceline.runs.bundles.verification import BundleCheck
from paceline.runs.difference import RunDiff
from paceline.runs.goodput.ledger import GoodputLedger
from paceline.runs.watch.state import WatchState
from paceline.scaling.campaigns.record import Campaign
from paceline.scaling.campaigns.result import CampaignResult
from paceline.scaling.network.report import NetworkReport
from paceline.scaling.storage.report import StorageReport

FORMATS: dict[str, type[BaseModel]] = {
    "recipe": Recipe,
    "cluster": Site,
    "device": Device,
    "link": Link,
    "references": Source,
    "run": RunRecord,
    "inputs": RunInputs,
    "bundle": Bundle,
    "bundle-check": BundleCheck,
    "diff": RunDiff,
    "stage-manifest": Manifest,
    "result": Result,
    "repeats": SeriesResult,
    "campaign": Campaign,
    "scale": CampaignResult,
    "sweep": SweepResult,
    "tune": TuneResult,
    "slurm": SlurmRecord,
    "batch": SubmittedScript,
    "parsed-log": ParsedLog,
    "comparison": Comparison,
    "sequential-comparison": SequentialComparison,
    "explanation": Explanation,
    "watch": WatchState,
    "goodput": GoodputLedger,
    "network": NetworkReport,
    "storage": StorageReport,
    "event-start": StartEvent,
    "event-step": StepEvent,
    "event-memory": MemoryEvent,
    "event-eval": EvalEvent,
    "event-end": EndEvent,
    "telemetry-start": TelemetryStart,
    "telemetry-sample": TelemetrySample,
    "gemm-probe": GemmProbe,
    "mlperf-series": TrialSeries,
    "mlperf-run": SeriesAnswer,
    "calibration": Calibration,
    "profile": Profile,
}


TABLES_BEGIN = "<!-- generated: python -m paceline.schemas docs/schemas -->"
TABLES_END = "<!-- end -->"


def schema_texts() -> dict[str, str]:
    """File name -> JSON Schema text."""
    return {
        f"{name}.schema.json": json.dumps(model.model_json_schema(), indent=2) + "\n"
        for name, model in FORMATS.items()
    }


def layout_tables() -> str:
    """The refused combinations and the conditions on sizes, as Markdown."""
    rules = [
        f"| {' with '.join(f'`{name}`' for name in sorted(rule.features))} "
        f"| {_whose(rule.native)} | {rule.reason} |"
        for rule in RULES
    ]
    conditions = [
        f"| {(condition.__doc__ or '').splitlines()[0].rstrip('.')} | {_whose(native)} |"
        for native, group in ((False, SIZE_RULES), (True, NATIVE_SIZE_RULES))
        for condition in group
    ]
    combinations = ["| refused together | in | reason |", "|---|---|---|", *rules]
    sizes = ["| sizes must fit | in |", "|---|---|", *conditions]
    return "\n".join([*combinations, "", *sizes, ""])


def log_format_table() -> str:
    """Return the formats that `parse` recognizes, in the order of their titles, as Markdown."""
    rows = [
        f"| `{name}` | {kind.title} | {kind.example.replace('|', chr(92) + '|')} | {kind.numbered} "
        f"| {f'`{kind.convention}`' if kind.convention else '-'} |"
        for name, kind in sorted(log_formats().items(), key=lambda item: item[1].title.lower())
    ]
    head = (
        "| `--engine` | framework | a step line looks like | step number | printed FLOP/s count |"
    )
    return "\n".join([head, "|---|---|---|---|---|", *rows, ""])


PAGES: Mapping[str, Callable[[], str]] = {
    "layouts.md": layout_tables,
    "logs.md": log_format_table,
}
"""Pages of the docs, and the tables that are generated for them."""


def with_tables(page: str, tables: str) -> str:
    """Return `page` with `tables` between its two marks."""
    before, _, rest = page.partition(TABLES_BEGIN)
    _, end, after = rest.partition(TABLES_END)
    return f"{before}{TABLES_BEGIN}\n{tables}{end}{after}" if end else page


def main() -> None:
    """Write every schema into the folder given as the only argument, and the tables beside it."""
    folder = Path(sys.argv[1])
    for name, text in schema_texts().items():
        write_text(folder / name, text)
    for name, tables in PAGES.items():
        page = folder.parent / name
        if page.exists():
            write_text(page, with_tables(page.read_text(encoding="utf-8"), tables()))


def _whose(native: bool) -> str:
    return "the native trainer" if native else "every engine"


if __name__ == "__main__":
    main()
