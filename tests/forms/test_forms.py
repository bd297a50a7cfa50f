"""A script sees of every verb what it saw before, on logs and run folders that are stored here."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from paceline.mlperf.check import official_checker
from tests.forms.__main__ import changes, recorded_forms
from tests.forms.differences import differences
from tests.forms.invoking import FOLDER, ROOT, load_cases
from tests.forms.neutral import Neutral, kinds

DOCUMENT = {"exit": 0, "stdout": {"rows": [{"step_time_s": 0.25, "n": 8, "note": "as is"}]}}


@pytest.mark.skipif(
    not official_checker.checker_rulesets(), reason="mlperf-logging is not installed"
)
def test_every_command_prints_what_is_recorded():
    done = subprocess.run(
        [sys.executable, "-m", "tests.forms", "compare"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_recorded_run_is_shown():
    shown = {row["run"] for row in recorded_forms()["runs"]["list"]["stdout"]}
    assert shown == {path.parent.name for path in (FOLDER / "runs").glob("*/run.json")}


def test_what_is_recorded_are_the_commands_of_today():
    assert {group: list(forms) for group, forms in recorded_forms().items()} == {
        group: list(lines) for group, lines in load_cases().items()
    }


def changed(path: str, value: Any) -> list[str]:
    """The differences when one value of a row of DOCUMENT is another."""
    other = deepcopy(DOCUMENT)
    other["stdout"]["rows"][0][path] = value
    return list(differences(DOCUMENT, other))


def test_a_changed_value_is_found_with_its_path():
    assert changed("n", 9) == ["$.stdout.rows[0].n: 8 -> 9"]
    assert changed("step_time_s", 0.2500001) == ["$.stdout.rows[0].step_time_s: 0.25 -> 0.2500001"]
    assert changed("note", "as was") == ["$.stdout.rows[0].note: 'as is' -> 'as was'"]


def test_another_type_is_a_change():
    assert changed("n", 8.0) and changed("n", True) and changed("n", "8") and changed("n", None)


def test_the_last_digits_of_a_float_are_none():
    assert changed("step_time_s", 0.25 * (1 + 1e-12)) == []
    assert list(differences("a,0.1234567890123,ms", "a,0.1234567890124,ms")) == []
    assert list(differences("a,637054.89638488", "a,637054.8963848798")) == []
    assert list(differences("0.5 s", "0.50 s")) == ["$: '0.5 s' -> '0.50 s'"]
    assert list(differences("0.25 s", "0.26 s")) == ["$: '0.25 s' -> '0.26 s'"]


def test_a_missing_and_an_additional_key_are_found():
    less, more = deepcopy(DOCUMENT), deepcopy(DOCUMENT)
    del less["stdout"]["rows"][0]["n"]
    more["stdout"]["rows"].append({})
    assert list(differences(DOCUMENT, less)) == ["$.stdout.rows[0].n: 8 -> (absent)"]
    assert list(differences(DOCUMENT, more)) == ["$.stdout.rows[1]: (absent) -> {}"]


def test_a_change_of_the_recorded_forms_names_its_case():
    printed = deepcopy(recorded_forms())
    printed["errors"]["no-run"]["exit"] = 2
    del printed["tables"]["device"]["stdout"]["memory_bytes"]
    assert [line.split(": ")[0] for line in changes(printed)] == [
        "$.tables.device.stdout.memory_bytes",
        "$.errors.no-run.exit",
    ]
    assert changes(recorded_forms()) == []


def test_only_what_a_machine_or_a_day_decides_is_neutral():
    neutral = Neutral(((r"/tmp/x", "<work>"),))
    assert neutral.value({"/tmp/x": ["/tmp/x/a", 1.5]}) == {"<work>": ["<work>/a", 1.5]}
    assert neutral.lines("note: other programs use 7% of the cores\n1.5 s") == ["1.5 s"]
    assert kinds({"torch": "2.13.0", "n": {"a": None}}) == {"torch": "str", "n": {"a": "NoneType"}}


def test_a_path_is_neutral_also_as_markdown_escapes_it():
    neutral = Neutral.of_this_machine(Path("/tmp/tmpx_y_"), Path("/repository"), "1.0")
    assert neutral.text(r"/tmp/tmpx\_y\_/runs and /tmp/tmpx_y_") == "<work>/runs and <work>"


def test_a_process_that_may_use_one_core_shows_the_plans_of_two():
    program = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
        "from tests.forms.invoking import show_two_cores; show_two_cores();"
        "from paceline.machines.probe.inventory import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "2\n", done.stderr
