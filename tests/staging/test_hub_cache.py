"""Programs find staged models and data sets by their hub ids, with the real libraries, offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.assets import Asset
from paceline.files.recipe import load_recipe
from paceline.files.staged import hub_environment, staged_repository
from paceline.staging.hub_cache import hub_links
from tests.staging.mirror import COMMIT, Mirror
from tests.staging.staged import folder_of, recipe_of, stage_all

ROWS = "".join(json.dumps({"prompt": str(n), "chosen": "a", "rejected": "b"}) + "\n" for n in "123")
PREFERENCES = {"name": "preferences", "kind": "hub-dataset", "source": "Dahoas/full-hh-rlhf"}


def python(code: str, root: Path, cwd: Path) -> str:
    """Run a program that finds the stage folder by its variables alone."""
    cwd.mkdir(parents=True, exist_ok=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "TRANSFORMERS_"))
    }
    environment |= hub_environment(root) | {"HF_DATASETS_CACHE": str(cwd / "arrow")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture
def preferences(mirror: Mirror, tmp_path: Path) -> Path:
    mirror.repositories["dataset/Dahoas/full-hh-rlhf"] = {
        "README.md": b"# Data",
        "train.jsonl": ROWS.encode(),
        "test.jsonl": ROWS.encode(),
    }
    stage_all(recipe_of(PREFERENCES), tmp_path / "stage")
    return tmp_path / "stage"


def test_the_hubs_library_finds_a_snapshot(preferences: Path, tmp_path: Path):
    code = (
        "from huggingface_hub import hf_hub_download, snapshot_download\n"
        "print(snapshot_download('Dahoas/full-hh-rlhf', repo_type='dataset'))\n"
        "print(hf_hub_download('Dahoas/full-hh-rlhf', 'test.jsonl', repo_type='dataset'))"
    )
    snapshot, file = python(code, preferences, tmp_path / "run").splitlines()
    assert snapshot == str(preferences / f"hub/datasets--Dahoas--full-hh-rlhf/snapshots/{COMMIT}")
    assert Path(file).read_text() == ROWS


@pytest.mark.parametrize("place", ["path", "id"])
def test_datasets_loads_a_data_set(preferences: Path, tmp_path: Path, place: str):
    """Offline the library takes an id for a path below the working directory."""
    pytest.importorskip("datasets")
    path = staged_repository("Dahoas/full-hh-rlhf", preferences)
    assert path is not None and str(path).endswith("Dahoas/full-hh-rlhf")
    cwd = tmp_path / "run"
    cwd.mkdir()
    (cwd / "Dahoas").symlink_to(path.parent)
    name = str(path) if place == "path" else "Dahoas/full-hh-rlhf"
    code = f"import datasets; print(datasets.load_dataset({name!r})['train'][2]['prompt'])"
    assert python(code, preferences, cwd).splitlines()[-1] == "3"


@pytest.mark.parametrize("recipe", ["opt-350m-sft-tiny", "llama2-70b-lora-tiny", "gpt-1b3-tiny"])
def test_transformers_loads_a_made_model_and_its_tokenizer(tmp_path: Path, recipe: str):
    pytest.importorskip("transformers")
    stage = tmp_path / "stage"
    made = next(asset for asset in load_recipe(recipe).assets if asset.name == "model")
    stage_all(load_recipe(recipe).model_copy(update={"assets": (made,)}), stage)
    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained('paceline/{recipe}')\n"
        f"tokenizer = AutoTokenizer.from_pretrained('paceline/{recipe}')\n"
        "print(model.config.vocab_size, len(tokenizer), tokenizer.eos_token)"
    )
    assert python(code, stage, tmp_path).splitlines()[-1] == "2048 2048 <|endoftext|>"


def test_the_tiny_preferences_have_the_path_and_columns_of_the_published_ones(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    recipe = load_recipe("opt-350m-sft-tiny")
    made = next(asset for asset in recipe.assets if asset.name == "preferences")
    stage_all(recipe.model_copy(update={"assets": (made,)}), tmp_path)
    folder = folder_of(recipe, tmp_path, "preferences") / "content/Dahoas/rm-static"
    data = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "arrow"))
    assert set(data) == {"train", "test"}
    assert set(data["train"].column_names) == {"prompt", "chosen", "rejected"}


def test_links_are_repaired_and_not_written_again(preferences: Path):
    link = preferences / f"hub/datasets--Dahoas--full-hh-rlhf/snapshots/{COMMIT}/test.jsonl"
    before = link.lstat().st_ino
    stage_all(recipe_of(PREFERENCES), preferences)
    assert link.lstat().st_ino == before
    link.unlink()
    stage_all(recipe_of(PREFERENCES), preferences)
    assert link.read_text() == ROWS
    assert not link.readlink().is_absolute()


def test_the_script_for_nodes_writes_the_same_links(preferences: Path, tmp_path: Path):
    folder = folder_of(recipe_of(PREFERENCES), preferences, "preferences")
    node = tmp_path / "node's disk"
    node.mkdir()
    script = hub_links([folder]).script(str(node))
    for _ in range(2):
        subprocess.run(["bash", "-ec", script], check=True)
    for name in ("hub", "repositories"):
        assert listing(node / name) == listing(preferences / name)


def listing(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("name", ["../x", "a/b/c", "a/../b", "/etc", "a\nb", "-a/b", ""])
def test_an_id_that_is_no_repository_is_refused(name: str):
    with pytest.raises(ValueError, match=r"hub|pattern"):
        Asset.model_validate({"name": "a", "kind": "hub-model", "source": name})
    with pytest.raises(ValueError, match="pattern"):
        Asset.model_validate({"name": "a", "kind": "made", "source": "opt", "hub_id": name})


def test_a_damaged_asset_is_not_found(preferences: Path):
    folder = folder_of(recipe_of(PREFERENCES), preferences, "preferences")
    (folder / "content/test.jsonl").unlink()
    assert staged_repository("Dahoas/full-hh-rlhf", preferences) is None
