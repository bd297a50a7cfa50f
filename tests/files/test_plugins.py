"""Plug-ins of an installed distribution: a log format, an engine and a device, and broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "toy-paceline"
version = "1.0"
[project.entry-points."paceline.log_formats"]
toylog = "toy_paceline:LOG_FORMAT"
toytable = "toy_paceline:TABLE"
[project.entry-points."paceline.engines"]
toyengine = "toy_paceline.engine"
[project.entry-points."paceline.devices"]
toy = "toy_paceline:DEVICES"
{more}
[tool.setuptools]
packages = ["toy_paceline"]
"""
BROKEN = """
absent = "toy_paceline.absent:DEVICES"
raising = "toy_paceline.raising:DEVICES"
known = "toy_paceline:KNOWN_DEVICES"
invalid = "toy_paceline:INVALID_DEVICES"
[project.entry-points."paceline.log_formats.unused"]
"""
PACKAGE = """
import re
import numpy as np
from paceline.engines.log_reading.log_content import LogFormat

STEP = re.compile(rb"toystep (\\d{1,9}) took ([0-9.]{1,12})s")


def read(blocks, log):
    for block in blocks:
        rows = STEP.findall(block)
        if rows:
            steps = np.array([int(step) for step, _ in rows])
            log.add_steps(steps, step_time_s=np.array([float(time) for _, time in rows]))


LOG_FORMAT = LogFormat(
    title="Toy trainer", marks=(b"toystep ",), step_line=STEP, read=read,
    example="`toystep 3 took 1.5s`", numbering="from 1",
)
TABLE = {
    "title": "Toy table", "mark": "toyloop ", "line": "toyloop {step}: {step_time_ms} ms",
    "example": "toyloop 3: 1500 ms",
}
BROKEN_TABLE = {**TABLE, "line": "toyloop {steps}"}
DEVICES = [{
    "name": "ToyChip-9", "vendor": "Toy", "family": "ToyChip", "memory_bytes": 96e9,
    "memory_bytes_per_s": 4e12, "memory_source": "toy data sheet", "power_w": 500,
    "peaks": {"bf16": {"flops_per_s": 1e15, "source": "toy data sheet"}},
}]
KNOWN_DEVICES = [{**DEVICES[0], "name": "H100-SXM"}]
INVALID_DEVICES = [{**DEVICES[0], "name": "ToyChip-8", "colour": "red"}]
"""
ENGINE = """
TITLE = "Toy engine"
SUPPORT = {"": {}}

def unsupported(spec): return []
def missing(spec): return None
def settings(spec): return {}
def job(spec, name): raise NotImplementedError
"""


def install(folder: Path, more: str) -> dict[str, str]:
    """Install the toy distribution, and return the environment that finds it."""
    package = folder / "source/toy_paceline"
    package.mkdir(parents=True)
    (package.parent / "pyproject.toml").write_text(PROJECT.format(more=more))
    (package / "__init__.py").write_text(PACKAGE)
    (package / "engine.py").write_text(ENGINE)
    (package / "raising.py").write_text("raise RuntimeError('no licence\\nserver')\n")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    target = folder / "installed"
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target)]
    done = subprocess.run([*command, str(package.parent)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {**os.environ, "PYTHONPATH": str(target), "COLUMNS": "200"}


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(tmp_path_factory.mktemp("working"), "")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(tmp_path_factory.mktemp("broken"), BROKEN)


def run(environment: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def test_a_log_format_of_a_plug_in_is_detected(working: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "toy.log"
    log.write_text("".join(f"toystep {step} took 1.50{step % 3}s\n" for step in range(1, 40)))

    document = json.loads(run(working, "parse", log, "--json").stdout)

    assert '"toylog"' in json.dumps(document)
    assert "1.50" in run(working, "parse", log).stdout
    assert "Toy trainer" in run(working, "formats").stdout


def test_a_table_of_a_plug_in_is_a_log_format(working: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "toy.log"
    log.write_text("".join(f"toyloop {step}: 150{step % 3} ms\n" for step in range(1, 40)))

    document = json.loads(run(working, "parse", log, "--json").stdout)

    assert document["engine"] == "toytable" and document["n_steps"] == 39
    assert "Toy table" in run(working, "formats", "toytable").stdout


def test_an_engine_of_a_plug_in_is_listed(working: dict[str, str]) -> None:
    listed = run(working, "recipes", "engines")

    assert "toyengine" in listed.stdout
    assert "warning" not in listed.stderr


def test_a_device_of_a_plug_in_is_estimated(working: dict[str, str]) -> None:
    assert "ToyChip-9" in run(working, "recipes", "devices").stdout
    estimate = run(working, "estimate", "llama31-8b", "--gpu", "toychip", "--gpus", "64").stdout
    assert "64 x ToyChip-9" in estimate


def test_a_broken_plug_in_gives_one_warning_and_stops_nothing(broken: dict[str, str]) -> None:
    done = run(broken, "estimate", "llama31-8b", "--gpu", "ToyChip-9", "--gpus", "64")

    assert "64 x ToyChip-9" in done.stdout
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    reasons = {line.split("'")[1]: line.partition("is left out: ")[2] for line in warnings}
    assert len(warnings) == len(reasons) == 4
    assert reasons["absent"].startswith("ModuleNotFoundError")
    assert reasons["raising"] == "RuntimeError: no licence server"
    assert reasons["known"] == "the catalog has H100-SXM"
    assert "ValidationError" in reasons["invalid"] and "colour" in reasons["invalid"]
