"""What the whole Flux trains on: shards as they are staged, or an index."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.machines.probe import inventory
from tests.mlperf.run.test_request import on_cluster, series_request, spec_of


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
