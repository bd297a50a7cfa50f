"""What a calibration measured as JSON, so that it can be weighed anew without measuring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.run import RunSpec
from paceline.estimate.calibrate.calibration import About
from paceline.estimate.calibrate.cases import ShortTraining
from paceline.estimate.calibrate.measurement import Measurements, Rates, TimedTraining


def short_to_json(short: ShortTraining) -> dict[str, Any]:
    """A short training, whole: recipes and machines may be others when it is read."""
    spec = short.spec.model_dump(mode="json", exclude_defaults=True)
    return {"recipe": short.recipe, "spec": spec}


def short_from_json(kept: Mapping[str, Any]) -> ShortTraining:
    """What `short_to_json` gave; raises ValueError for anything else."""
    return ShortTraining(kept["recipe"], RunSpec.model_validate(kept["spec"]))


def to_json(measured: Measurements) -> dict[str, Any]:
    """Facts, lines of the probes, short trainings with their times."""
    return {
        "about": measured.about.model_dump(mode="json"),
        "rates": [
            [{k: v for k, v in line.items() if k != "rates"} for line in item.lines]
            for item in measured.rates
        ],
        "timed": [
            {
                **short_to_json(item.short),
                "seconds": item.seconds,
                "n": item.n,
                "spread": item.spread,
            }
            for item in measured.timed
        ],
    }


def from_json(kept: Mapping[str, Any]) -> Measurements:
    """What `to_json` gave; raises ValueError for anything else."""
    return Measurements(
        About.model_validate(kept["about"]),
        [Rates(lines) for lines in kept["rates"]],
        [
            TimedTraining(short_from_json(item), item["seconds"], item["n"], item["spread"])
            for item in kept["timed"]
        ],
    )
