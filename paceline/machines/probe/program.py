"""Starts a probe program of the trainer's folder on this machine, and reads its JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from importlib import resources
from typing import Any

from paceline.core.errors import SystemFaultError


def probe_lines(
    python: str,
    program: str,
    question: Mapping[str, Any],
    *,
    ranks: int = 1,
    threads: int | None = None,
    limit_s: float,
) -> list[dict[str, Any]]:
    """The JSON lines of one start of `program`, rank 0's.

    Raises SystemFaultError when it fails, does not end in time, or tells nothing.
    """
    where = f"{program.removesuffix('.py')} probe"
    path = str(resources.files("paceline") / "native" / program)
    launch = [
        "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}",
    ]  # fmt: skip
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    try:
        done = subprocess.run(
            [python, *(launch if ranks > 1 else []), path, json.dumps(question)],
            capture_output=True, text=True, timeout=limit_s, check=True, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SystemFaultError(where, f"did not end within {limit_s:.0f} s") from error
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemFaultError(where, _reason(error)) from error
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemFaultError(where, f"measured nothing: {done.stderr[-300:]}")
    return lines


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    """The line that says why the program failed, before what a launcher adds."""
    text = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    told = [line.strip() for line in text if "Error: " in line]
    return (told or text[-1:] or ["failed"])[0][:300]
