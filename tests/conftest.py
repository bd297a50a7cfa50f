"""Fixtures that any test may use."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.nightly import NIGHTLY
from tests.processes import ended_on_failure

# How long an example takes says how busy the machine is. Where hypothesis sees that it runs in CI
# it draws the same examples each time.
settings.register_profile(
    "patient",
    settings(),
    max_examples=100 if NIGHTLY else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background jobs ignore SIGINT, and so would all that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

BESIDE_THE_REPOSITORY = Path(__file__).parents[2] / "shared" / "data"


LONGEST = """
runs/test_tiny_studies runs/test_flow runs/test_repeats_cli
engines/test_fuzz engines/test_every_log_format
trainer/test_workloads trainer/model/test_flops trainer/offline/test_memory_trace
trainer/test_failures
mlperf/run/test_tiny_trials mlperf/run/test_tiny_adapters mlperf/submission/test_package_check
layouts/tune/test_cli layouts/sweep/test_cli
scaling/campaigns/test_campaign scaling/campaigns/test_cli scaling/check/test_cli
attacks/test_processes attacks/test_fields attacks/test_fuzz
clusters/test_tune clusters/test_slurm clusters/test_sweep_on_parts clusters/test_scale
clusters/test_ssh_runs clusters/test_ssh clusters/test_deepspeed clusters/test_check
"""
"""Files that take long, the longest of a suite first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no worker is left alone with one; skip nightly tests."""
    here = Path(__file__).parent
    ranks = {here / f"{name}.py": rank for rank, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
    if NIGHTLY:
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def pytest_collection_finish() -> None:
    """Keep the garbage collector from searching all that was imported again and again."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """What a test has started ends with it when it fails."""
    with ended_on_failure():
        yield


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """The folder of public logs and tables that some tests read; they skip where it is missing."""
    folder = Path(os.environ.get("PACELINE_REFERENCE_DATA", BESIDE_THE_REPOSITORY))
    if not folder.is_dir():
        pytest.skip(f"no reference data in {folder}; set PACELINE_REFERENCE_DATA")
    return folder


@pytest.fixture(autouse=True, scope="session")
def _no_settings_of_this_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Calibrations and defaults of the user of this machine must not change what tests compute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield
