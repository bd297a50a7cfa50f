"""Processes that a test starts: none outlives a test that fails, and disturbs those after it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch


@contextmanager
def ended_on_failure() -> Iterator[None]:
    """Ends what is started inside when an exception leaves it, and closes its pipes."""
    started: list[subprocess.Popen[Any]] = []
    usual = subprocess.Popen.__init__

    def noted(self: subprocess.Popen[Any], *args: Any, **kwargs: Any) -> None:
        usual(self, *args, **kwargs)
        started.append(self)

    with patch.object(subprocess.Popen, "__init__", noted):
        try:
            yield
        except BaseException:
            for process in started:
                end(process)
            raise


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and close its pipes; the servers of tests.forks serve the next test too."""
    if isinstance(process.args, list) and "tests.forks" in process.args:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError):  # what was never sent
            if pipe is not None:
                pipe.close()
