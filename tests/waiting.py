"""Wait for an event in a test, with a limit that only a fault reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(
    condition: Callable[[], Any], what: str, limit_s: float = 60.0, pause_s: float = 0.02
) -> Any:
    """Poll `condition` and return its first true value.

    Raises TimeoutError naming `what` after `limit_s` seconds. The limit is for what never comes: a
    busy machine must not reach it.
    """
    end = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(pause_s)
    return value
