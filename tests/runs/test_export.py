"""`paceline runs export` writes a model's folder or says why not, and leaves nothing half done."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

pytest.importorskip("torch")

from paceline.trainer.hub.export import ExportSettings
from paceline.trainer.programs.export import outcome
from tests.command import paceline
from tests.trainer.example import log, settings, train

SMALL_BYTES = 4096
MODEL = ("--to", "huggingface", "--out")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint after its second step."""
    folder = tmp_path_factory.mktemp("run")
    raw = settings(steps=2, source="synthetic")
    raw["checkpoint"]["every"] = 2
    assert train(folder, raw) == 0, log(folder)
    return folder


def test_a_run_becomes_a_folder_once(run: Path, tmp_path: Path) -> None:
    done = paceline("runs", "export", run, *MODEL, tmp_path / "out", "--dtype", "bf16", "--json")

    answer = json.loads(done.stdout)
    assert done.returncode == 0 and (answer["form"], answer["step"]) == ("llama", 2)
    files = {file["name"]: file["bytes"] for file in answer["files"]}
    assert files == {"model.safetensors": (tmp_path / "out/model.safetensors").stat().st_size}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    again = paceline("runs", "export", run, *MODEL, tmp_path / "out")
    assert again.returncode == 1 and "out exists already; use a new folder" in again.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--dtype", "fp8"], "--dtype fp8: is unknown; allowed: fp32, bf16, fp16"),
        (["--base-model", "nowhere"], "nowhere has no config.json"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], what: str, run: Path, tmp_path: Path) -> None:
    done = paceline("runs", "export", run, *MODEL, tmp_path / "out", *words)

    assert done.returncode == 1 and what in done.stderr
    assert not [*tmp_path.iterdir()]


def test_there_must_be_adapters_to_merge(run: Path, tmp_path: Path) -> None:
    answer = outcome(ExportSettings(str(run), str(tmp_path / "out"), merged=True))

    assert (
        answer["event"] == "refused"
        and "the checkpoint has no adapters to merge" in answer["reason"]
    )


def test_a_disk_without_room_is_told_and_nothing_is_left(run: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, before[1]))
    try:
        answer = outcome(ExportSettings(str(run), str(tmp_path / "out")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert answer["event"] == "failed" and "File too large" in answer["reason"]
    assert not [*tmp_path.iterdir()]
