"""Files of several assets are laid out as the programs of the benchmarks want them."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import PacelineError, UserError
from paceline.files.recipe import Recipe, load_recipe
from paceline.files.staged import asset_folder, asset_state
from paceline.staging.conversions.stdlib_corpus import make_tokenizer
from paceline.staging.conversions.tokenization import tokenization, tokenize
from paceline.staging.converters import ConversionJob, convert
from paceline.staging.plan import staging_plan
from paceline.staging.verification import verify
from tests.staging.staged import content_of, folder_of, recipe_of, stage_all

TEXTS = ["def f():\n    return 1\n", "import os\n", "print(os)\n"]
PILE = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in TEXTS)


def make(source: str, target: Path, inputs: dict[str, Path], settings: dict[str, Any]) -> None:
    target.mkdir(exist_ok=True)
    convert(source, ConversionJob(target, inputs, settings, lambda: None))


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def layout_of(recipe: str, name: str) -> tuple[Recipe, dict[str, Any]]:
    loaded = load_recipe(recipe)
    asset = next(asset for asset in loaded.assets if asset.name == name)
    return loaded, dict(asset.settings)


def test_mlperf_8b_has_the_files_that_the_published_scripts_expect(tmp_path: Path):
    """The names are those of expected-mounts-8b.csv in Lambda's results."""
    tokenizer = ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")
    data = [
        f"c4-{part}_text_document.{end}"
        for part in ("train.en_6", "validation-91205-samples.en")
        for end in ("bin", "idx")
    ]
    inputs = {
        "c4-8b": write(tmp_path / "a", dict.fromkeys(data, "x")),
        "mlperf-tokenizer": write(tmp_path / "b", dict.fromkeys(tokenizer, "y")),
    }
    make("folder", tmp_path / "done", inputs, layout_of("llama31-8b", "mlperf-8b")[1])
    expected = {f"8b/{name}" for name in data} | {f"8b/tokenizer/{name}" for name in tokenizer}
    assert listing(tmp_path / "done") == expected
    # A container sees the files too, and they take no space.
    assert (tmp_path / "done/8b" / data[0]).stat().st_ino == (
        tmp_path / "a" / data[0]
    ).stat().st_ino


@pytest.mark.parametrize("recipe", ["llama31-8b", "llama31-70b", "llama31-405b"])
def test_stage_path_has_what_setup_and_generate_dataset_leave(tmp_path: Path, recipe: str):
    tokens = [f"my-llama_0{n}_text_document.{end}" for n in (0, 1) for end in ("bin", "idx")]
    scripts = ("configure.sh", "generate_dataset.sh", "launch.sh", "setup.sh")
    checkout = [f"llama3.1/{name}" for name in (*scripts, "llama3.1_70b.yaml", "README_70b.md")]
    inputs = {
        "nemo-container": write(tmp_path / "image", {"nvidia+nemo+24.09.sqsh": "image"}),
        "dgxc-recipes": write(tmp_path / "code", dict.fromkeys([*checkout, "README.md"], "z")),
        "llama3-tokenizer": write(tmp_path / "tokenizer", {"tokenizer.json": "{}"}),
        "pile-tokens": write(tmp_path / "tokens", dict.fromkeys(tokens, "t")),
    }
    loaded, layout = layout_of(recipe, "nemo-stage")
    make("folder", tmp_path / "done", inputs, layout)
    data = tokens if recipe != "llama31-405b" else []
    assert listing(tmp_path / "done") == {
        "nvidia+nemo+24.09.sqsh",
        "cfg/llama3.1_70b.yaml",
        *scripts,
        "llama3.1-dataset/llama/tokenizer.json",
        *(f"llama3.1-dataset/{name}" for name in data),
    }
    needs = next(asset.needs for asset in loaded.assets if asset.name == "nemo-stage")
    assert set(needs) <= set(inputs)


