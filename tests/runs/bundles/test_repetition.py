"""What would repeat a bundle's run here is shown, and what is missing or another is named."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.core.training import Data
from paceline.files.documents import write_value
from paceline.files.inputs import INPUTS_FILE, find_input, find_run_inputs
from paceline.machines.probe.inventory import inventory, local_cluster
from paceline.runs.bundles.repetition import _locate_input
from paceline.runs.bundles.writing import write_bundle
from tests.command import paceline
from tests.example import make_spec
from tests.files.test_inputs import staged
from tests.runs.example import write_run


@pytest.fixture(scope="module")
def machine() -> dict[str, Any]:
    return inventory()


def bundle_of(tmp_path: Path, machine: dict[str, Any], data: Data) -> Path:
    """A bundle of a run that read `data`, on a machine with another kernel."""
    cluster = local_cluster(machine, "cpu", None, 1).model_copy(update={"python": "/theirs/python"})
    spec = make_spec(data=data, cluster=cluster)
    other = json.dumps({**machine, "kernel": "5.0-theirs"})
    folder = write_run(tmp_path / "theirs", "run", spec=spec, inventory=other)
    if inputs := find_run_inputs(spec, {}):
        write_value(folder / INPUTS_FILE, inputs)
    return write_bundle(folder, tmp_path / "a.bundle.tar.gz")[0]


def repeated(bundle: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return paceline("run", "--from", bundle, *words, runs=bundle.parent / "mine", env=env)


def test_a_dry_run_shows_the_script_and_what_is_another_here(
    tmp_path: Path, machine: dict[str, Any]
):
    done = repeated(bundle_of(tmp_path, machine, Data()), "--dry-run")

    assert done.returncode == 0, done.stderr
    assert "trainer" in done.stdout and "/theirs/python" not in done.stdout
    assert f"kernel: 5.0-theirs in the bundle, {machine['kernel']}" in done.stderr
    assert not (tmp_path / "mine").exists()


def test_staged_data_is_found_by_its_content_wherever_it_lies(
    tmp_path: Path, machine: dict[str, Any]
):
    theirs = staged(tmp_path / "theirs-staged", "text " * 999)
    bundle = bundle_of(tmp_path, machine, Data(source="text", path=str(theirs)))
    theirs.rename(tmp_path / "gone")
    mine = staged(tmp_path / "mine-staged", "text " * 999)

    done = repeated(bundle, "--dry-run", "--json", PACELINE_STAGE=str(tmp_path / "mine-staged"))

    document = json.loads(done.stdout)
    assert document["spec"]["data"]["path"] == str(mine)
    assert [part["state"] for part in document["inputs"]] == ["staged here"]
    assert document["obstacles"] == []


def test_what_was_staged_is_also_found_where_it_was_and_the_other_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another machine may have staged what lay anywhere on the first, and the reverse."""
    there = staged(tmp_path / "theirs", "text")
    part = find_input("data.path", there)
    assert part is not None and part.asset == "corpus"
    (tmp_path / "theirs/corpus-0123456789ab/manifest.json").unlink()
    monkeypatch.setenv("PACELINE_STAGE", str(tmp_path / "mine"))

    assert _locate_input(part).state == "here"

    unstaged = find_input("data.path", there)
    assert unstaged is not None and unstaged.asset is None
    there.write_text("rot!")
    assert [_locate_input(lost).state for lost in (part, unstaged)] == ["different", "different"]

    mine = staged(tmp_path / "mine", "text")
    for lost in (part, unstaged):
        needed = _locate_input(lost)
        assert (needed.state, needed.path) == ("staged here", str(mine))


@pytest.mark.parametrize(("here", "state"), [(None, "missing"), ("other", "different")])
def test_what_is_not_here_is_named_and_nothing_starts(
    tmp_path: Path, machine: dict[str, Any], here: str | None, state: str
):
    file = tmp_path / "a.txt"
    file.write_text("text " * 999)
    bundle = bundle_of(tmp_path, machine, Data(source="text", path=str(file)))
    file.unlink()
    if here:
        file.write_text(here)

    shown = json.loads(repeated(bundle, "--dry-run", "--json").stdout)
    refused = repeated(bundle)

    assert [part["state"] for part in shown["inputs"]] == [state]
    sha256 = hashlib.sha256(b"text " * 999).hexdigest()[:12]
    assert sha256 in shown["obstacles"][0] and str(file) in refused.stderr
    assert refused.returncode == 1 and "cannot be repeated here" in refused.stderr
    assert not (tmp_path / "mine").exists()


def test_options_that_would_change_nothing_are_refused(tmp_path: Path):
    done = repeated(tmp_path / "a.bundle.tar.gz", "--set", "steps=3")

    assert done.returncode == 1 and "--set" in done.stderr
