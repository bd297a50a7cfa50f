"""Is command B faster than command A? Decided by pairs, with a bounded error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.command import paceline
from tests.waiting import wait_until

PROGRAM = """
import json, sys, random
from pathlib import Path
count = Path(sys.argv[1]); n = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (n + 1))
value = float(sys.argv[2]) * (1 + 0.001 * (n % 3))
print("warming up, step_time: 99.0 s")
print(f"step_time: {value} s, loss: {sys.argv[3]}")
print(json.dumps({"train": [{"step_time": value}], "loss": float(sys.argv[3])}))
"""
STEP_TIME = "step_time: ([0-9.]+)"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def command(program: Path, side: str, value: float, loss: float = 2.5) -> str:
    return f"{sys.executable} {program} {program.parent / side} {value} {loss}"


def compared(program: Path, a: str, b: str, *options: object, code: int) -> dict[str, Any]:
    done = paceline("ab", a, b, *options, "--json", runs=program.parent / "runs")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("b", "options", "verdict", "code"),
    [
        (1.08, (), "worse", 3),
        (0.92, (), "better", 0),
        (1.08, ("--higher-is-better",), "better", 0),
        (1.0, (), "same", 0),
        (1.08, ("--margin", "20%"), "same", 0),
    ],
)
def test_pairs_decide(program: Path, b: float, options: tuple[str, ...], verdict: str, code: int):
    a, b_command = command(program, "a", 1.0), command(program, "b", b)
    result = compared(program, a, b_command, "--metric", STEP_TIME, *options, code=code)
    assert result["verdict"] == verdict and result["error"] == 0.05
    assert 3 <= result["pairs"] <= 5 and result["low"] <= result["ratio"] <= result["high"]
    sides = [run["side"] for run in result["runs"]]
    assert "".join(sides).startswith("ABBAAB")
    assert "warming up" in Path(result["runs"][0]["output"]).read_text()
    assert json.loads(Path(result["folder"], "ab.json").read_text()) == result


def test_values_of_json_decide_and_must_match(program: Path):
    a, b = command(program, "a", 1.0), command(program, "b", 0.9)
    options = ("--metric", "json:train.0.step_time", "--must-match", "json:loss")
    assert compared(program, a, b, *options, code=0)["verdict"] == "better"
    cheat = command(program, "c", 0.5, loss=3.1)
    refused = compared(program, a, cheat, *options, code=3)
    assert refused["verdict"] == "invalid" and len(refused["runs"]) == 2
    assert "A and B do not match: 'json:loss' is 2.5 and 3.1" in refused["sentence"]
    compared(program, a, cheat, *options, "--tolerance", "30%", code=0)


def test_a_failed_command_and_a_missing_value_are_never_a_verdict(program: Path):
    a = command(program, "a", 1.0)
    failed = compared(program, a, f"{sys.executable} -c 'raise SystemExit(5)'", code=3)
    assert "B ended with exit code 5 in pair 1" in failed["sentence"]
    missing = compared(program, a, a, "--metric", "speed ([0-9.]+)", code=3)
    assert "A has no value of 'speed ([0-9.]+)'" in missing["sentence"]


def test_pairs_that_do_not_decide_can_be_likely(program: Path):
    """Differences of 9, 3 and 9%: too uneven for the sequential test, enough for `compare`."""
    program.write_text(
        "import sys\nfrom pathlib import Path\ncount = Path(sys.argv[1])\n"
        "n = len(count.read_text()) if count.exists() else 0\ncount.write_text('x' * (n + 1))\n"
        "print('step_time:', sys.argv[2].split(',')[n])\n"
    )
    a, b = (
        f"{sys.executable} {program} {program.parent / side} {values}"
        for side, values in (("a", "1.00,1.02,0.98"), ("b", "1.09,1.05,1.07"))
    )
    options = ("--metric", STEP_TIME, "--max-pairs", "3")
    result = compared(program, a, b, *options, code=4)
    assert result["verdict"] == "likely worse"
    assert result["sentence"].startswith("B is likely worse than A. Not proven: 3 pairs")
    for side in "ab":
        (program.parent / side).unlink()
    assert compared(program, a, b, *options, "--higher-is-better", code=4)["verdict"] == (
        "likely better"
    )


def test_too_few_pairs_are_undecided(program: Path):
    a, b = command(program, "a", 1.0), command(program, "b", 1.0)
    result = compared(program, a, b, "--metric", STEP_TIME, "--max-pairs", 3, code=4)
    assert result["sentence"].startswith("Not proven: 3 pairs did not decide: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("true", "true", "--metric", "loss"), "has no group for the number"),
        (("true", "true", "--metric", "("), "is not a regular expression"),
        (("", "true"), "command A: is empty"),
        (("", "true", "--shell"), "command A: is empty"),
        (("echo 'x", "true"), "command A: cannot be split into words: No closing quotation"),
        (("no-such-program", "true"), "command A: cannot be started"),
        (("touch started", "no-such-program"), "command B: cannot be started"),
        (("true", "true", "--tolerance", "x"), "--tolerance x: is not a margin"),
    ],
)
def test_wrong_input_is_one_clear_error(tmp_path: Path, arguments: tuple[str, ...], words: str):
    done = paceline("ab", *arguments, runs=tmp_path)
    assert (done.returncode, done.stdout) == (1, "") and words in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "ab").exists()


def test_no_secret_is_stored(tmp_path: Path):
    secret = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"  # not a real token
    shown = "echo printed_by_the_environment $MY_TOKEN"
    done = paceline(
        *("ab", f"{shown} {secret}; echo value=1", "echo value=1", "--shell", "--json"),
        *("--metric", "value=([0-9.]+)", "--max-pairs", 3),
        runs=tmp_path,
        env={"MY_TOKEN": "correct-horse-battery-staple"},
    )
    kept = done.stdout + "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    assert "printed_by_the_environment" in kept
    assert secret not in kept and "correct-horse-battery-staple" not in kept


def test_commands_run_without_a_shell_unless_asked(tmp_path: Path):
    echo = "echo $((1 + 1)) steps"
    done = paceline("ab", echo, echo, "--metric", r"^(\d+) steps", runs=tmp_path)
    assert done.returncode == 3 and "has no value" in done.stdout
    done = paceline("ab", echo, echo, "--metric", r"^(\d+) steps", "--shell", runs=tmp_path)
    assert done.returncode in (0, 4) and "has no value" not in done.stdout


def test_an_interrupt_ends_the_command_and_its_children(tmp_path: Path):
    slow = f"bash -c 'sleep 300 & echo $! > {tmp_path}/child; wait'"
    arguments = [sys.executable, "-m", "paceline", "ab", slow, slow, "--runs-dir", str(tmp_path)]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, env=dict(os.environ)) as process:
        wait_until(
            lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text(), "a child"
        )
        child = int((tmp_path / "child").read_text())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 130
    wait_until(lambda: not psutil.pid_exists(child), "the child's end")
