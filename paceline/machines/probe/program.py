"""Execution of a trainer program on this machine, with its output read as JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import SystemFaultError
from paceline.files.documents import parse_json, write_text
from paceline.files.programs import run_program
from paceline.files.temporary import temporary_folder
from paceline.files.trainer_program import write_program
from paceline.machines.node.script import agent_command, agent_text


def probe_lines(
    python: str,
    program: str,
    question: Mapping[str, Any],
    *,
    ranks: int = 1,
    threads: int | None = None,
    limit_s: float,
) -> list[dict[str, Any]]:
    """Run `program`, a module of the trainer, once and return the JSON lines that it prints.

    Raises SystemFaultError if it fails, exceeds `limit_s` seconds, or prints no JSON line.
    """
    where = f"{program.rpartition('.')[2]} probe"
    # -P, which interpreters before 3.11 do not have: no modules of the working folder.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    elif ranks > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores
    try:
        with temporary_folder() as folder:
            command = [python, str(write_program(program, Path(folder))), json.dumps(question)]
            if ranks > 1:
                agent, *arguments = agent_command(ranks)
                write_text(Path(folder) / agent, agent_text())
                command[1:1] = [f"{folder}/{agent}", *arguments]
            process = run_program(command, env=environment, limit_s=limit_s)
            process.check_returncode()
    except subprocess.TimeoutExpired as error:
        raise SystemFaultError(where, f"did not end within {limit_s:.0f} s") from error
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemFaultError(where, _reason(error)) from error
    texts = [line for line in process.stdout.splitlines() if line.startswith("{")]
    try:
        lines = [parse_json(text, nan=True) for text in texts]
    except ValueError as error:
        raise SystemFaultError(where, f"printed no JSON: {error}") from error
    if not lines:
        raise SystemFaultError(where, f"printed no result: {process.stderr[-300:]}")
    return lines


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    """Return the line that states why the program failed, without the launcher's own messages."""
    text = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    errors = [line.strip() for line in text if "Error: " in line]
    return (errors or text[-1:] or ["failed"])[0][:300]
