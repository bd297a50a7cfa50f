"""Staged recipes run on real tokens and weights, without a network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.core.run import RunSpec
from paceline.engines import native
from paceline.files.recipe import load_recipe, recipe_names
from paceline.files.staged import STAGE_VARIABLE, stage_root
from paceline.machines.placement import Request
from paceline.runs.data_files import make_tokens
from paceline.runs.plan import make_plan
from paceline.staging.conversions.stdlib_corpus import VOCABULARY
from paceline.staging.plan import staging_plan
from paceline.staging.stager import Stager
from tests.command import paceline
from tests.trainer.example import lines, log, steps, train

FLUX = "flux1-schnell-tiny"
STAGED = [name for name in recipe_names() if "staged" in load_recipe(name).variants]
OF_TOKENS = [name for name in STAGED if name != FLUX]
WITH_WEIGHTS = {"opt-350m-sft-tiny", "opt-13b-sft-tiny", "llama2-70b-lora-tiny"}
TRAINED = ["opt-350m-sft-tiny", "llama2-70b-lora-tiny", "llama31-8b-tiny"]
"""One of each kind: records and OPT's weights, tokens and Llama's, a blend and none."""
CHANGES = (
    "steps=1",
    "training.seq_len=64",
    "layout.micro_batch=1",
    "dtype=fp32",
    "memory_parts=false",
    "layout.cp=1",
    "layout.pp=1",
    "layout.vp=1",
    "training.ramp_up=null",
    "training.global_batch=2",
)
"""All on one device; the layouts have tests of their own."""
SMALL_FLUX = (
    "steps=3",
    "dtype=fp32",
    "memory_parts=false",
    "model.num_double_blocks=1",
    "model.num_single_blocks=1",
    "layout.micro_batch=2",
    "training.global_batch=4",
    "training.evaluation={every_samples: 8, samples: 12}",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs and staged assets of all recipes, nothing of which is staged before."""
    root = tmp_path_factory.mktemp("staged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STAGE_VARIABLE, str(root / "stage"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield root


def staged_run(
    name: str, root: Path, changes: Sequence[str] = CHANGES, devices: int = 1
) -> RunSpec:
    """The run on what was staged, its texts tokenized."""
    recipe = load_recipe(name)
    text = str(recipe.variants["staged"])
    needed = [asset.name for asset in recipe.assets if f"staged:{asset.name}" in text]
    plan = staging_plan(recipe, None, stage_root(), needed)
    Stager().stage(plan)
    plan = make_plan(
        Request(name, "staged", tuple(changes), devices=devices, runs_dir=root / "runs")
    )
    make_tokens(plan.token_files, lambda phase: None)
    return plan.spec


def test_every_tiny_sibling_can_run_on_what_is_staged():
    tiny = {name for name in recipe_names() if name.endswith("-tiny")}
    assert tiny <= set(STAGED)


def test_what_is_not_staged_is_refused_with_the_command(tmp_path: Path):
    words = ("run", "opt-350m-sft-tiny", "--variant", "staged", "--dry-run")
    done = paceline(*words, runs=tmp_path, env={STAGE_VARIABLE: str(tmp_path / "none")})

    assert done.returncode == 1
    assert "is missing" in done.stderr
    names = "--asset corpus --asset tokenizer --asset model"
    assert f"`paceline recipes stage opt-350m-sft-tiny {names}`" in done.stderr


@pytest.mark.parametrize("name", [name for name in OF_TOKENS if name not in TRAINED])
def test_it_is_planned_on_what_is_staged(name: str, root: Path):
    spec = staged_run(name, root)

    assert spec.data.source == "indexed"
    assert (spec.training.initial_weights is not None) == (name in WITH_WEIGHTS)


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_on_real_tokens_and_imported_weights(name: str, root: Path, tmp_path: Path):
    spec = staged_run(name, root)

    assert train(tmp_path, native.settings(spec)) == 0, log(tmp_path)

    assert spec.data.source == "indexed"
    assert (spec.training.initial_weights is not None) == (name in WITH_WEIGHTS)
    losses = [step["loss"] for step in steps(tmp_path)]
    # Random weights know nothing of the tokenizer's whole vocabulary.
    assert losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert all(math.isfinite(loss) for loss in losses)


def test_flux_trains_on_staged_shards_alike_on_one_device_and_on_two(root: Path, tmp_path: Path):
    """Several shards, empty texts, and val at its own times: no layout changes what is drawn."""
    losses: list[list[float]] = []
    for devices in (1, 2):
        spec = staged_run(FLUX, root, SMALL_FLUX, devices)
        assert spec.data.source == "webdataset" and spec.dp == devices
        folder = tmp_path / str(devices)
        assert train(folder, native.settings(spec)) == 0, log(folder)
        ranks = [steps(folder, rank) for rank in range(devices)]
        means = [sum(rank[i]["loss"] for rank in ranks) / devices for i in range(3)]
        (evaluated,) = (line["loss"] for line in lines(folder) if line["event"] == "eval")
        losses.append([*means, evaluated])

    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
