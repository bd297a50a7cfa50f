"""The fabric probe over gloo: two payloads within a limit of time, equal on all ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.trainer.measure.fabric import GROWTH, MAX_BYTES, SMALL_BYTES
from tests.ports import free_port
from tests.runs.test_fabric import evaluated, run_folder

PROGRAM = """
import json, os
from paceline.trainer.measure import fabric
from paceline.trainer.parallel.mesh import join_world
world = join_world("cpu")
probes = []
for fabric.MAX_PAYLOAD_S in (0.0, 3600.0):
    probes.append(fabric.probe_fabric(world))
print(json.dumps(probes), flush=True)
os._exit(0)  # the destructor of a gloo group can wait forever
"""


def gloo_probes() -> list[list[dict[str, Any]]]:
    """Return the probes of two ranks: with a limit that allows no further payload, and without."""
    shared = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**shared, "LOCAL_RANK": str(rank), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.fixture(scope="module")
def probes() -> list[list[dict[str, Any]]]:
    return gloo_probes()


def test_all_ranks_use_the_payloads_that_the_limit_allows(
    probes: list[list[dict[str, Any]]],
) -> None:
    for limited, free in probes:
        assert limited["bytes"] == GROWTH * SMALL_BYTES
        assert free["bytes"] == MAX_BYTES["cpu"]
        for probe in (limited, free):
            assert probe["small"]["bytes"] == SMALL_BYTES
            assert probe["small"]["time_s"] > 0 and probe["spread"] >= 0


def test_the_rate_of_gloo_is_that_of_the_difference(
    tmp_path: Path, probes: list[list[dict[str, Any]]]
) -> None:
    """Two ranks stand for two nodes with one device each."""
    (_, first), (_, second) = probes
    _, proof = evaluated(run_folder(tmp_path / "a", probes=(first, second)))
    slowest = max(first, second, key=lambda probe: probe["time_s"])
    small, difference_s = slowest["small"], slowest["time_s"] - slowest["small"]["time_s"]
    assert difference_s > 0 and proof.asymptotic_bytes_per_s is not None
    assert proof.asymptotic_bytes_per_s == pytest.approx(
        (slowest["bytes"] - small["bytes"]) / difference_s
    )
    assert (proof.calls, proof.payload_bytes) == (5, MAX_BYTES["cpu"])


def test_the_first_rank_of_a_host_reports_its_interfaces(
    probes: list[list[dict[str, Any]]],
) -> None:
    (_, first), (_, second) = probes
    loopback = next(use for use in first["interfaces"] if use["name"] == "lo")
    assert loopback["sent_bytes"] >= first["bytes"] * first["calls"] and not second["interfaces"]
