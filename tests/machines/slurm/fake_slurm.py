"""Slurm's commands as shell scripts on PATH, for what real ones do not do on demand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def put(folder: Path, monkeypatch: pytest.MonkeyPatch, **commands: str) -> Path:
    """Commands that run these lines of sh; the file that is returned has a line for every call."""
    calls = folder / "calls"
    calls.touch()
    for name, text in commands.items():
        path = folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{calls}\n{text}\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    return calls
