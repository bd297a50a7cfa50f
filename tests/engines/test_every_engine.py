"""Every engine keeps the same promises; a new file is tested by being there."""

from __future__ import annotations

import json

import pytest

from paceline.core.layout import Layout
from paceline.core.run import Training
from paceline.engines import engine, engine_names
from paceline.errors import UserError
from tests.example import make_spec

ENGINES = pytest.mark.parametrize("name", engine_names())


@ENGINES
def test_it_does_what_it_does_not_refuse(name: str):
    assert engine(name).unsupported(make_spec()) == []
    assert engine(name).missing(make_spec()) is None


@ENGINES
def test_its_job_is_complete_and_relative_to_the_run_folder(name: str):
    job = engine(name).job(make_spec(), "x")
    assert job.devices_per_node == 2 and job.timeout_s == 120
    assert job.program[0] in job.files
    assert not any(path.startswith(("/", "..")) for path in (*job.files, *job.program))


@ENGINES
def test_its_settings_are_json(name: str):
    assert json.loads(json.dumps(engine(name).settings(make_spec())))


@ENGINES
def test_its_job_follows_from_the_spec_alone(name: str):
    assert engine(name).job(make_spec(), "x") == engine(name).job(make_spec(), "x")


@ENGINES
def test_lines_that_are_not_its_own_give_no_steps(name: str):
    assert list(engine(name).steps(["hello\n", "{}\n", "\x00\n"])) == []


@ENGINES
def test_what_it_cannot_do_is_a_sentence(name: str):
    spec = make_spec(layout=Layout(ep=2), training=Training(
        seq_len=32, global_batch=8, steps=1, dtype="nvfp4"))  # fmt: skip
    assert all(len(problem.split()) > 3 for problem in engine(name).unsupported(spec))


def test_an_unknown_engine_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'native'"):
        engine("nativ")
