"""A disk that fills in the middle of a run over SSH: the cause is named, what was written stays."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_errors import paceline
from tests.clusters.bed import Bed, Plan
from tests.clusters.bed.needs import need
from tests.clusters.test_ssh_runs import STEPS, disturb_one
from tests.runs.test_flow import only_run
from tests.waiting import wait_until

FULL = "No space left on device"
SHARED_BYTES = 96 * 2**20
"""What the check before a run asks for, and a little more."""


def test_a_disk_that_fills_on_one_host_is_told_with_its_rank(
    ssh_hosts: Bed, tmp_path: Path
) -> None:
    def disturb() -> None:
        wait_until(lambda: list(tmp_path.glob("*/checkpoints/latest")), "a checkpoint", 60)
        ssh_hosts.hosts["node-002"].fill_disk(only_run(tmp_path) / "checkpoints")

    run = disturb_one(ssh_hosts, tmp_path, disturb, "--set", "checkpoint.every=20")
    assert (run.code, run.result["status"], run.left) == (2, "failed", {})
    assert f"cannot be written: rank 1: {FULL}" in run.result["reason"]
    assert run.result["steps_done"] >= 20
    kept = only_run(tmp_path) / "checkpoints"
    assert (kept / (kept / "latest").read_text().strip() / "state.json").is_file()
    assert "Traceback" not in run.errors


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Bed, Path]]:
    """Two hosts that share a small disk with this machine, and where it lies."""
    need(Plan(hosts=2))
    size = f"size={SHARED_BYTES},mode=755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "shared", tmp_path], check=True)
    try:
        bed = Bed.up(f"full-{os.getpid()}", Plan(hosts=2), tied=True)
        try:
            yield bed, tmp_path
        finally:
            bed.down()
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_shared_disk_that_fills_ends_the_run_and_keeps_the_steps(
    small_disk: tuple[Bed, Path],
) -> None:
    bed, runs = small_disk
    ballast = runs / "ballast"

    def fill() -> None:
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match=FULL):
            while True:
                file.write(bytes(2**16))

    run = disturb_one(bed, runs, fill)
    assert (run.code, run.left) == (2, {})
    assert f"cannot be written: {FULL}" in run.errors.splitlines()[-1]
    assert "Traceback" not in run.errors
    ballast.unlink()
    record = json.loads(paceline("runs", "show", "last", "--json", runs=runs).stdout)
    assert (record["status"], record["steps_done"] > STEPS) == ("incomplete", True)
    assert record["reason"].endswith(FULL)
