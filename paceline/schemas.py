"""JSON Schemas of every file that Paceline reads or writes, made from the declarations.

`python -m paceline.schemas docs/schemas` writes them; a test holds the folder against this module.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic import BaseModel

from paceline.core.compare.judgement import Comparison
from paceline.core.hardware import Cluster, Device, Link
from paceline.core.logs.parsed import ParsedLog
from paceline.core.over_time.grouped import SeriesResult
from paceline.core.result import Result
from paceline.events import EndEvent, StartEvent, StepEvent
from paceline.probe.gemm import GemmProbe
from paceline.recipe import Recipe
from paceline.references import Source
from paceline.rundir import RunRecord, write_text

FORMATS: dict[str, type[BaseModel]] = {
    "recipe": Recipe,
    "cluster": Cluster,
    "device": Device,
    "link": Link,
    "references": Source,
    "run": RunRecord,
    "result": Result,
    "repeats": SeriesResult,
    "parsed-log": ParsedLog,
    "comparison": Comparison,
    "event-start": StartEvent,
    "event-step": StepEvent,
    "event-end": EndEvent,
    "gemm-probe": GemmProbe,
}


def schema_texts() -> dict[str, str]:
    """File name -> JSON Schema text."""
    return {
        f"{name}.schema.json": json.dumps(model.model_json_schema(), indent=2) + "\n"
        for name, model in FORMATS.items()
    }


def main() -> None:
    """Write every schema into the folder given as the only argument."""
    folder = Path(sys.argv[1])
    for name, text in schema_texts().items():
        write_text(folder / name, text)


if __name__ == "__main__":
    main()
