"""transformers' Trainer for real: models of a recipe's size, and runs from plan to result."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape, LoraSpec
from paceline.core.training import Data
from paceline.engines import engine
from paceline.engines.hf_trainer import settings, unsupported
from paceline.files.recipe import load_recipe, recipe_names
from paceline.runs import flow
from paceline.runs.plan import Plan
from paceline.runs.profiling import with_profile, write_profile
from paceline.trainer.config import LrScheduleConfig
from paceline.trainer.schedule import LearningRate
from tests.example import make_spec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("default")
"""transformers and accelerate warn of each other; what of it matters is in the run's log."""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for package in ("paceline.engines.launch", "paceline.engines.hf_trainer"):
        monkeypatch.syspath_prepend(str(resources.files(package)))
    import trainer_program  # type: ignore[import-not-found]

    return trainer_program


def recipe_shapes() -> dict[str, DecoderShape]:
    """Shapes of one recipe a family and size; GPT-2 has no norm behind its embedding."""
    recipes = {name: load_recipe(name).model for name in recipe_names()}
    return {
        name: shape.model_copy(update={"embedding_norm": False})
        for name, shape in recipes.items()
        if isinstance(shape, DecoderShape) and "tiny" not in name
    }


NOT_BUILT = {
    "deepseek-v3",
    "gemma3-4b",
    "gpt-oss-120b",
    "gpt-oss-20b",
    "kimi-k2",
    "phi4-mini",
    "qwen3-8b",
}
"""Recipes of structures that the engine has no family for."""


def test_a_structure_of_no_family_is_refused():
    specs = {
        name: make_spec(engine="hf_trainer", model=shape, data=Data())
        for name, shape in recipe_shapes().items()
    }
    assert {name for name, spec in specs.items() if unsupported(spec)} == NOT_BUILT


@pytest.mark.parametrize("name", sorted(recipe_shapes().keys() - NOT_BUILT))
def test_a_model_has_the_parameters_of_its_recipe(program: ModuleType, name: str):
    spec = make_spec(engine="hf_trainer", model=recipe_shapes()[name], data=Data())
    assert unsupported(spec) == []
    with torch.device("meta"):
        model = program.build(settings(spec))
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_parameters


def test_another_number_of_parameters_is_refused(program: ModuleType):
    with pytest.raises(SystemExit, match="has 30 parameters, but the recipe has 31"):
        program.check_size(torch.nn.Linear(5, 5), 31)


@pytest.mark.parametrize(
    "plan",
    [
        {"kind": "constant", "warmup": 3},
        {"kind": "linear", "warmup": 4, "decay": 15, "min_lr": 1e-4},
        {"kind": "cosine", "warmup": 24, "unit": "samples", "min_lr": 1e-4},
    ],
)
def test_the_learning_rate_is_that_of_the_native_trainer(program: ModuleType, plan: dict[str, Any]):
    base = make_spec(engine="hf_trainer")
    training = {**base.training.model_dump(), "lr": 1e-3, "lr_schedule": plan}
    spec = make_spec(engine="hf_trainer", training=training)
    factor = program.rate_factors(settings(spec)["learning_rate"])
    native = LearningRate(_native_training(spec))
    assert [1e-3 * factor(step) for step in range(20)] == pytest.approx(
        [native.at(step) for step in range(20)]
    )


def _native_training(spec: RunSpec) -> Any:
    training = spec.training
    return SimpleNamespace(
        lr=training.lr,
        lr_schedule=LrScheduleConfig(**training.lr_schedule.model_dump()),
        ramp_up=(),
        global_batch=training.global_batch,
        steps=training.steps,
    )


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [
        (1, {"lora": LoraSpec(rank=2, alpha=4, targets=("q", "v"))}),
        (2, {"layout": {"micro_batch": 2, "recompute": "full"}}),
    ],
    ids=["one process with adapters", "two processes that recompute"],
)
def test_a_run_trains_and_is_measured_step_by_step(
    ranks: int, fields: dict[str, Any], tmp_path: Path
):
    if "lora" in fields:
        pytest.importorskip("peft")
    spec = make_spec(ranks=ranks, engine="hf_trainer", **fields)
    assert engine("hf_trainer").unsupported(spec) == []
    plan = Plan(spec, engine("hf_trainer").job(spec, "x"), {})
    plan = with_profile(plan, "torch", [0], 9, 10)
    report = flow.run(plan, tmp_path, ["x"], ignore, probe=False)
    result = report.result
    assert result.status == "ok", result.reason
    assert (result.steps_done, result.steps_requested) == (20, 20)
    assert result.window is not None and result.window.rule != "as printed"
    assert len(report.steps) == 20 and report.steps.known("step_time_s")
    step_s, tokens_per_s = (result.metrics[n].value for n in ("step_time_s", "tokens_per_s"))
    assert step_s and tokens_per_s == pytest.approx(32 * 4 * ranks / step_s)
    profile = write_profile(report)
    assert profile.steps == (9, 10) and profile.parts["gemm"] > 0
    losses = report.steps["loss"]
    assert losses[-1] < losses[0]
    strange = ("the log reports", "ended with code", "after its last step")
    assert not [warning for warning in result.warnings if any(w in warning for w in strange)]


ignore: Callable[[object], None] = lambda _: None  # noqa: E731
