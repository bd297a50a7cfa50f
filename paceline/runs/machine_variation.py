"""Stored run-to-run variation of the machines whose runs are here; `probe calibrate` writes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from paceline.compare.few_runs import published_prior
from paceline.compare.machine_variation import (
    ConfigurationRuns,
    MachineVariation,
    estimate_prior,
)
from paceline.compare.sides import Pair
from paceline.core.errors import PacelineError
from paceline.core.run import RunSettings
from paceline.core.value import Value
from paceline.files.catalog import variation_class
from paceline.files.documents import read_value, write_value
from paceline.files.run_folder import read_record, run_folders
from paceline.runs.bundles.writing import BUNDLE_FILE
from paceline.runs.history import runs_around_levels


class VariationFile(Value):
    """Run-to-run variation of each kind of machine."""

    machines: tuple[MachineVariation, ...]


def variation_file() -> Path:
    """Return the file in $XDG_DATA_HOME (default ~/.local/share)."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "paceline" / "run-variation.json"


def estimate_machines(root: Path) -> tuple[MachineVariation, ...]:
    """Return the variation of each kind of machine by the runs under `root`.

    Imported logs and bundles come from other machines and are ignored.
    """
    by_recipe: dict[str, list[Path]] = {}
    for folder in run_folders(root):
        with suppress(PacelineError):
            settings = read_record(folder).settings
            if settings.origin != "imported" and was_made_here(folder):
                by_recipe.setdefault(settings.recipe or "", []).append(folder)
    by_machine: dict[tuple[str, str | None], list[ConfigurationRuns]] = {}
    for folders in by_recipe.values():
        for facts, runs in runs_around_levels(folders):
            if facts.device:
                by_machine.setdefault((facts.device, _cpu(facts)), []).append(runs)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    estimates = [
        (key, runs, estimate_prior(runs, published_prior(variation_class(key[0]))))
        for key, runs in sorted(by_machine.items(), key=str)
    ]
    return tuple(
        MachineVariation(
            device=device,
            device_label=label,
            **vars(prior),
            n_runs=sum(len(day) for each in runs for day in each.days),
            n_configurations=len(runs),
            date=date,
        )
        for (device, label), runs, prior in estimates
        if prior
    )


def was_made_here(folder: Path) -> bool:
    """Return whether a run was made under this root: is not an imported bundle."""
    return not (folder / BUNDLE_FILE).exists()


def store_machines(machines: Sequence[MachineVariation]) -> None:
    """Write the variation of these machines; that of other machines is kept."""
    keys = {(each.device, each.device_label) for each in machines}
    others = [each for each in _machines_in_file() if (each.device, each.device_label) not in keys]
    write_value(variation_file(), VariationFile(machines=(*others, *machines)))


def find_machine(sides: Pair) -> MachineVariation | None:
    """Return the stored variation of the machine of all runs, or None.

    A GPU is found by its catalog name, a CPU by its own.
    """
    machines = {
        (run.facts.device, _cpu(run.facts))
        for side in sides.each
        if not side.published
        for run in side.valid_runs
    }
    if len(machines) != 1 or ("cpu", None) in machines:
        return None
    return next(
        (each for each in _machines_in_file() if (each.device, each.device_label) in machines), None
    )


def _cpu(facts: RunSettings) -> str | None:
    """Return the name of a CPU; None for other devices."""
    return facts.device_label if facts.device == "cpu" else None


def _machines_in_file() -> tuple[MachineVariation, ...]:
    with suppress(PacelineError):
        return read_value(variation_file(), VariationFile).machines
    return ()
