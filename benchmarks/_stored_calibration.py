"""A calibration's measurements as JSON, so that they can be weighted again without measuring."""

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


def short_from_json(content: Mapping[str, Any]) -> ShortTraining:
    """Return the training from `short_to_json`; raise ValueError for anything else."""
    return ShortTraining(content["recipe"], RunSpec.model_validate(content["spec"]))


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
            for item in measured.trainings
        ],
    }


def from_json(content: Mapping[str, Any]) -> Measurements:
    """Return the measurements from `to_json`; raise ValueError for anything else."""
    return Measurements(
        About.model_validate(content["about"]),
        [Rates(lines) for lines in content["rates"]],
        [
            TimedTraining(short_from_json(item), item["seconds"], item["n"], item["spread"])
            for item in content["timed"]
        ],
    )
