"""A rank that no longer moves leaves its stacks and reason, and ends; one that moves lives on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.trainer.measure.heartbeat import start_limit_s
from tests.trainer.example import run_ranks

LIMIT_S = 1.0
PROGRAM = f"""
import ctypes, faulthandler, os, sys, threading, time
from paceline.trainer.measure import heartbeat
from paceline.trainer.measure.event_log import EventLog

limit_s = {LIMIT_S}
heartbeat.MIN_START_LIMIT_S = limit_s
armed, arm = threading.Event(), faulthandler.dump_traceback_later

def noted(*words, **more):
    arm(*words, **more)
    armed.set()

faulthandler.dump_traceback_later = noted

class Steps:
    step, steps_done, waits = 1, 0, False
    def is_waiting(self):
        return self.waits

steps = Steps()
pulse = heartbeat.Heartbeat(EventLog("steps", 0), "rank.stack")
pulse.start(limit_s)
print("ready", flush=True)
"""
PATIENT = PROGRAM.replace(f"limit_s = {LIMIT_S}", "limit_s = 600.0")


def begin(folder: Path, then: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    """A process with a watchdog that does `then`."""
    return subprocess.Popen(
        [sys.executable, "-c", program + then],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> int:
    _, errors = process.communicate(timeout=120)
    assert "Traceback" not in errors, errors
    return process.returncode


def after(folder: Path, then: str) -> int:
    """Exit code of a process that did `then`, forked from one that has torch."""
    (folder / "watched.py").write_text(PROGRAM + then)
    code, output = run_ranks(1, folder / "watched.py", folder=folder, limit_s=120)
    assert "Traceback" not in output, output
    return code


def ends(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "steps/rank-00000.jsonl").read_text().splitlines()
    ]


def stack(folder: Path) -> str:
    return (folder / "rank.stack").read_text()


STUCK = "\ndef stuck_here():\n    print('stuck', flush=True); time.sleep(600)\nstuck_here()\n"


@pytest.mark.parametrize(
    ("before", "doing", "cause"),
    [
        ("", "at the start", "no_progress"),
        (
            "pulse.beat('while the ranks join', waits=True)",
            "while the ranks join",
            "waiting",
        ),
        ("pulse.follow(steps, []); steps.step = 12", "in step 12", "no_progress"),
        (
            "pulse.follow(steps, []); steps.step = 12; steps.waits = True",
            "in step 12",
            "waiting",
        ),
    ],
)
def test_without_a_beat_the_process_ends_and_says_where(
    tmp_path: Path, before: str, doing: str, cause: str
) -> None:
    assert after(tmp_path, before + STUCK) == 1

    (last,) = ends(tmp_path)
    where = {"waiting": "waiting for other ranks", "no_progress": "not inside a collective"}
    assert (last["event"], last["status"], last["cause"]) == ("end", "failed", cause)
    assert (last["silent_s"], last["doing"]) == (LIMIT_S, doing)
    assert last["reason"] == f"no progress for 1 s {doing}: {where[cause]}"
    assert "in stuck_here" in stack(tmp_path)


def test_beats_keep_a_process_alive_and_a_good_end_leaves_no_stack(tmp_path: Path) -> None:
    alive = "for _ in range(30):\n    pulse.beat(); time.sleep(0.1)\n"
    quit_ = "assert pulse.stop(); pulse.remove_empty_stack(); time.sleep(2)"

    assert after(tmp_path, alive + quit_) == 0
    assert ends(tmp_path) == [] and not list(tmp_path.glob("rank.*"))


def test_steps_of_the_clock_are_beats(tmp_path: Path) -> None:
    alive = "pulse.follow(steps, [])\nfor _ in range(30):\n    steps.step += 1; time.sleep(0.1)\n"

    assert after(tmp_path, alive + "assert pulse.stop()") == 0


def test_steps_that_a_device_finishes_are_beats(tmp_path: Path) -> None:
    """At the end the program reads the last steps one after the other and begins no other."""
    alive = (
        "pulse.follow(steps, [])\nfor _ in range(30):\n    steps.steps_done += 1; time.sleep(0.1)\n"
    )

    assert after(tmp_path, alive + "assert pulse.stop()") == 0


def test_the_passes_of_a_pipeline_are_beats_and_forward_passes_elsewhere(tmp_path: Path) -> None:
    made = "import torch\nstage, part = type('Stage', (), {})(), torch.nn.Identity()\n"
    alive = "for _ in range(15):\n    stage.on_progress(); time.sleep(0.1)\n"
    alive += "for _ in range(15):\n    part(1); time.sleep(0.1)\n"
    followed = "pulse.follow(steps, [part], [stage])\n"

    with_import = "with pulse.pause():\n    " + made.replace("\n", "\n    ") + "pass\n"
    assert after(tmp_path, with_import + followed + alive + "assert pulse.stop()") == 0


def test_a_pause_may_take_long_and_what_follows_may_not(tmp_path: Path) -> None:
    paused = "with pulse.pause():\n    time.sleep(3)\nprint('written', flush=True)"
    process = begin(tmp_path, paused + STUCK)

    assert finish(process) == 1
    assert len(ends(tmp_path)) == 1 and "in stuck_here" in stack(tmp_path)


def test_code_that_keeps_pythons_lock_leaves_its_stack_too(tmp_path: Path) -> None:
    held = "\ndef held_here():\n    ctypes.PyDLL(None).sleep(600)\narmed.wait()\nheld_here()\n"

    assert after(tmp_path, held) == 1
    assert ends(tmp_path) == []
    timed = (tmp_path / "rank.timer").read_text()
    assert timed.startswith("Timeout (") and "in held_here" in timed


def test_a_pause_holds_back_that_timer_as_well(tmp_path: Path) -> None:
    held = "armed.wait()\nwith pulse.pause():\n    ctypes.PyDLL(None).sleep(4)\n"

    assert after(tmp_path, held + "assert pulse.stop(); pulse.remove_empty_stack()") == 0
    assert ends(tmp_path) == []


def test_a_timer_that_is_set_while_the_end_begins_ends_nothing(tmp_path: Path) -> None:
    """The watchdog's thread stops between its check for a pause and its timer."""
    held = "asked, started = threading.Event(), threading.Event()\n"
    held += "heartbeat.os.utime = lambda _: (asked.set(), started.wait())\n"
    end = "asked.wait()\nassert pulse.stop()\nstarted.set()\ntime.sleep(3)"

    assert after(tmp_path, held + end) == 0


