"""`paceline recipes stage` as a user calls it, and a run that needs what is staged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline.engines import engine_names
from paceline.files.recipe import load_recipe, recipe_names
from paceline.staging.converters import CONVERTERS
from paceline.staging.plan import staging_plan
from tests.command import paceline

FULL = [name for name in recipe_names() if "tiny" not in name]
TINY = [name for name in recipe_names() if name not in FULL]


@pytest.mark.parametrize("name", FULL)
def test_a_full_recipe_names_the_sources_of_all_that_it_needs(name: str, tmp_path: Path):
    recipe = load_recipe(name)
    assets = recipe.assets
    assert assets or recipe.data.source == "synthetic"
    assert all(asset.engines and (asset.kind != "made" or asset.needs) for asset in assets)
    sized = [asset for asset in assets if asset.bytes is not None]
    plan = staging_plan(load_recipe(name), None, tmp_path)
    assert plan.bytes_needed == sum(asset.bytes or 0 for asset in sized)
    fetched = sum(asset.bytes or 0 for asset in sized if asset.kind != "made")
    assert plan.bytes_fetched == fetched


@pytest.mark.parametrize("name", recipe_names())
def test_assets_are_for_engines_that_can_be_asked_for(name: str):
    named = {engine for asset in load_recipe(name).assets for engine in asset.engines}
    assert named <= set(engine_names())


@pytest.mark.parametrize("name", ["llama31-8b", "llama31-70b", "llama31-405b"])
def test_the_engine_nemo_needs_what_the_published_procedure_fetches(name: str, tmp_path: Path):
    plan = staging_plan(load_recipe(name), "nemo", tmp_path)
    fetched = {part.asset.name for part in plan.assets}
    assert {"llama3-tokenizer", "pile-2-shards", "nemo-container", "dgxc-recipes"} <= fetched


def test_that_an_engine_needs_nothing_is_no_word_on_the_recipe(tmp_path: Path):
    told = [
        paceline("recipes", "stage", "llama31-8b", *engine, "--dry-run", "--to", tmp_path).stdout
        for engine in (["--engine", "torchtitan"], [])
    ]
    assert "llama31-8b declares no assets for engine torchtitan." in told[0]
    assert "declares no assets" not in told[1]


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_recipe_needs_nothing_from_elsewhere(name: str):
    assert all(
        asset.kind == "made" and asset.source in CONVERTERS for asset in load_recipe(name).assets
    )


def test_a_dry_run_says_what_is_to_come_and_writes_nothing(tmp_path: Path):
    root = tmp_path / "stage"
    done = paceline(
        "recipes",
        "stage",
        "llama31-8b",
        "--engine",
        "mlperf",
        "--dry-run",
        "--bandwidth",
        500,
        "--to",
        root,
        "--json",
    )
    told = json.loads(done.stdout)
    assert (told["recipe"], told["engine"]) == ("llama31-8b", "mlperf")
    by_name = {asset["name"]: asset for asset in told["assets"]}
    fetched = {"c4-8b", "mlperf-tokenizer", "mlperf-results", "mlperf-container"}
    assert set(by_name) == fetched | {"mlperf-8b", "mlperf-scripts"}
    assert by_name["c4-8b"]["bytes"] == 85_057_339_048
    assert by_name["mlperf-container"]["bytes"] is None
    assert {asset["state"] for asset in told["assets"]} == {"missing"}
    assert told["bytes_needed"] == 85_057_339_048 + 9_136_231
    assert told["bytes_unknown"] == ["mlperf-results", "mlperf-container"]
    assert told["seconds"] == pytest.approx(told["bytes_needed"] / 500e6)
    assert not root.exists()


def test_a_dry_run_tells_what_is_known_of_sizes_and_that_the_room_is_too_small(tmp_path: Path):
    done = paceline("recipes", "stage", "flux1-schnell", "--dry-run", "--to", tmp_path)
    # The encodings and the shards that are made from them are on the disk at the same time.
    assert "7 of 7 assets to stage; 4.90 TB needed, 2.45 TB to fetch; 2 without" in done.stdout
    free = shutil.disk_usage(tmp_path).free
    assert "needs 4.90 TB" in done.stdout or free > 4.9e12
    assert done.returncode == 0


def test_what_is_made_is_staged_verified_used_and_mended(tmp_path: Path):
    root = {"PACELINE_STAGE": str(tmp_path / "stage")}
    data = ("--set", "data.source=jsonl", "--set", "data.path=staged:corpus/code.jsonl")
    plan = ("run", "tiny-llama", *data, "--dry-run", "--json", "--devices", 1)

    refused = paceline(*plan, env=root)
    assert refused.returncode == 1 and "`paceline recipes stage tiny-llama`" in refused.stderr

    unverified = paceline("recipes", "stage", "tiny-llama", "--verify", env=root)
    assert unverified.returncode == 3 and "corpus is missing" in unverified.stdout

    staged = paceline("recipes", "stage", "tiny-llama", env=root)
    assert staged.returncode == 0 and "All assets are staged" in staged.stdout
    assert "corpus: staged" in staged.stderr
    path = Path(json.loads(paceline(*plan, env=root).stdout)["spec"]["data"]["path"])
    assert json.loads(path.read_text().splitlines()[0])["text"]

    assert paceline("recipes", "stage", "tiny-llama", "--verify", env=root).returncode == 0
    path.write_text(path.read_text().replace("a", "b", 1))
    damaged = paceline("recipes", "stage", "tiny-llama", "--verify", "--json", env=root)
    assert damaged.returncode == 3
    assert json.loads(damaged.stdout)["faults"] == [
        {"asset": "corpus", "fault": "changed", "path": "code.jsonl"}
    ]
    assert "corpus is damaged" in paceline(*plan, env=root).stderr
    assert paceline("recipes", "stage", "tiny-llama", env=root).returncode == 0
    assert paceline("recipes", "stage", "tiny-llama", "--verify", env=root).returncode == 0


def test_a_variant_stages_what_its_fields_refer_to(tmp_path: Path):
    words = ("recipes", "stage", "opt-350m-sft-tiny", "--dry-run", "--json", "--to", tmp_path)
    plain, variant = (
        {asset["name"] for asset in json.loads(paceline(*words, *extra).stdout)["assets"]}
        for extra in ([], ["--variant", "staged"])
    )
    assert variant == {"corpus", "tokenizer", "model"} and plain == variant | {"preferences"}
    refused = paceline(*words, "--variant", "stage")
    assert refused.returncode == 1 and "staged" in refused.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tiny-llama", "--asset", "corpse"], "did you mean 'corpus'"),
        (["tiny-llama", "--engine", "nothing"], "is unknown"),
        (["tiny-llama", "--dry-run", "--verify"], "leave it out"),
        (["tiny-llama", "--query-sizes"], "--query-sizes: has no effect without --dry-run"),
        (["tiny-llama", "--bandwidth", "500"], "--bandwidth: has no effect without --dry-run"),
        (
            ["tiny-llama", "--verify", "--bandwidth", "500"],
            "--bandwidth: has no effect with --verify; leave it out",
        ),
        (["tiny-llama", "--local", "/local"], "none are given"),
        (["tiny-llama", "--hosts", "node-001"], "are given without a destination folder"),
        (["tiny-llama", "--hosts", "node-001", "--local", "here"], "must be an absolute path"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_meant_is_refused(words: list[str], told: str, tmp_path: Path):
    done = paceline("recipes", "stage", *words, "--to", tmp_path)
    assert done.returncode == 1 and told in done.stderr


@pytest.mark.parametrize("mode", [[], ["--dry-run"], ["--verify"]])
@pytest.mark.parametrize("below", ["", "stage"])
def test_a_file_where_assets_are_to_lie_is_told_once(below: str, mode: list[str], tmp_path: Path):
    (file := tmp_path / "file").write_text("")
    done = paceline("recipes", "stage", "opt-350m-sft-tiny", *mode, "--to", file / below)
    assert done.stderr == f"error: {file}: is not a folder; choose another folder with --to\n"
    assert done.returncode == 1 and not done.stdout


def test_what_stops_all_assets_is_told_once():
    done = paceline("recipes", "stage", "opt-350m-sft-tiny", "--to", "/proc/nothing")
    assert done.returncode == 2
    assert "error: 4 assets failed: /proc/nothing: is not writable: " in done.stderr
    assert done.stderr.count("is not writable") == 1
