"""What a user hears of a layout that cannot run: the rule's sentence, and exit code 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.core.axes.axis import Rule
from paceline.core.errors import UserError
from tests.cli.test_errors import paceline
from tests.core.refused import CASES, named


def options(fields: dict[str, Any]) -> list[str]:
    named = ((key, value) for key, value in fields.items() if key != "kind")
    return [part for key, value in named for part in ("--set", f"{key}={value}")]


HERE = [(rule, fields) for rule, fields in CASES if "device" not in fields]


@pytest.mark.parametrize(("rule", "fields"), HERE, ids=[named(rule) for rule, _ in HERE])
def test_a_dry_run_tells_the_reason_of_every_rule(rule: Rule, fields: dict[str, Any]):
    recipe = "flux1-schnell-tiny" if fields.get("kind") == "mmdit" else "tiny-llama"
    arguments = ["run", recipe, "--device", "cpu", "--devices", "2", "--dry-run"]
    if fields.get("kind") == "experts":
        arguments += ["--set", "model.num_experts=2"]
    done = CliRunner().invoke(app, [*arguments, *options(fields)])

    assert isinstance(done.exception, UserError) and done.exception.exit_code == 1
    assert rule.reason in str(done.exception) and done.stdout == ""


def test_the_reason_is_one_line_on_standard_error(tmp_path: Path):
    rule, fields = CASES[0]
    done = paceline("run", "tiny-llama", "--dry-run", *options(fields), runs=tmp_path)

    assert done.returncode == 1 and done.stdout == ""
    assert rule.reason in done.stderr and "Traceback" not in done.stderr


def test_eight_processes_on_fewer_cores_are_planned_and_told(tmp_path: Path):
    done = paceline(
        "run",
        "tiny-llama",
        "--device",
        "cpu",
        "--devices",
        "8",
        "--dry-run",
        "--set",
        "tp=2",
        "--set",
        "pp=2",
        "--set",
        "vp=2",
        runs=tmp_path,
    )

    assert done.returncode == 0, done.stderr
    assert "agent.py 1 0 8 " in done.stdout


def test_the_help_shows_how_a_layout_is_set():
    done = CliRunner().invoke(app, ["run", "--help"])

    assert "--tp 2 --pp 2" in done.stdout and "layout-rules.md" in done.stdout
