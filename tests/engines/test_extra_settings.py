"""Extra arguments and variables reach the program of every engine, by one rule for conflicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.options import ReportFormat
from paceline.cli.printing import print_plan
from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.engines import engine, engine_names
from paceline.engines.launch.extra_settings import option_name, with_extra_arguments
from paceline.machines.node.script import open_variables, render_node, secret_variables
from paceline.runs.plan import Plan
from tests.engines.batch_site import MLPERF, NEMO
from tests.engines.megatron_specs import study
from tests.example import make_spec

REQUIRED: dict[str, dict[str, Any]] = {"mlperf": MLPERF, "nemo": NEMO}
EXTRA = "--some-new-option 'two words' --switch"


def spec_for(name: str, **settings: Any) -> RunSpec:
    command = ("python", "train.py") if name == "command" else ()
    return make_spec(
        engine=name, engine_settings={**REQUIRED.get(name, {}), **settings}, command=command
    )


def problems(spec: RunSpec) -> list[str]:
    return [p for p in engine(spec.engine).unsupported(spec) if "engine_settings." in p]


@pytest.mark.parametrize("name", engine_names())
def test_variables_reach_the_program_of_every_engine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "0123456789abcdef")
    spec = spec_for(name, environment="NCCL_DEBUG=INFO NOTE='two words' MY_TOKEN")
    job = engine(name).job(spec, "x")
    assert job.env["NCCL_DEBUG"] == "INFO" and job.env["NOTE"] == "two words"
    assert job.env["MY_TOKEN"] == "0123456789abcdef"
    assert "0123456789abcdef" not in json.dumps(spec.model_dump(mode="json"))
    assert all("0123456789abcdef" not in text for text in job.files.values())


@pytest.mark.parametrize("name", engine_names())
def test_arguments_reach_the_program_or_are_refused(name: str) -> None:
    spec = spec_for(name, arguments=EXTRA)
    refused = [p for p in problems(spec) if "engine_settings.arguments" in p]
    if name in ("native", "mlperf"):
        assert len(refused) == 1 and "is not supported: " in refused[0]
        return
    job = engine(name).job(spec, "x")
    assert not refused
    if name == "hf_trainer":
        assert '"some_new_option": "two words"' in job.files["hf_trainer.json"]
    elif name == "nemo":
        words = ("--some-new-option", "'two words'", "--switch")
        assert " \\\n  ".join(words) in job.files["launch.sh"]
    else:
        assert job.program[-3:] == ("--some-new-option", "two words", "--switch")


def test_the_variables_of_a_run_override_those_of_its_cluster() -> None:
    spec = spec_for("megatron", environment="NCCL_DEBUG=INFO")
    cluster = spec.cluster.model_copy(update={"env": {"NCCL_DEBUG": "WARN", "A": "1"}})
    job = engine("megatron").job(spec.model_copy(update={"cluster": cluster}), "x")
    assert (job.env["NCCL_DEBUG"], job.env["A"]) == ("INFO", "1")


def test_extra_settings_are_part_of_the_key_and_of_the_script(tmp_path: Path) -> None:
    plain = study(tmp_path)
    extra = study(
        tmp_path,
        "engine_settings.arguments=--eval-iters 5 --log-params-norm",
        "engine_settings.environment=NOTE='a; b'",
    )
    assert plain.key != extra.key
    job = engine(extra.engine).job(extra, "x")
    script = render_node(job)
    assert "--eval-iters 5 --log-params-norm" in script and "export NOTE='a; b'" in script
    assert "--eval-iters 0" not in script


def test_a_name_alone_keeps_its_value_out_of_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name need not be that of a secret."""
    monkeypatch.setenv("LICENSE", "plainword")
    job = engine("megatron").job(spec_for("megatron", environment="LICENSE A=1"), "x")
    assert secret_variables(job.env) == {"LICENSE": "plainword"}
    assert "A" in open_variables(job.env) and "LICENSE" not in open_variables(job.env)
    assert "plainword" not in render_node(job) + "".join(job.files.values())


