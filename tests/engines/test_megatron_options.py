"""Every argument list is accepted by the real programs, whose options a file lists by commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.files import references
from paceline.files.recipe import load_recipe
from paceline.files.references import Row
from tests.engines.megatron_specs import Settings, started, study

OPTIONS = json.loads((Path(__file__).parent / "megatron_options.json").read_text())
"""Accepted options of each program, with the type of their values."""
BIGSCIENCE = "bigscience-workshop/Megatron-DeepSpeed@8387ae1"
MICROSOFT = "microsoft/Megatron-DeepSpeed@f4157be"
MEGATRON_LM = "NVIDIA/Megatron-LM@d98e8a6"
ROWS = {row.id: row for row in references.find_rows("bigscience-1b3")}
WHOLE_RAMP_UP = "steps=20000"
SIGMOID = ("model.router_score=sigmoid", "model.router_choice_bias=true", "model.router_scale=2.5")
WITHOUT_NORM = "model.embedding_norm=false"


def check_options(told: Settings, program: str) -> None:
    """Check that the program has the options, and that their values have its types."""
    options = OPTIONS[program]["options"]
    for name, values in told.items():
        assert name in options, f"{program} has no {name}"
        kind = options[name].removeprefix("list of ").removeprefix("optional ")
        if options[name] == "flag":
            assert not values, f"{name} takes no value"
        elif not options[name].startswith(("list of ", "optional ")):
            assert len(values) == 1, f"{name} takes one value"
        for value in values:
            {"int": int, "float": float}.get(kind, str)(value)


def spec_of(row: Row, folder: Path, *changes: str) -> RunSpec:
    """The run of a published row on as many nodes as it had."""
    assert row.layout is not None and row.num_devices and row.global_batch
    layout = row.layout.model_dump(include={"tp", "pp", "micro_batch", "recompute", "zero_stage"})
    spec = study(folder, f"layout={json.dumps(layout)}", *changes)
    cluster = spec.cluster.model_copy(update={"nodes": row.num_devices // 4})
    training = spec.training.model_copy(update={"global_batch": row.global_batch})
    return spec.model_copy(update={"cluster": cluster, "training": training})


@pytest.mark.parametrize("row", ROWS)
def test_every_published_layout_and_stage_is_accepted(row: str, tmp_path: Path) -> None:
    check_options(started(spec_of(ROWS[row], tmp_path)), BIGSCIENCE)
    check_options(started(spec_of(ROWS[row], tmp_path, WITHOUT_NORM)), MICROSOFT)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("steps", ["steps=20", WHOLE_RAMP_UP])
def test_ramp_ups_are_accepted(pp: int, steps: str, tmp_path: Path) -> None:
    changes = (f"layout.pp={pp}", steps)
    check_options(started(study(tmp_path, *changes, variant="ramp-up")), BIGSCIENCE)
    new = ("engine_settings.spelling=new", WITHOUT_NORM)
    spec = study(tmp_path, *changes, *new, variant="ramp-up", name="megatron")
    check_options(started(spec), MEGATRON_LM)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("gpt-1b3", (WITHOUT_NORM,)),
        ("gpt-1b3", (WITHOUT_NORM, "layout={tp: 2, pp: 2, vp: 3, cp: 2, zero_stage: 1}")),
        ("gpt-1b3", (WITHOUT_NORM, "layout.zero_stage=3", "engine_settings.overlap=true")),
        ("gpt-1b3", (WITHOUT_NORM, "engine_settings.fusions=false", "model.positions=rope")),
        ("gpt-1b3", (WITHOUT_NORM, "engine_settings.tokenizer=/t", "training.dtype=bf16")),
        ("gpt-1b3", (WITHOUT_NORM, "layout.recompute=selective", "training.dtype=mxfp8")),
        ("llama31-8b", ("layout.tp=2", "layout.sequence_parallel=true")),
        ("llama31-405b", ("layout={pp: 8, vp: 8, zero_stage: 1}",)),
        ("deepseek-v3", ("layout={pp: 8, vp: 4, zero_stage: 1}", "global_batch=512")),
        ("mixtral-8x7b", ("layout={ep: 4, zero_stage: 1}", "training.routing=forced")),
        ("qwen3-30b-a3b", ("layout.zero_stage=1", "model.router_normalize=false")),
        ("qwen3-30b-a3b", ("layout.zero_stage=1", *SIGMOID)),
        ("llama31-8b", ("model.qk_norm=true", "model.sliding_window=512", "model.qkv_bias=true")),
        ("llama31-8b", ("model.partial_rotary_factor=0.5",)),
    ],
)
def test_megatron_lm_accepts_every_kind_of_argument(
    recipe: str, changes: tuple[str, ...], tmp_path: Path
) -> None:
    told = started(study(tmp_path, *changes, name="megatron", recipe=recipe))
    check_options(told, MEGATRON_LM)


def test_options_of_newer_shapes(tmp_path: Path) -> None:
    shape = ("qk_norm=true", "qkv_bias=true", "partial_rotary_factor=0.75", "sliding_window=512")
    changes = [f"model.{field}" for field in (*shape, "sliding_window_pattern=6")]
    told = started(study(tmp_path, *changes, name="megatron", recipe="llama31-8b"))
    check_options(told, MEGATRON_LM)
    assert {"--qk-layernorm", "--add-qkv-bias"} < set(told)
    assert told["--rotary-percent"] == ("0.75",)
    # Megatron counts the 511 tokens before the token itself; every 6th layer sees all.
    assert told["--window-size"] == ("(511,0)",)
    assert told["--window-attn-skip-freq"] == ("6",)


@pytest.mark.parametrize(
    ("name", "program"), [("megatron_deepspeed", BIGSCIENCE), ("megatron", MEGATRON_LM)]
)
def test_a_blend_has_a_weight_before_each_data_set(name: str, program: str, tmp_path: Path) -> None:
    blend = "data={source: indexed, blend: [[/data/a, 0.7], [/data/b, 0.3]]}"
    changes = (WITHOUT_NORM, blend)
    recipe = load_recipe("gpt-1b3", None, (f"engine={name}", *changes))
    spec = study(tmp_path, WITHOUT_NORM, name=name).model_copy(update={"data": recipe.data})
    told = started(spec)
    check_options(told, program)
    assert told["--data-path"] == ("0.7", "/data/a", "0.3", "/data/b")


def checkout(folder: Path, program: str, *, without: tuple[str, ...] = ()) -> str:
    """Write the parser of a program into a folder; return the setting of that checkout."""
    parser = folder / OPTIONS[program]["parser"]
    parser.parent.mkdir(parents=True, exist_ok=True)
    names = [name for name in OPTIONS[program]["options"] if name not in without]
    parser.write_text("\n".join(f"group.add_argument('{name}')" for name in names))
    return f'engine_settings.checkout="{folder}"'


def problems(spec: RunSpec) -> list[str]:
    return engine(spec.engine).unsupported(spec)


def write_vocabulary(folder: Path) -> None:
    """Write the files of a GPT-2 tokenizer where a checkout looks for them."""
    (folder / "data").mkdir()
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        (folder / "data" / name).touch()


def test_a_tokenizer_is_named_as_the_fork_names_it(tmp_path: Path) -> None:
    names = {BIGSCIENCE: "PretrainedFromHF", MICROSOFT: "HFTokenizer"}
    for program, kind in names.items():
        folder = tmp_path / kind
        changes = (checkout(folder, program), WITHOUT_NORM, 'engine_settings.tokenizer="/tok"')
        spec = study(tmp_path, *changes)
        assert problems(spec) == []
        assert started(spec)["--tokenizer-type"] == (kind,)


def test_a_vocabulary_that_is_missing_here_is_reported_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    spec = study(tmp_path, f'engine_settings.checkout="{tmp_path}"')
    local = spec.cluster.model_copy(update={"launcher": "local"})
    spec = spec.model_copy(update={"cluster": local})
    problem = engine(spec.engine).missing(spec)
    assert problem and "gpt2-vocab.json does not exist; set engine_settings.tokenizer" in problem
    own = "--vocab-file /v --merge-file /m"
    settings = {**spec.engine_settings, "arguments": own}
    assert (
        engine(spec.engine).missing(spec.model_copy(update={"engine_settings": settings})) is None
    )
    write_vocabulary(tmp_path)
    assert engine(spec.engine).missing(spec) is None


def test_an_option_that_a_fork_does_not_have_is_refused(tmp_path: Path) -> None:
    microsoft = checkout(tmp_path, MICROSOFT)
    (problem,) = problems(study(tmp_path, microsoft))
    assert "does not accept --embed-layernorm; use model.embedding_norm=false" in problem
    assert problems(study(tmp_path, microsoft, WITHOUT_NORM)) == []
    (problem,) = problems(
        study(tmp_path, microsoft, WITHOUT_NORM, "engine_settings.arguments=--no-such 1")
    )
    assert "does not accept --no-such; use bigscience-workshop/Megatron-DeepSpeed" in problem
    bigscience = checkout(tmp_path / "bigscience", BIGSCIENCE)
    assert problems(study(tmp_path, bigscience)) == []


def test_an_option_that_an_older_megatron_lm_does_not_have_is_refused(tmp_path: Path) -> None:
    older = checkout(tmp_path, MEGATRON_LM, without=("--log-throughput",))
    (problem,) = problems(study(tmp_path, older, WITHOUT_NORM, name="megatron"))
    assert "does not accept --log-throughput; use a newer Megatron-LM" in problem


def test_generated_options_and_those_of_another_machine_are_not_judged(tmp_path: Path) -> None:
    generated = checkout(tmp_path, MEGATRON_LM, without=("--log-throughput",))
    parser = tmp_path / OPTIONS[MEGATRON_LM]["parser"]
    parser.write_text(f"factory = ArgumentGroupFactory(Config)\n{parser.read_text()}")
    assert problems(study(tmp_path, generated, WITHOUT_NORM, name="megatron")) == []
    elsewhere = 'engine_settings.checkout="/not/on/this/machine"'
    assert problems(study(tmp_path, elsewhere)) == []


def test_the_form_of_a_ramp_up_follows_from_the_checkout(tmp_path: Path) -> None:
    setting = checkout(tmp_path, MEGATRON_LM)
    calculator = tmp_path / "megatron/core/num_microbatches_calculator.py"
    calculator.parent.mkdir(parents=True)
    changes = (setting, WITHOUT_NORM, WHOLE_RAMP_UP)

    def options() -> Settings:
        spec = study(tmp_path, *changes, variant="ramp-up", name="megatron")
        return started(spec)

    calculator.write_text("class RampupBatchsizeNumMicroBatchesCalculator: ...")
    assert "--rampup-batch-size" in options()
    calculator.write_text("class StepBatchsizeNumMicroBatchesCalculator: ...")
    assert "--step-batch-size-schedule" in options()


@pytest.mark.parametrize(("version", "is_refused"), [("0.8.3", False), ("0.18.1", True)])
def test_a_deepspeed_that_bigsciences_fork_cannot_use_is_refused(
    version: str, is_refused: bool, tmp_path: Path
) -> None:
    """DeepSpeed rejects settings that are given as `config` and as `--deepspeed_config`."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    (tmp_path / "pretrain_gpt.py").touch()
    training = tmp_path / "megatron/training.py"
    training.parent.mkdir()
    training.write_text("deepspeed.initialize(\n    config=config,\n    args=args,\n)\n")
    write_vocabulary(tmp_path)
    spec = study(tmp_path, f'engine_settings.checkout="{tmp_path}"')
    local = spec.cluster.model_copy(update={"launcher": "local", "python": str(python)})
    problem = engine(spec.engine).missing(spec.model_copy(update={"cluster": local}))
    assert (problem is not None) == is_refused
    assert problem is None or "DeepSpeed 0.18 rejects" in problem
    training.write_text("deepspeed.initialize(model=model, args=args)\n")
    assert engine(spec.engine).missing(spec.model_copy(update={"cluster": local})) is None