def test_the_lora_model_is_joined_from_its_parts(tmp_path: Path):
    parts = {f"weights/__0_{n}.distcp{m}.part": f"{n}{m}" for n in (0, 1) for m in (0, 1)}
    files = {**parts, "weights/common.pt": "c", "context/model.yaml": "m"}
    inputs = {"llama2-70b-parts": write(tmp_path / "parts", files)}
    layout = layout_of("llama2-70b-lora", "llama2-70b-nemo")[1]
    for _ in range(2):  # A second call finds what an interrupted one has finished.
        make("folder", tmp_path / "done", inputs, layout)
    joined = {"weights/__0_0.distcp", "weights/__0_1.distcp"}
    assert listing(tmp_path / "done") == {*joined, "weights/common.pt", "context/model.yaml"}
    assert (tmp_path / "done/weights/__0_1.distcp").read_text() == "1011"


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"a/": "other"}, "not in needs"),
        ({"a/": "one/*.sqsh"}, "has no file"),
        ({"../a": "one"}, "stays inside"),
        ({"a": "one/../../x"}, "stays inside"),
        ({"/a/": "one"}, "stays inside"),
    ],
)
def test_a_layout_that_cannot_be_made_is_refused(
    tmp_path: Path, layout: dict[str, str], words: str
):
    inputs = {"one": write(tmp_path / "one", {"x": "1"})}
    with pytest.raises(UserError, match=words):
        make("folder", tmp_path / "done", inputs, layout)


@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
def test_text_is_unpacked_and_tokenized_as_preprocess_data_does(tmp_path: Path, end: str):
    """`test_tokenization` compares the files with those of Megatron's own script."""
    text = tmp_path / "pile"
    text.mkdir()
    for name in ("00.jsonl", "01.jsonl"):
        (text / name).write_text(PILE)
        if end == ".gz":
            (text / f"{name}.gz").write_bytes(gzip.compress((text / name).read_bytes()))
        elif end == ".zst":
            if not shutil.which("zstd"):
                pytest.skip("zstd is not installed")
            subprocess.run(["zstd", "-q", str(text / name)], check=True)
        if end:
            (text / name).unlink()
    (tokenizer := tmp_path / "tokenizer").mkdir()
    make_tokenizer(tokenizer)
    settings = layout_of("llama31-70b", "pile-tokens")[1]
    inputs = {"pile-2-shards": text, "llama3-tokenizer": tokenizer}
    make("tokenized", tmp_path / "done", inputs, settings)
    assert listing(tmp_path / "done") == {
        f"my-llama_0{n}_text_document.{kind}" for n in (0, 1) for kind in ("bin", "idx")
    }
    (plain := tmp_path / "plain.jsonl").write_text(PILE)
    tokenize([plain], tmp_path / "same", tokenization(tokenizer))
    for kind in ("bin", "idx"):
        made = tmp_path / "done" / f"my-llama_01_text_document.{kind}"
        assert made.read_bytes() == (tmp_path / f"same.{kind}").read_bytes()
    assert np.fromfile(tmp_path / "same.bin", np.uint16).size


def test_a_layout_needs_no_space_and_keeps_the_results_of_programs(tmp_path: Path):
    recipe = recipe_of(
        {"name": "corpus", "kind": "made", "source": "jsonl"},
        {
            "name": "place",
            "kind": "made",
            "source": "folder",
            "needs": ["corpus"],
            "settings": {"data/": "corpus"},
        },
    )
    assert staging_plan(recipe, None, tmp_path).unknown == ("corpus",)
    stage_all(recipe, tmp_path)
    assert set(content_of(recipe, tmp_path, "place")) == {"data/code.jsonl"}
    folder = folder_of(recipe, tmp_path, "place")
    (folder / "content/results").mkdir()
    (folder / "content/results/log.out").write_text("a result")
    assert verify(folder, "place") == []
    (folder / "content/data/code.jsonl").unlink()
    assert asset_state(folder) == "damaged"
    stage_all(recipe, tmp_path)
    assert asset_state(folder) == "staged"
    assert (folder / "content/results/log.out").read_text() == "a result"
    assert asset_folder(tmp_path, recipe.assets[0], recipe.assets).is_dir()


def test_files_of_one_name_are_joined_or_refused(tmp_path: Path):
    inputs = {"s": write(tmp_path / "s", {"a/x.txt": "A", "b/x.txt": "B"})}
    make("folder", tmp_path / "joined", inputs, {"all.txt": "s/*/x.txt"})
    assert (tmp_path / "joined" / "all.txt").read_text() == "AB"
    with pytest.raises(UserError, match="two files would have the name"):
        make("folder", tmp_path / "folder", inputs, {"./": "s/*/x.txt"})


