"""Data of the tiny variants: created once, and named by its content."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.core.errors import SystemFaultError
from paceline.core.mmdit import MMDiTShape
from paceline.files.recipe import load_recipe
from paceline.machines.probe import inventory
from paceline.mlperf.rules import TINY_VARIANTS
from paceline.mlperf.run import tiny_data
from paceline.mlperf.run.tiny_data import (
    MAX_BYTES,
    PIECE_BYTES,
    Domain,
    TrialData,
    prepare_data,
    training_text,
    write_images,
)
from tests.mlperf.run.test_request import on_cluster, series_request, spec_of


@pytest.fixture(autouse=True)
def a_place_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextmanager
def unshown(plan: Any) -> Any:
    raise AssertionError("no base model should be trained here")
    yield


def test_prepared_data_has_a_digest_of_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = prepare_data(TINY_VARIANTS["llama31_8b_tiny"], "cpu", unshown)
    monkeypatch.setattr(tiny_data, "training_text", lambda domain: b"x" * 1000)
    other = prepare_data(TINY_VARIANTS["llama31_8b_tiny"], "cpu", unshown)

    assert isinstance(first, TrialData) and first.digest != other.digest
    assert Path(other.overrides[1].removeprefix("data.path=")).read_bytes() == b"x" * 1000


def test_drawings_that_another_series_made_meanwhile_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rename = Path.rename

    def late(folder: Path, target: Path) -> Path:
        shutil.copytree(folder, target)
        return rename(folder, target)

    monkeypatch.setattr(Path, "rename", late)
    data = prepare_data(TINY_VARIANTS["flux1_tiny"], "cpu", unshown)

    assert Path(data.overrides[1].removeprefix("data.path=")).is_file()


def test_files_have_the_sizes_that_the_trainer_asks_for(tmp_path: Path):
    shape = load_recipe("flux1-schnell-tiny").model
    assert isinstance(shape, MMDiTShape)
    index = json.loads(write_images(tmp_path, shape, 3).read_text())

    (part,) = index["parts"]
    sizes = {name: (tmp_path / part[name]).stat().st_size for name in part if name != "samples"}
    latent = 2 * shape.latent_channels * shape.latent_size**2
    text = 2 * shape.text_len * shape.text_width
    assert part["samples"] == 3
    assert sizes == {
        "text": 3 * text,
        "pooled": 6 * shape.pooled_width,
        "mean": 3 * latent,
        "logvar": 3 * latent,
    }
    assert (tmp_path / index["empty"]["text"]).stat().st_size == text
    assert not any((tmp_path / index["empty"]["pooled"]).read_bytes())


@pytest.mark.parametrize(("domain", "word"), [("code", b"def "), ("prose", b"statement")])
def test_a_text_is_long_enough_to_train_on_and_always_the_same(domain: Domain, word: bytes):
    text = training_text(domain)

    assert 200_000 < len(text) <= MAX_BYTES
    assert text.count(word) > 100
    assert text == training_text(domain)


def test_the_two_domains_share_no_text():
    code, prose = training_text("code"), training_text("prose")

    lines = {line for line in prose.split(b"\n") if len(line) > 40}
    assert len(lines) > 1000
    assert len(lines & set(code.split(b"\n"))) < 0.02 * len(lines)


def test_the_end_that_is_held_out_is_like_the_rest():
    text = training_text("code")

    shares = [part.count(b"self") / len(part) for part in (text[: len(text) // 2], text[-100_000:])]
    assert shares[1] == pytest.approx(shares[0], rel=0.3)


def test_pieces_are_put_in_another_order(monkeypatch: pytest.MonkeyPatch):
    pieces = [bytes([at]) * PIECE_BYTES for at in range(40)]
    monkeypatch.setattr(tiny_data, "_reference", lambda: [b"".join(pieces)])

    text = training_text("prose")

    order = [text[at] for at in range(0, len(text), PIECE_BYTES)]
    assert sorted(order) == list(range(40)) and order != sorted(order)


def test_a_text_that_is_too_long_is_cut_at_a_piece(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny_data, "_reference", lambda: [bytes(5 * PIECE_BYTES)])
    monkeypatch.setattr(tiny_data, "MAX_BYTES", 2 * PIECE_BYTES + 1)

    assert len(training_text("prose")) == 2 * PIECE_BYTES


def test_sources_of_other_packages_and_of_tests_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("a.py", "b.txt", "pkg/c.py", "test/d.py", "site-packages/e.py", "pydoc_data/f.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{name}>")
    monkeypatch.setattr(tiny_data.sysconfig, "get_path", lambda _: str(tmp_path))

    assert sorted(training_text("code").decode().replace("><", ">|<").split("|")) == [
        "<a.py>",
        "<pkg/c.py>",
    ]


def test_a_python_without_the_reference_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pydoc_data", ModuleType("pydoc_data"))
    monkeypatch.delitem(sys.modules, "pydoc_data.topics", raising=False)

    with pytest.raises(SystemFaultError, match="which has no texts for help"):
        training_text("prose")


@pytest.mark.parametrize(("name", "source"), [("energon", "webdataset"), ("a.json", "latents")])
def test_the_whole_flux_takes_shards_or_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str
):
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)
    (tmp_path / "energon").mkdir()
    (tmp_path / "a.json").write_text("{}")
    data = tmp_path / name

    for request in (
        series_request(tmp_path, "flux1", data=data),
        series_request(tmp_path, "flux1", overrides=(f"data.path={data}",)),
    ):
        taken = spec_of(on_cluster(request, tmp_path, 4e12)).data
        assert (taken.source, taken.path) == (source, str(data))