def test_a_dry_run_shows_extra_settings(capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_for("megatron", arguments=EXTRA, environment="NOTE='a; b' MY_TOKEN=")
    cluster = spec.cluster.model_copy(update={"launcher": "slurm", "nodes": 2})
    spec = spec.model_copy(update={"cluster": cluster})
    print_plan(Plan(spec, engine("megatron").job(spec, "x"), {}), ReportFormat.text)
    shown = capsys.readouterr().err
    assert f"{EXTRA}\n" in shown and "NOTE='a; b'" in shown


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("--eval-iters 5", ["--lr", "1", "--seed", "-1", "--eval-iters", "5"]),
        ("--eval_iters=5", ["--lr", "1", "--seed", "-1", "--eval_iters=5"]),
        ("--new 'a b'", ["--lr", "1", "--eval-iters", "0", "--seed", "-1", "--new", "a b"]),
        ("model.x=3", ["--lr", "1", "--eval-iters", "0", "--seed", "-1", "model.x=3"]),
    ],
)
def test_a_choice_of_paceline_is_replaced(extra: str, expected: list[str]) -> None:
    command = ["prog", "--lr", "1", "--eval-iters", "0", "--seed", "-1"]
    spec = spec_for("megatron", arguments=extra)
    words = with_extra_arguments(spec, command, replaceable=("eval-iters",))
    assert words == ["prog", *expected]


@pytest.mark.parametrize("extra", ["--lr 2", "--lr=2", "++model.lr=2", "-n 3"])
def test_an_argument_that_follows_from_the_run_is_refused(extra: str) -> None:
    command = ["prog", "-n", "1", "--lr", "1", "model.lr=1"]
    with pytest.raises(UserError, match="is set by Paceline from the recipe, layout or cluster"):
        with_extra_arguments(spec_for("megatron", arguments=extra), command)


def test_a_setting_in_a_file_of_the_program_counts_as_set() -> None:
    spec = spec_for("torchtitan", arguments="--training.global-batch-size 3")
    with pytest.raises(UserError, match=r"training\.global-batch-size is set by Paceline"):
        engine("torchtitan").job(spec, "x")
    spec = spec_for("hf_trainer", arguments="--learning_rate 3")
    with pytest.raises(UserError, match="learning-rate is set by Paceline"):
        engine("hf_trainer").job(spec, "x")


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("arguments", "--a 'b", "engine_settings.arguments has a quotation mark or backslash"),
        ("arguments", "--key hf_abcdefghijklmnopqrstu", "looks like a secret: pass it by"),
        ("environment", "A='b", "engine_settings.environment has a quotation mark"),
        ("environment", "1A=b", "'1A' cannot name a variable"),
        ("environment", "RANK=3", "RANK is set by Paceline; leave it out"),
        ("environment", "PACELINE_X=3", "PACELINE_X is set by Paceline; leave it out"),
        ("environment", "MY_TOKEN=abc123def456", "MY_TOKEN looks like a secret"),
    ],
)
@pytest.mark.parametrize("name", engine_names())
def test_a_setting_that_cannot_be_used_is_refused(
    name: str, setting: str, value: str, expected: str
) -> None:
    found = problems(spec_for(name, **{setting: value}))
    assert any(expected in problem for problem in found), found


def test_a_variable_without_a_value_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    spec = spec_for("megatron", environment="MY_TOKEN")
    with pytest.raises(UserError, match="MY_TOKEN has no value, and is not set") as caught:
        engine("megatron").job(spec, "x")
    assert "export MY_TOKEN" in str(caught.value)


def test_plain_values_of_names_like_secrets_are_allowed() -> None:
    spec = spec_for("megatron", environment="TOKENIZERS_PARALLELISM=False MAX_TOKENS=4096")
    assert not problems(spec)
    assert engine("megatron").job(spec, "x").env["TOKENIZERS_PARALLELISM"] == "False"


def test_an_option_is_recognized_by_its_form() -> None:
    assert option_name("--deepspeed_config=x") == option_name("--deepspeed-config")
    assert option_name("+model.data=x") == "model.data"
    assert option_name("-1") is None and option_name("949,50,1") is None
