"""`paceline compare` as users and CI servers meet it: words, files, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_errors import paceline
from tests.runs.example import write_repeats, write_run

KEYS = {
    "verdict",
    "ratio",
    "low",
    "high",
    "p",
    "n_a",
    "n_b",
    "margin",
    "repeats_needed",
    "differing_keys",
    "metrics",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_repeats(root, "base", 5)
    write_repeats(root, "again", 5)
    write_repeats(root, "slow", 3, change=0.03)
    write_repeats(root, "near", 3, change=0.007)
    write_run(root, "broken", status="oom", reason="no memory left")
    write_run(root, "single", 0.204, seed=9)
    return root


@pytest.mark.parametrize(
    ("arguments", "verdict", "code"),
    [
        (["base", "again"], "same", 0),
        (["base", "slow"], "slower", 3),
        (["slow", "base"], "faster", 0),
        (["base", "slow", "--margin", "5%"], "same", 0),
        (["base", "near"], "undecided", 4),
        (["base", "broken"], "invalid", 3),
        (["base", "single"], "undecided", 4),
        (["single", "--against", "opt-13b-8"], "not comparable", 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_exit_code_is_the_gate(runs: Path, arguments: list[str], verdict: str, code: int):
    done = paceline("compare", *arguments, "--json", runs=runs)
    document = json.loads(done.stdout)
    assert (document["verdict"], done.returncode, done.stderr) == (verdict, code, "")
    assert set(document) >= KEYS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["base"], "either B or --against"),
        (["base", "slow", "--against", "reference"], "either B or --against"),
        (["base", "nothing"], "is not in"),
        (["base", "slow", "--margin", "5"], "is not a margin"),
        (["base", "slow", "--allow", "dtyp"], "did you mean 'dtype'"),
        (["base", "slow", "--metric", "stp"], "--metric stp: is unknown"),
        (["base", "--against", "opt-13b-9"], "did you mean"),
        (["base", "slow", "--format", "xml"], "--format"),
        (["", "slow"], "run ''"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_clear_error(runs: Path, arguments: list[str], words: str):
    done = paceline("compare", *arguments, runs=runs)
    assert done.returncode == 1 and words in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr


def test_other_verbs_do_not_load_scipy():
    program = (
        "import sys, paceline.cli, paceline.logs.parser, paceline.runs.flow\n"
        "assert not [name for name in sys.modules if name.startswith('scipy')]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
