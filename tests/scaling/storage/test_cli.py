"""`paceline probe storage` measures the folders of this machine and refuses what it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.options import with_option_groups
from paceline.cli.probe_storage import estimated_demand, storage
from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.scaling.storage.report import OPERATIONS, StorageReport

app = typer.Typer()
app.command("storage")(with_option_groups(storage))


def run(folder: Path, *arguments: str, code: int = 0) -> Any:
    words = [*arguments, "--device=cpu", "--json", f"--runs-dir={folder / 'runs'}"]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code
    return json.loads(result.stdout)


def test_a_folder_is_measured_and_held_against_a_training(tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    brief = ("--seconds=0.1", "--size=16MiB", "--recipe=llama31-8b", "--assume-devices=H100:64")
    document = run(tmp_path, str(data), *brief)
    folder = Path(document.pop("folder"))
    best = document.pop("best")
    assert (document.pop("probe"), document.pop("device")) == ("storage", "cpu")
    report = StorageReport.model_validate(document)
    assert StorageReport.model_validate_json((folder / "storage.json").read_text()) == report
    assert {row.processes for row in report.rows} == {1, 2} and set(best) == set(OPERATIONS)
    assert report.demand is not None and report.demand.samples_per_s
    (supply,) = report.supply
    assert supply.samples_per_s and supply.share and supply.checkpoint_s
    (sample, _) = (row for row in report.rows if row.operation == "sample")
    assert sample.unit_bytes == report.demand.sample_bytes
    assert list(data.iterdir()) == [] and not report.faults


def test_what_cannot_be_measured_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="is not a folder; choose an existing folder"):
        run(tmp_path, str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"free, not .*--size"):
        run(tmp_path, str(tmp_path), "--size=9000000GiB")
    with pytest.raises(UserError, match="leaves too little for each of 64"):
        run(tmp_path, str(tmp_path), "--size=1MiB", "--processes=1,64")
    for size in ("much", "9" * 310):
        with pytest.raises(UserError, match="is not a size"):
            run(tmp_path, str(tmp_path), f"--size={size}")
    with pytest.raises(UserError, match=r"is more than the file of each of 2 .*16777216 or less"):
        sample = f"--sample-bytes={2**24 + 1}"
        run(tmp_path, str(tmp_path), "--size=32MiB", "--processes=2", sample)
    with pytest.raises(UserError, match="'append' is not an operation"):
        run(tmp_path, str(tmp_path), "--ops=append")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("on", "hosts", "reason"),
    [
        ("H100:64", 3, "the 3 hosts; allowed: 66"),
        ("H100:2", 5, "the 5 hosts; allowed: 5"),
        ("H100:12", 1, "8 devices per host; allowed: 16"),
    ],
)
def test_devices_that_do_not_fill_the_hosts_are_refused(on: str, hosts: int, reason: str):
    cluster = Cluster(name="x", device="H100-SXM", nodes=hosts, devices_per_node=8)
    with pytest.raises(UserError, match=f"--assume-devices {on}: is not a multiple of {reason}"):
        estimated_demand("tiny-llama", on, cluster)
