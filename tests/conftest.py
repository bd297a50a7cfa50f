"""Fixtures that any test may use."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.processes import ended_on_failure

BESIDE_THE_REPOSITORY = Path(__file__).parents[2] / "shared" / "data"


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
def _no_own_calibrations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the user of this machine has calibrated must not move what the tests compute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield
