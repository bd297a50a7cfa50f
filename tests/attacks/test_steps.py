"""Step times that no step has, from a program's own lines and from logs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.attacks.reproductions import stored_run
from tests.command import paceline
from tests.nightly import NIGHTLY

PROGRAM = """
import json, os, sys, time
start = dict(event="start", schema=1, rank=0, world_size=1, local_rank=0, host="h", pid=1)
with open(os.environ["PACELINE_STEPS"] + "/rank-00000.jsonl", "w") as file:
    file.write(json.dumps({**start, "time_unix": time.time(), "python": "3"}) + "\\n")
    for number in range(1, 31):
        step = dict(event="step", step=number, step_time_s=float(sys.argv[1]), tokens=1)
        file.write(json.dumps(step) + "\\n")
"""
VERBS = ("show last", "watch last --once", "report last", "history", "goodput last", "list")


@pytest.mark.parametrize("step_time_s", ["0.0", "1e-300", "1e300"] if NIGHTLY else ["1e300"])
def test_a_run_of_such_steps_ends_with_a_result(tmp_path: Path, step_time_s: str):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    runs = tmp_path / "runs"
    done = paceline("run", "--", sys.executable, program, step_time_s, runs=runs)
    assert "Traceback" not in done.stderr, done.stderr
    (result,) = runs.glob("*/result.json")
    assert json.loads(result.read_text())["status"] in ("ok", "failed", "incomplete")
    verbs = [f"runs {verb}" for verb in VERBS] + ["explain last", "compare last last"]
    for verb in verbs:
        done = paceline(*verb.split(), runs=runs)
        assert "Traceback" not in done.stderr, (verb, done.stderr)
        assert done.returncode in (0, 1, 3, 4), (verb, done.stderr)


def test_a_log_of_steps_without_time_has_no_rate(tmp_path: Path):
    log = tmp_path / "a.log"
    line = " iteration {:8d}/     100 | consumed samples: {:12d} "
    line += "| elapsed time per iteration (ms): 0.0 | learning rate: 1.0E-04 "
    line += "| global batch size:    16 | lm loss: 5.0E+00 |\n"
    log.write_text("".join(line.format(n, n * 16) for n in range(1, 41)))
    done = paceline("parse", log, "--json", runs=tmp_path)
    assert "Traceback" not in done.stderr and "Infinity" not in done.stdout, done.stderr


@pytest.mark.parametrize("field", ["achievable_flops_per_s"])
def test_a_tiny_rate_of_a_record_is_no_traceback(tmp_path: Path, field: str):
    folder = stored_run(tmp_path, **{field: 1e-300})
    done = paceline("runs", "watch", folder.name, "--once", runs=tmp_path)
    assert "Traceback" not in done.stderr, done.stderr
