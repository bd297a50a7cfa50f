"""Beds that all tests of the suite share; each is repaired after a test that breaks it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.clusters.bed import Bed, Plan
from tests.clusters.bed.needs import need

SHARED = ("ssh_hosts", "slurm_cluster", "slurm_without_accounting")


def started(name: str, plan: Plan) -> Iterator[Bed]:
    """A bed for one test session."""
    need(plan)
    bed = Bed.up(f"{name}-{os.getpid()}", plan, tied=True)
    try:
        yield bed
    finally:
        bed.down()


@pytest.fixture(scope="session")
def ssh_hosts() -> Iterator[Bed]:
    """Eight hosts with sshd."""
    yield from started("ssh", Plan(hosts=8))


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Bed]:
    """Four nodes under Slurm with accounting and the options of Pyxis; they have sshd as well."""
    yield from started("slurm", Plan(hosts=4, slurm=True, containers=True))


@pytest.fixture(scope="session")
def slurm_without_accounting() -> Iterator[Bed]:
    """Two nodes under a Slurm that knows no finished job and no containers: sacct fails."""
    yield from started("plain-slurm", Plan(hosts=2, slurm=True, accounting=False))


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> Iterator[None]:
    """Takes away all faults, jobs and processes that a test leaves on a shared bed."""
    yield
    for name in SHARED:
        if name in request.fixturenames:
            request.getfixturevalue(name).repair()
