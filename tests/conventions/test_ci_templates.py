"""The GitHub Action and the GitLab template: their steps are run with bash, as a runner does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
LOG = ROOT / "docs/examples/train.log"
EQUAL = {"BASELINE": str(LOG), "CANDIDATE": str(LOG)}
SLOWER = {"BASELINE": "sleep 0.01", "CANDIDATE": "sleep 0.4", "MODE": "ab"}
SLOWER |= {"OPTIONS": "--margin 5%"}


def load(path: str) -> Any:
    return YAML(typ="safe").load((ROOT / path).read_text())


def run(script: str, folder: Path, environment: dict[str, str]) -> int:
    """Run the script of a step, and return its exit code."""
    defaults = {"MODE": "compare", "OPTIONS": "", "PACELINE": f"{sys.executable} -m paceline"}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PACELINE_RUNS": str(folder / "runs"), **defaults, **environment},
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def github(folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Run the action, and return its exit code, its outputs and the summary."""
    action = load(".github/actions/paceline-compare/action.yml")
    (step,) = action["runs"]["steps"]
    files = {"GITHUB_OUTPUT": folder / "outputs", "GITHUB_STEP_SUMMARY": folder / "summary"}
    for path in files.values():
        path.touch()
    variables = {name: str(path) for name, path in files.items()} | {"RUNNER_TEMP": str(folder)}
    code = run(step["run"], folder, {"ALLOW_UNDECIDED": "false", **variables, **environment})
    return code, (folder / "outputs").read_text(), (folder / "summary").read_text()


def counts(path: Path) -> tuple[str | None, str | None]:
    suite = ElementTree.parse(path).getroot()
    return suite.get("failures"), suite.get("errors")


def test_the_action_declares_all_that_its_step_reads() -> None:
    action = load(".github/actions/paceline-compare/action.yml")
    (step,) = action["runs"]["steps"]

    given = {value.split("inputs.")[1].split(" ")[0] for value in step["env"].values()}

    assert action["runs"]["using"] == "composite" and step["shell"] == "bash"
    assert given == set(action["inputs"])
    assert "${{" not in step["run"], "an input in the script could run commands"
    assert all(f"steps.{step['id']}." in out["value"] for out in action["outputs"].values())


def test_a_slower_command_fails_the_action_with_a_report(tmp_path: Path) -> None:
    code, outputs, summary = github(tmp_path, SLOWER)

    assert code == 3 and "exit-code=3\n" in outputs
    assert f"junit={tmp_path}/paceline.xml\n" in outputs
    assert "slower" in summary and "|" in summary
    assert counts(tmp_path / "paceline.xml") == ("1", "0")


@pytest.mark.parametrize(("allowed", "expected"), [("false", 4), ("true", 0)])
def test_an_undecided_comparison_may_be_allowed(
    tmp_path: Path, allowed: str, expected: int
) -> None:
    code, outputs, summary = github(tmp_path, {**EQUAL, "ALLOW_UNDECIDED": allowed})

    assert code == expected and "exit-code=4\n" in outputs
    assert summary
    assert counts(tmp_path / "paceline.xml") == ("0", "1")


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    assert github(tmp_path, {**EQUAL, "MODE": "run"})[0] == 1


@pytest.mark.parametrize(("variables", "code"), [(SLOWER, 3), (EQUAL, 4)])
def test_the_gitlab_template_reports_and_exits_alike(
    tmp_path: Path, variables: dict[str, str], code: int
) -> None:
    job = load("packaging/ci/gitlab.yml")[".paceline-compare"]

    assert run("\n".join(job["script"]), tmp_path, variables) == code

    assert (tmp_path / job["artifacts"]["paths"][0]).read_text()
    assert counts(tmp_path / job["artifacts"]["reports"]["junit"]) != ("0", "0")
    assert job["allow_failure"] == {"exit_codes": 4}
