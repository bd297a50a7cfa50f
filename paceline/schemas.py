"""JSON Schemas of all file formats.

`python -m paceline.schemas docs/schemas` writes them, and the generated parts of the reference
pages (`paceline.reference`) in the folder above. Tests fail if either is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paceline.compare.judgement import Comparison
from paceline.compare.over_time.repeats import SeriesResult
from paceline.compare.sequential.judgement import SequentialComparison
from paceline.core.assets import Manifest, RunInputs
from paceline.core.bundle import Bundle
from paceline.core.hardware import Device, Link, Site
from paceline.core.result import Result
from paceline.core.telemetry import TelemetrySample, TelemetryStart
from paceline.estimate.calibrate.calibration import Calibration
from paceline.explain.explanation import Explanation
from paceline.files.documents import write_text
from paceline.files.events import EndEvent, EvalEvent, MemoryEvent, StartEvent, StepEvent
from paceline.files.field_docs import docstrings
from paceline.files.recipe import Recipe
from paceline.files.references import Source
from paceline.files.run_folder import RunRecord
from paceline.files.yaml_file import models_in
from paceline.layouts.sweep.result import SweepResult
from paceline.layouts.tune.result import TuneResult
from paceline.logs.parsed_log import ParsedLog
from paceline.machines.probe.gemm import GemmProbe
from paceline.machines.slurm.foreign import SubmittedScript
from paceline.machines.slurm.record import SlurmRecord
from paceline.mlperf.run.trials import SeriesReport, TrialSeries
from paceline.profiles.profile import Profile
from paceline.reference import PAGES, with_generated
from paceline.runs.bundles.verification import BundleCheck
from paceline.runs.command_pairs import CommandComparison
from paceline.runs.difference import RunDiff
from paceline.runs.goodput.ledger import GoodputLedger
from paceline.runs.watch.reader import WatchState
from paceline.scaling.campaigns.record import Campaign
from paceline.scaling.campaigns.result import CampaignResult
from paceline.scaling.experts.report import ExpertsReport
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
    "command-comparison": CommandComparison,
    "explanation": Explanation,
    "watch": WatchState,
    "goodput": GoodputLedger,
    "experts": ExpertsReport,
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
    "mlperf-run": SeriesReport,
    "calibration": Calibration,
    "profile": Profile,
}


def schema_texts() -> dict[str, str]:
    """Return the text of every JSON Schema by its file name."""
    return {
        f"{name}.schema.json": json.dumps(described_schema(model), indent=2) + "\n"
        for name, model in FORMATS.items()
    }


def described_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema of `model` with the docstrings of its fields as descriptions."""
    schema = model.model_json_schema()
    for definition in (schema, *schema.get("$defs", {}).values()):
        owner = _model_named(definition.get("title", ""), model)
        for name, text in docstrings(owner).items() if owner else ():
            if name in definition.get("properties", {}):
                definition["properties"][name].setdefault("description", text)
    return schema


def _model_named(title: str, root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the class of a definition, searched among the fields of `root`."""
    pending, visited = [root], {root}
    while pending:
        model = pending.pop()
        if model.__name__ == title:
            return model
        for field in model.model_fields.values():
            new = set(models_in(field.annotation)) - visited
            visited |= new
            pending += new
    return None


def main() -> None:
    """Write schemas to the folder in the only argument, and reference pages next to it."""
    folder = Path(sys.argv[1])
    for name, text in schema_texts().items():
        write_text(folder / name, text)
    for name, generate in PAGES.items():
        page = folder.parent / name
        if page.exists():
            write_text(page, with_generated(page.read_text(encoding="utf-8"), generate()))


if __name__ == "__main__":
    main()