def test_time_in_which_the_process_was_stopped_does_not_count(tmp_path: Path) -> None:
    """Faulthandler's timer counts it, which is why an end by the timer says that this may be it."""
    program = PROGRAM.replace("    arm(*words, **more)\n", "")
    going = "for _ in range(25):\n    time.sleep(0.1)\n    pulse.beat()\nassert pulse.stop()"
    process = begin(tmp_path, going, program)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2 * LIMIT_S)
    os.kill(process.pid, signal.SIGCONT)

    assert finish(process) == 0
    assert ends(tmp_path) == []


def test_being_terminated_leaves_the_stack_and_no_verdict(tmp_path: Path) -> None:
    process = begin(tmp_path, STUCK, PATIENT)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "stuck\n"]
    process.terminate()

    assert finish(process) == -signal.SIGTERM
    assert ends(tmp_path) == [] and "in stuck_here" in stack(tmp_path)


def test_the_first_word_about_the_end_is_the_last(tmp_path: Path) -> None:
    """Peers that end meanwhile make the rank fail after its watchdog has given it up."""
    late = "while not pulse._end_lock.locked():\n    time.sleep(0.01)\n"
    late += "while not pulse.stop():\n    time.sleep(0.01)\n"

    assert after(tmp_path, late + "pulse.events.write('end', status='late')") == 1
    assert [line["status"] for line in ends(tmp_path)] == ["failed"]


def test_more_ranks_may_take_longer_to_start() -> None:
    assert [start_limit_s(ranks) for ranks in (1, 8, 16, 1024, 16384)] == [120, 120, 180, 540, 780]
