"""Limits and deaths are those of the groups around this process, not of the whole machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.machines.probe import container as cgroups
from paceline.machines.probe.container import oom_kills
from paceline.machines.probe.inventory import memory_limit_bytes, usable_cores


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this process's group, two levels deep in a tree without any limit."""
    place(tmp_path, monkeypatch, "0::/slice/job\n")
    folder = tmp_path / "slice" / "job"
    folder.mkdir(parents=True)
    return folder


def place(root: Path, monkeypatch: pytest.MonkeyPatch, membership: str) -> None:
    (root / "membership").write_text(membership)
    (root / "vmstat").write_text("pgfault 1\noom_kill 41\n")
    monkeypatch.setattr(cgroups, "ROOT", root)
    monkeypatch.setattr(cgroups, "MEMBERSHIP", root / "membership")
    monkeypatch.setattr(cgroups, "VMSTAT", root / "vmstat")


def test_deaths_are_counted_in_the_own_group(own: Path):
    (own / "memory.events").write_text("oom 9\noom_kill 2\noom_group_kill 5\n")
    (own.parent / "memory.events").write_text("oom_kill 7\n")
    assert oom_kills() == 2


def test_deaths_are_counted_around_a_group_that_does_not_say(own: Path):
    (own.parent / "memory.events").write_text("oom_kill 7\n")
    assert oom_kills() == 7


def test_deaths_are_counted_on_the_machine_when_no_group_says(own: Path):
    assert oom_kills() == 41
    cgroups.VMSTAT.unlink()
    assert oom_kills() == 0


@pytest.mark.parametrize(("inner", "outer"), [("max", 2**20), (2**20, 2**30), (2**30, 2**20)])
def test_the_smallest_memory_limit_on_the_way_up_counts(own: Path, inner: object, outer: object):
    (own / "memory.max").write_text(f"{inner}\n")
    (own.parent / "memory.max").write_text(f"{outer}\n")
    assert memory_limit_bytes() == 2**20


def test_no_limit_leaves_the_machine(own: Path):
    (own / "memory.max").write_text("max\n")
    (own / "cpu.max").write_text("max 100000\n")
    assert cgroups.group_memory_limit_bytes() is None and cgroups.core_quota() is None
    assert memory_limit_bytes() > 2**20 and usable_cores() >= 1


def test_the_smallest_core_quota_on_the_way_up_counts(own: Path):
    (own / "cpu.max").write_text("max 100000\n")
    (own.parent / "cpu.max").write_text("150000 100000\n")
    (cgroups.ROOT / "cpu.max").write_text("800000 100000\n")
    assert cgroups.core_quota() == 1.5 and usable_cores() == 1


@pytest.mark.parametrize("membership", ["0::/../..\n", "0::/not/mounted/here\n", "1:cpu:/a\n", ""])
def test_a_group_that_is_not_mounted_is_read_from_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str
):
    place(tmp_path, monkeypatch, membership)
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory_limit_bytes() == 2**20
