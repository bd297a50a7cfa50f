"""What plans of foreign batch scripts on a Slurm bed have in common."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.machines.placement import HostPlacement, Request
from paceline.runs.plan import Plan
from tests.clusters.bed import Bed

SITE = """\
name: bed
device: GB300
nodes: 2
devices_per_node: 2
launcher: slurm
slurm: {gres: none, partition: batch}
"""


def on_site(bed: Bed, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Bed:
    """The bed, whose Slurm this process is a client of and whose cluster file is in `folder`."""
    for name, value in bed.settings.items():
        monkeypatch.setenv(name, value)
    (folder / "site.yaml").write_text(SITE)
    return bed


def words(settings: dict[str, Any], *more: str) -> list[str]:
    """Overrides that choose an engine's settings."""
    return [*(f"engine_settings.{name}={json.dumps(v)}" for name, v in settings.items()), *more]


def request(folder: Path, recipe: str, variant: str | None, overrides: list[str]) -> Request:
    """Return a request for the cluster whose file is in `folder`."""
    site = str(folder / "site.yaml")
    return Request(
        recipe, variant, tuple(overrides), None, "auto", site, where=HostPlacement(launcher="slurm")
    )


def with_variable(plan: Plan, name: str) -> Plan:
    """The plan whose script is given one more variable."""
    return replace(plan, job=replace(plan.job, env={**plan.job.env, name: "1"}))


def lose(bed: Bed, name: str) -> None:
    """A node is cut off from power, and Slurm hears of it before it misses it."""
    bed.hosts[name].crash()
    bed.slurm.ask("scontrol", "update", f"nodename={name}", "state=down", "reason=crashed")
