"""Evaluations are part of what a run is; the labels of its log are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.core.shape import LoraSpec
from paceline.core.training import Evaluation, LossScale, MlperfLog
from paceline.engines import native
from paceline.files.recipe import load_recipe
from paceline.machines.placement import Request
from paceline.runs.plan import make_plan
from tests.example import make_spec

EVALUATION = Evaluation(every_samples=64, samples=8, target=3.0)
LORA = LoraSpec(rank=2, alpha=4, targets=("q",))
LOG = MlperfLog(benchmark="llama31_8b", org="Example", platform="box")


def spec(evaluation: Evaluation | None = EVALUATION, weights: str | None = None) -> RunSpec:
    """A run that is evaluated."""
    update = {"evaluation": evaluation, "initial_weights": weights}
    return make_spec(training=make_spec().training.model_copy(update=update))


def test_a_run_without_evaluations_keeps_its_key_and_others_have_their_own() -> None:
    harder = EVALUATION.model_copy(update={"target": 2.9})
    specs = [make_spec(), spec(), spec(harder), spec(None, "/a/step-000002")]

    assert spec(None).key == make_spec().key
    assert len({variant.key for variant in specs}) == len(specs)


def test_what_counts_changes_the_key_where_it_is_not_everything() -> None:
    mask = {"loss_mask": "/a/mask.bin"}
    masked = make_spec(data=make_spec().data.model_copy(update=mask))
    evaluated = [spec(EVALUATION.model_copy(update=new)) for new in (mask, {"mean": "samples"})]
    plain = make_spec().model_dump(mode="json")
    plain["data"].pop("loss_mask")

    assert RunSpec.model_validate(plain).key == make_spec().key
    assert len({variant.key for variant in (make_spec(), spec(), masked, *evaluated)}) == 5
    assert native.settings(masked)["data"]["loss_mask"] == "/a/mask.bin"


def test_newer_settings_change_the_key_where_they_are_not_as_usual() -> None:
    plain = make_spec(lora=LORA).model_dump(mode="json")
    plain["training"].pop("loss_scale")
    plain["lora"].pop("lr")
    plain["data"] = {k: v for k, v in plain["data"].items() if not k.startswith("split")}
    plain["model"] = {k: v for k, v in plain["model"].items() if not k.endswith("dropout")}
    scale = LossScale(initial=4096, window=500)
    scaled = make_spec(training=make_spec().training.model_copy(update={"loss_scale": scale}))
    faster = make_spec(lora=LORA.model_copy(update={"lr": 5e-4}))

    assert RunSpec.model_validate(plain).key == make_spec(lora=LORA).key
    split = make_spec(data=make_spec().data.model_copy(update={"split": (2.0, 4.0, 4.0)}))
    shape = make_spec().model
    dropping = [
        make_spec(model=shape.model_copy(update=update))
        for update in ({"dropout": 0.1}, {"dropout": 0.1, "attention_dropout": 0.0})
    ]
    keys = {x.key for x in (make_spec(), scaled, make_spec(lora=LORA), faster, split, *dropping)}
    assert len(keys) == 7
    assert native.settings(dropping[0])["model"]["dropout"] == 0.1
    assert native.settings(scaled)["training"]["loss_scale"]["window"] == 500
    assert native.settings(faster)["lora"]["lr"] == 5e-4


def test_labels_change_no_key_and_all_reaches_the_trainer() -> None:
    labelled = spec().model_copy(update={"mlperf": LOG})

    assert labelled.key == spec().key
    settings = native.settings(labelled)
    assert settings["training"]["evaluation"]["target"] == 3.0
    assert settings["mlperf"] == LOG.model_dump(mode="json")
    assert native.settings(make_spec())["mlperf"] is None


def test_a_log_without_evaluations_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"mlperf needs training\.evaluation"):
        make_spec(mlperf=LOG)
    labels = [f"mlperf.{k}={v}" for k, v in LOG.model_dump(exclude_none=True).items()]
    with pytest.raises(UserError, match=r"mlperf needs training\.evaluation"):
        load_recipe("tiny-llama", None, labels)


@pytest.mark.parametrize(
    "wrong", [{"benchmark": "../x"}, {"org": ""}, {"platform": "a\nb"}, {"warmup_steps": -1}]
)
def test_labels_that_break_a_log_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        MlperfLog.model_validate(LOG.model_dump() | wrong)


def test_what_contradicts_itself_is_said_before_it_starts() -> None:
    held_out = EVALUATION.model_copy(update={"path": "/a/b.txt"})
    resumed = make_spec().checkpoint.model_copy(update={"resume": "/a"})
    timed = spec().model_copy(update={"mlperf": LOG, "checkpoint": resumed})

    masked = EVALUATION.model_copy(update={"loss_mask": "/a/mask.bin"})
    (mask,) = native.unsupported(spec(masked))

    assert "training.evaluation.loss_mask" in mask and "data.source is stdlib" in mask
    assert "data.source is stdlib" in " ".join(native.unsupported(spec(held_out)))
    assert "is not allowed in a timed MLPerf run" in " ".join(native.unsupported(timed))
    assert native.unsupported(spec()) == []


def test_paths_are_absolute_in_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "base" / "checkpoints" / "step-000004"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({}))
    (folder.parent / "latest").write_text("step-000004\n")
    for name in ("a.txt", "b.txt", "a.mask"):
        (tmp_path / name).write_text("words")
    monkeypatch.chdir(tmp_path)
    overrides = (
        "data.source=text",
        "data.path=a.txt",
        "training.evaluation.every_samples=8",
        "training.evaluation.samples=2",
        "training.evaluation.path=b.txt",
        "training.initial_weights=base",
    )

    training = make_plan(Request("tiny-llama", overrides=overrides, devices=1)).spec.training

    assert training.initial_weights == str(folder)
    assert training.evaluation and training.evaluation.path == str(tmp_path / "b.txt")
    with pytest.raises(UserError, match=r"training\.evaluation\.path: c\.txt is not a file"):
        make_plan(Request("tiny-llama", overrides=(*overrides, overrides[4].replace("b.", "c."))))

    masks = ("data.source=tokens", "data.loss_mask=a.mask", "training.evaluation.loss_mask=a.mask")
    spec = make_plan(Request("tiny-llama", overrides=(*overrides, *masks), devices=1)).spec
    evaluation = spec.training.evaluation
    assert spec.data.loss_mask == str(tmp_path / "a.mask")
    assert evaluation is not None and evaluation.loss_mask == spec.data.loss_mask
    with pytest.raises(UserError, match=r"data\.loss_mask: b\.mask is not a file"):
        make_plan(Request("tiny-llama", overrides=(*overrides, "data.loss_mask=b.mask")))
