"""Runs and logs that are named together are attempts of one training, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.goodput import goodput
from paceline.cli.output import TableOptions
from paceline.core.errors import UserError
from paceline.core.run import RunSettings
from paceline.core.training import Training
from paceline.runs.goodput.attempt import Attempt
from paceline.runs.goodput.ledger import IN_ORDER, ledger_of, one_training
from tests.command import paceline
from tests.example import SHAPE
from tests.runs.goodput.test_goodput import write_attempt

AGAIN = Training(seq_len=32, global_batch=8, steps=100, dtype="fp32")
"""One batch on however many devices."""
DEEPER = SHAPE.model_copy(update={"num_layers": 4})
KNOWN: dict[str, Any] = {"model": SHAPE, "seq_len": 32, "global_batch": 16, "device": "h100"}


def log_of(name: str, first: int, last: int, **facts: Any) -> Attempt:
    """What a log of another framework tells: steps, and no clock."""
    index = np.arange(first, last + 1)
    ones = np.ones(len(index))
    return Attempt(
        name, index, ones, ones, 0 * ones, first - 1, facts=RunSettings(origin="imported", **facts)
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"recipe": "other"},
            "b: belongs to another training run than a: recipe other instead of example",
        ),
        (
            {"model": SHAPE.model_copy(update={"num_layers": 4})},
            "than a: model.num_layers 4 instead of 2; give only attempts",
        ),
        (
            {"ranks": 2},
            "does not resume from a checkpoint of a and has another global batch 8 instead of 4",
        ),
    ],
)
def test_runs_of_other_trainings_are_refused(tmp_path: Path, settings: dict[str, Any], words: str):
    ended = write_attempt(tmp_path, "a", 0, 1, 20, killed=True)
    write_attempt(tmp_path, "b", ended, 1, 40, **settings)
    with pytest.raises(UserError, match=words):
        goodput(["b", "a"], runs_dir=tmp_path, output=TableOptions())


def test_a_second_run_of_what_was_finished_is_no_restart(tmp_path: Path):
    ended = write_attempt(tmp_path, "a", 0, 1, 40, steps_requested=40)
    write_attempt(tmp_path, "b", ended, 1, 40, steps_requested=40)
    with pytest.raises(UserError, match="b: starts at step 1, but a was complete: all 40"):
        goodput(["a", "b"], runs_dir=tmp_path, output=TableOptions())


def test_a_training_may_go_on_elsewhere_and_longer(tmp_path: Path):
    ended = write_attempt(tmp_path, "a", 0, 1, 40, steps_requested=40)
    write_attempt(tmp_path, "b", ended, 41, 60, ranks=2)
    told = json.loads(paceline("runs", "goodput", "a", "b", "--json", runs=tmp_path).stdout)
    assert told["steps_kept"] == 60 and "ran on 1 x cpu, then 2 x cpu" in told["notes"][-1]


@pytest.mark.parametrize("settings", [{"ranks": 2}, {"recipe": "two-nodes"}])
def test_a_restart_that_died_before_its_start_is_none_from_scratch(
    tmp_path: Path, settings: dict[str, Any]
):
    ended = write_attempt(tmp_path, "a", 0, 1, 40, killed=True, steps_requested=40)
    ended = write_attempt(tmp_path, "b", ended, 1, 0, **settings)
    write_attempt(tmp_path, "c", ended, 41, 60, **settings)
    told = json.loads(paceline("runs", "goodput", "training", "--json", runs=tmp_path).stdout)
    assert told["steps_kept"] == 60 and not told["seconds"]["lost_steps"]


def test_what_died_before_any_step_binds_no_start(tmp_path: Path):
    ended = write_attempt(tmp_path, "a", 0, 1, 0, ranks=2)
    write_attempt(tmp_path, "b", ended, 1, 40)
    goodput(["a", "b"], runs_dir=tmp_path, output=TableOptions())


def test_a_job_whose_last_start_died_is_judged_by_the_one_before():
    trained, died = log_of("a/1", 1, 40, global_batch=16), log_of("a", 1, 0, global_batch=16)
    with pytest.raises(
        UserError, match=r"checkpoint of a/1 and has another global batch 8 instead of 16"
    ):
        one_training([[trained, died], [log_of("b", 1, 40, global_batch=8)]])


def test_the_padding_of_the_vocabulary_goes_with_tp(tmp_path: Path):
    ended = write_attempt(tmp_path, "a", 0, 1, 20, killed=True)
    padded = SHAPE.model_copy(update={"vocab_multiple": 64})
    write_attempt(tmp_path, "b", ended, 11, 40, model=padded)
    goodput(["a", "b"], runs_dir=tmp_path, output=TableOptions())


def test_another_vocabulary_is_of_another_model_except_in_logs(tmp_path: Path):
    wide = SHAPE.model_copy(update={"vocab_size": 512})
    one_training([[log_of("a", 1, 20, model=SHAPE)], [log_of("b", 11, 40, model=wide)]])
    ended = write_attempt(tmp_path, "a", 0, 1, 20, killed=True)
    write_attempt(tmp_path, "b", ended, 11, 40, model=wide)
    with pytest.raises(UserError, match=r"model\.vocab_size 512 instead of 320"):
        goodput(["a", "b"], runs_dir=tmp_path, output=TableOptions())


def test_a_field_that_only_one_states_is_told_as_unset():
    plain = SHAPE.model_copy(update={"num_kv_heads": None})
    with pytest.raises(UserError, match=r"model\.num_kv_heads unset instead of 2; "):
        one_training([[log_of("a", 1, 20, model=SHAPE)], [log_of("b", 11, 40, model=plain)]])


def test_a_recipe_for_each_number_of_nodes_may_go_on_from_a_checkpoint(tmp_path: Path):
    ended = write_attempt(tmp_path, "a", 0, 1, 20, killed=True)
    write_attempt(tmp_path, "b", ended, 11, 40, recipe="two-nodes", ranks=2)
    goodput(["a", "b"], runs_dir=tmp_path, output=TableOptions())


def test_a_training_may_begin_again_on_another_number_of_devices(tmp_path: Path):
    ended = write_attempt(tmp_path, "a", 0, 1, 20, killed=True, ranks=2, training=AGAIN)
    write_attempt(tmp_path, "b", ended, 1, 40, training=AGAIN)
    told = json.loads(paceline("runs", "goodput", "a", "b", "--json", runs=tmp_path).stdout)
    assert (told["steps_kept"], told["attempts"][0]["steps_repeated"]) == (40, 20)
    note = "b restarted at step 1 on 1 device instead of 2; earlier steps count as lost"
    assert note in told["notes"]


def test_devices_are_compared_where_too_little_is_known_of_a_training():
    logs = [[log_of("a", 1, 20, num_devices=16)], [log_of("b", 1, 40, num_devices=8)]]
    with pytest.raises(UserError, match="number of devices 8 instead of 16"):
        one_training(logs)


def test_logs_in_the_wrong_order_are_told_to_be_put_in_order():
    first = log_of("first", 1, 20, **KNOWN, num_devices=16)
    rest = {**KNOWN, "global_batch": 32}
    with pytest.raises(UserError, match=IN_ORDER):
        one_training([[log_of("second", 11, 40, **rest)], [first]])
    second = log_of("second", 11, 40, **KNOWN, num_devices=8)
    notes = ledger_of(one_training([[second], [first]])).notes
    assert any("16 devices instead of 8" in note and IN_ORDER in note for note in notes)
    assert not any(IN_ORDER in note for note in ledger_of(one_training([[first], [second]])).notes)


def test_a_finished_log_that_begins_again_may_be_out_of_order():
    done, first = log_of("done", 11, 40), log_of("first", 1, 20)
    done = Attempt(**{**vars(done), "steps_requested": 40})
    with pytest.raises(UserError, match=f"was complete.*{IN_ORDER}"):
        one_training([[done], [first]])
