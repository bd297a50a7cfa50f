from __future__ import annotations

from pathlib import Path

import pytest

from paceline.report import vega


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vega, "vega_bundle", vega.vega_bundle.__wrapped__)


def test_the_script_is_bundled_once_and_then_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = vega.vega_bundle()
    monkeypatch.delattr(vega.vl_convert, "javascript_bundle")
    assert "vegaEmbed" in made and vega.vega_bundle() == made


@pytest.mark.parametrize("there", ["a file", "no text"])
def test_a_cache_that_cannot_be_used_costs_time_alone(tmp_path: Path, there: str) -> None:
    if there == "a file":
        (tmp_path / "paceline").write_text("")
    else:
        path = vega.bundle_file()
        assert path
        path.parent.mkdir()
        path.write_bytes(b"\xff")
    assert "vegaEmbed" in vega.vega_bundle()


def test_without_a_home_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert vega.bundle_file() is None
