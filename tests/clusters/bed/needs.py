"""What this machine lacks for a bed, or for a test that needs one of its programs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clusters.bed.plan import Plan
from tests.clusters.bed.process import SEARCH_PATH, BedError, call

PROGRAMS = ("ip", "unshare", "nsenter")
SSH_PROGRAMS = ("sshd", "ssh", "ssh-keygen")
SLURM_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
ACCOUNTING_PROGRAMS = ("mariadbd", "mariadb", "mariadb-install-db", "slurmdbd", "sacct")
TRIAL = (
    "mount -t tmpfs tmpfs /run && ip link add trial0 type bridge && ip link add trial1 type veth"
)


def lacking(plan: Plan) -> str | None:
    """Why this machine cannot have such a bed, None when it can."""
    if os.geteuid() != 0:
        return "virtual hosts need root"
    programs = [*PROGRAMS]
    programs += SSH_PROGRAMS if plan.ssh else ()
    programs += SLURM_PROGRAMS if plan.slurm else ()
    programs += ACCOUNTING_PROGRAMS if plan.slurm and plan.accounting else ()
    programs += ("gcc",) if plan.slurm and plan.containers else ()
    missing = [name for name in programs if shutil.which(name, path=SEARCH_PATH) is None]
    if plan.containers and not Path("/usr/include/slurm/spank.h").exists():
        missing.append("libslurm-dev")
    if missing:
        return not_installed(missing)
    kinds = ("--net", "--uts", "--ipc", "--mount", "--pid")
    try:
        call(["unshare", *kinds, "--fork", "--mount-proc", "sh", "-c", TRIAL])
    except BedError as error:
        return f"this machine has no namespaces, bridges or virtual cables: {error}"
    return None


def not_installed(names: Sequence[str]) -> str:
    """What is missing, and how to get it."""
    return f"not installed: {', '.join(names)}; `make deps-clusters` installs them"


def need(plan: Plan) -> None:
    """Skips a test where the machine cannot have such a bed, and fails it where one is required."""
    skip_or_fail(lacking(plan))


def need_programs(*names: str) -> None:
    """Skips a test where programs are missing, and fails it where beds are required."""
    missing = [name for name in names if shutil.which(name) is None]
    skip_or_fail(not_installed(missing) if missing else None)


def skip_or_fail(missing: str | None) -> None:
    """Skips a test for what is missing, and fails it where that is required (PACELINE_REQUIRE)."""
    if missing and "clusters" in os.environ.get("PACELINE_REQUIRE", "").split(","):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
