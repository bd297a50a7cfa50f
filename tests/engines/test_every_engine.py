"""Every engine keeps the same promises; a new file is tested by being there.

A home folder of an unknown user is reported as an error of the setting, in every engine.
"""

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
from paceline.core.run import RunSpec
from paceline.core.training import Training
from paceline.engines import engine, engine_names, log_format, log_formats
from paceline.files.home import home_path
from tests.engines.batch_site import MLPERF, NEMO, site
from tests.example import make_spec

ENGINES = pytest.mark.parametrize("name", engine_names())
SETTINGS = {"mlperf": MLPERF, "nemo": NEMO}
"""What an engine cannot do without."""


def spec_for(name: str) -> RunSpec:
    return make_spec(engine=name, engine_settings=SETTINGS.get(name, {}))


def test_the_native_trainer_needs_nothing_more_and_refuses_nothing():
    assert engine("native").unsupported(make_spec()) == []
    assert engine("native").missing(make_spec()) is None


@ENGINES
def test_what_is_missing_is_told_with_its_remedy(name: str):
    missing = engine(name).missing(make_spec(engine=name))
    assert missing is None or "; " in missing


@ENGINES
def test_the_programs_that_it_has_started_are_listed(name: str):
    programs = engines.engine_requirements(name).tested_programs
    assert programs and all(each.program and each.cpu and each.gpu for each in programs)


@ENGINES
def test_a_setting_that_it_does_not_know_is_refused(name: str):
    spec = make_spec(engine=name, engine_settings={"no_such_setting": 1})
    problems = [p for p in engine(name).unsupported(spec) if "no_such_setting" in p]
    assert len(problems) == 1 and "; allowed: " in problems[0]


@ENGINES
def test_its_job_is_complete_and_relative_to_the_run_folder(name: str):
    job = engine(name).job(spec_for(name), "x")
    assert job.devices_per_node == 2 and job.timeout_s == 120
    program = job.program[0] if job.batch is None else next(iter(job.files))
    assert program in job.files or f"{program}/__main__.py" in job.files
    assert not any(path.startswith(("/", "..")) for path in (*job.files, *job.program))


@ENGINES
def test_its_settings_are_json(name: str):
    assert json.loads(json.dumps(engine(name).settings(spec_for(name))))


@ENGINES
def test_its_job_follows_from_the_spec_alone(name: str):
    spec = spec_for(name)
    assert engine(name).job(spec, "x") == engine(name).job(spec, "x")


@ENGINES
def test_what_it_cannot_do_is_a_sentence(name: str):
    spec = make_spec(
        engine=name,
        layout=Layout(ep=2),
        training=Training(seq_len=32, global_batch=8, steps=1, dtype="nvfp4"),
    )
    assert all(len(problem.split()) > 3 for problem in engine(name).unsupported(spec))


def test_an_unknown_engine_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'native'"):
        engine("nativ")


@pytest.mark.parametrize("name", ["nanogpt", "reading", "native.job", "", "../native"])
def test_what_cannot_be_started_is_no_engine(name: str):
    with pytest.raises(UserError, match=r"is unknown; .*`paceline recipes engines` lists them"):
        engine(name)


def test_a_broken_file_hinders_no_other_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken.py").write_text("raise ImportError('it is half written')")
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])

    assert engine("native").unsupported(make_spec()) == []
    assert log_format("hf-trainer").title == "Hugging Face Trainer"
    named = (lambda: engine("broken"), lambda: log_format("broken"))
    for needs_it in (engine_names, log_formats, *named):
        with pytest.raises(ImportError, match="half written"):
            needs_it()


@pytest.mark.parametrize(("look_up", "name"), [("engine", "native"), ("log_format", "maxtext")])
def test_a_framework_that_is_named_is_the_only_one_imported(look_up: str, name: str):
    program = (
        f"import sys; from paceline.engines import {look_up}; {look_up}({name!r})\n"
        "parts = [module.split('.') for module in sys.modules]\n"
        "print([p[2] for p in parts if p[:2] == ['paceline', 'engines'] and len(p) == 3])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert set(ast.literal_eval(done.stdout)) - {"log_reading", "launch", "support"} == {name}


NOBODYS = "~no-such-user/x"


@pytest.mark.parametrize(
    ("name", "field", "more"),
    [
        ("nemo", "stage_path", {}),
        ("nemo", "script", NEMO),
        ("mlperf", "config", MLPERF),
        ("mlperf", "implementation", MLPERF),
        ("deepspeed_chat", "model", {}),
        ("deepspeed_chat", "data", {}),
    ],
)
def test_a_home_folder_that_nobody_has_is_told(name: str, field: str, more: dict[str, str]) -> None:
    settings = {**more, field: NOBODYS}
    spec = make_spec(engine=name, engine_settings=settings, cluster=site(1, 2))
    text = f"engine_settings.{field} {NOBODYS}: refers to a user without"
    with pytest.raises(UserError, match=text):
        engine(name).job(spec, "x")


def test_a_home_folder_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert home_path("field", "~/x") == Path("/home/somebody/x")
    assert home_path("field", "a/~/x") == Path("a/~/x")
