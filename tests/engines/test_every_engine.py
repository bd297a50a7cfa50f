"""Every engine keeps the same promises; a new file is tested by being there."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import engines
from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.run import Training
from paceline.engines import dialect, dialects, engine, engine_names
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
    program = job.program[0]
    assert program in job.files or f"{program}/__main__.py" in job.files
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
    spec = make_spec(
        layout=Layout(ep=2), training=Training(seq_len=32, global_batch=8, steps=1, dtype="nvfp4")
    )
    assert all(len(problem.split()) > 3 for problem in engine(name).unsupported(spec))


def test_an_unknown_engine_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'native'"):
        engine("nativ")


@pytest.mark.parametrize("name", ["megatron", "reading", "native.job", "", "../native"])
def test_what_cannot_be_started_is_no_engine(name: str):
    with pytest.raises(UserError, match="is unknown; allowed: "):
        engine(name)


def test_a_broken_file_hinders_no_other_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken.py").write_text("raise ImportError('it is half written')")
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])

    assert engine("native").unsupported(make_spec()) == []
    assert dialect("hf-trainer").title == "Hugging Face Trainer"
    for needs_it in (engine_names, dialects, lambda: engine("broken"), lambda: dialect("broken")):
        with pytest.raises(ImportError, match="half written"):
            needs_it()


@pytest.mark.parametrize(("look_up", "name"), [("engine", "native"), ("dialect", "maxtext")])
def test_a_framework_that_is_named_is_the_only_one_imported(look_up: str, name: str):
    program = (
        f"import sys; from paceline.engines import {look_up}; {look_up}({name!r})\n"
        "parts = [module.split('.') for module in sys.modules]\n"
        "print([p[2] for p in parts if p[:2] == ['paceline', 'engines'] and len(p) == 3])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert set(ast.literal_eval(done.stdout)) - {"dialect"} == {name}