@pytest.mark.parametrize("name", ["../../evil_{part}", "/tmp/{part}", "same", "x_{shard}"])
def test_names_of_token_files_are_names_of_their_own(tmp_path: Path, name: str):
    inputs = {
        "text": write(tmp_path / "text", {"00.jsonl": PILE, "01.jsonl": PILE}),
        "tokenizer": tmp_path / "tokenizer",
    }
    inputs["tokenizer"].mkdir()
    make_tokenizer(inputs["tokenizer"])
    settings = {"text": "text", "tokenizer": "tokenizer", "name": name}
    with pytest.raises(UserError, match=r"is not the name of a file|would have the name of"):
        make("tokenized", tmp_path / "out", inputs, settings)


FAKE_UNSQUASHFS = """#!/usr/bin/env python3
import pathlib, shutil, sys
words = sys.argv[1:]
target, image, inner = words[words.index("-dest") + 1 :]
source = pathlib.Path(image).with_name("root") / inner
if source.is_symlink():
    (pathlib.Path(target) / inner).parent.mkdir(parents=True)
    (pathlib.Path(target) / inner).symlink_to(source.readlink()); sys.exit()
if source.resolve() != pathlib.Path(image).parent.resolve() / "root" / inner or not source.is_dir():
    print("FATAL ERROR: no such folder", file=sys.stderr); sys.exit(1)
shutil.copytree(source, pathlib.Path(target) / inner, symlinks=True)
"""
"""Extracts from the folder `root` next to an image, as unsquashfs does from the image."""


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A staged image with a submission's scripts, packed by mksquashfs if it is installed."""
    scripts = {"run.sub": "#!/bin/bash", "config_A.sh": "export DGXNNODES=1", "train.py": "x"}
    root = write(tmp_path / "image" / "root" / "workspace" / "llm", {**scripts, "sub/a.sh": ""})
    (root / "hosts.sh").symlink_to("/etc/hosts")
    outside = write(tmp_path / "outside", {"a.sh": "of the host", "llm/b.sh": "of the host"})
    for link in (root / "out", root.parent / "link", tmp_path / "image" / "root" / "work"):
        link.symlink_to(outside)
    file = tmp_path / "image" / "nvidia+llm.sqsh"
    if (packer := shutil.which("mksquashfs")) and shutil.which("unsquashfs"):
        words = (packer, str(tmp_path / "image" / "root"), str(file), "-no-progress", "-quiet")
        subprocess.run(words, check=True, capture_output=True)
        return file
    file.touch()
    program = tmp_path / "bin" / "unsquashfs"
    write(tmp_path / "bin", {"unsquashfs": FAKE_UNSQUASHFS})
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return file


def test_scripts_are_copied_out_of_an_image(image: Path, tmp_path: Path):
    target, inputs = tmp_path / "made", {"container": image.parent}
    make("image-files", target, inputs, {"folder": "/workspace/llm", "files": "*.s*"})
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert names == {"run.sub", "config_A.sh", "sub/a.sh"}, "no link, and nothing else"
    assert (target / "config_A.sh").read_text() == "export DGXNNODES=1"
    with pytest.raises(PacelineError):
        make("image-files", tmp_path / "none", inputs, {"folder": "workspace/none"})
    for folder in ("work", "workspace/link"):
        with pytest.raises(UserError, match=rf"/{folder}: is a link"):
            make("image-files", tmp_path / "none", inputs, {"folder": folder, "files": "*.sh"})
    for setting in (
        {"folder": "work/llm", "files": "*.sh"},
        {"folder": "workspace", "files": "link/*.sh"},
        {"folder": "workspace/llm", "files": "out/*"},
    ):
        with pytest.raises(PacelineError):
            make("image-files", tmp_path / "none", inputs, setting)
    outside = tmp_path / "outside"
    assert (outside / "a.sh").exists() and (outside / "llm" / "b.sh").exists()
    with pytest.raises(UserError, match="has no file"):
        make("image-files", tmp_path / "none", inputs, {"folder": "workspace/llm", "files": "*.x"})
    with pytest.raises(UserError, match=r"folder '\.\./etc'"):
        make("image-files", tmp_path / "none", inputs, {"folder": "../etc"})


def test_an_image_of_another_program_is_refused(tmp_path: Path):
    inputs = {"container": write(tmp_path / "image", {"image.json": "{}"})}
    with pytest.raises(UserError, match="has no SquashFS image"):
        make("image-files", tmp_path / "made", inputs, {"folder": "workspace"})
