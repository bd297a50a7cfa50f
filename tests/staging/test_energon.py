"""Shards and their metadata, compared with megatron-energon's own tool and reader."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.staging.flux_samples import rows_of

energon: Any = pytest.importorskip("megatron.energon", reason="megatron-energon is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def database(folder: Path) -> dict[str, list[Any]]:
    """Every table's rows, and how tables and indexes are laid out, spaces aside."""
    opened = sqlite3.connect(folder / ".nv-meta" / "index.sqlite")
    layout = opened.execute("SELECT name, sql FROM sqlite_master").fetchall()
    rows = {
        table: opened.execute(f"SELECT * FROM {table}").fetchall()
        for table in ("samples", "sample_parts")
    }
    opened.close()
    rows["layout"] = sorted((name, "".join((sql or "").split())) for name, sql in layout)
    return rows


def test_its_own_tool_writes_the_same(shards: Path, tmp_path: Path):
    from click.testing import CliRunner
    from megatron.energon.tools.prepare import command

    for part in ("train", "val"):
        shutil.copytree(shards / part, tmp_path / part, ignore=shutil.ignore_patterns("*.idx"))
    words = f"{tmp_path} --non-interactive --sample-type CrudeWebdataset --num-workers 1"
    parts = ["--split-parts", "train:train/.*", "--split-parts", "val:val/.*", "--no-progress"]
    done = CliRunner().invoke(command, [*words.split(), *parts])

    assert done.exit_code == 0, done.output
    for path in tmp_path.rglob("*.idx"):
        assert path.read_bytes() == (shards / path.relative_to(tmp_path)).read_bytes()
    assert database(shards) == database(tmp_path)
    ours, theirs = (folder / ".nv-meta" for folder in (shards, tmp_path))
    infos = [json.loads((meta / ".info.json").read_text()) for meta in (ours, theirs)]
    assert infos[0]["shard_counts"] == infos[1]["shard_counts"]
    assert infos[0].keys() == infos[1].keys()
    assert (ours / "dataset.yaml").read_bytes() == (theirs / "dataset.yaml").read_bytes()


def test_its_reader_gives_every_sample_of_a_part(shards: Path, encodings: Path):
    @energon.stateless
    def cook(sample: dict[str, Any]) -> Any:
        kept = {name: np.load(io.BytesIO(sample[name])) for name in ("t5.bytes", "mean.bytes")}
        about = json.loads(sample["json"])
        return energon.CrudeSample(**energon.basic_sample_keys(sample), about=about, **kept)

    class TaskEncoder(energon.DefaultTaskEncoder):
        decoder = None
        cookers = [energon.Cooker(cook)]

    for part in ("train", "val"):
        worker = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
        read = energon.get_val_dataset(
            str(shards), split_part=part, worker_config=worker, batch_size=None,
            task_encoder=TaskEncoder(),
        )  # fmt: skip
        samples = {sample["about"]["key"]: sample for sample in energon.get_loader(read)}
        rows = rows_of(encodings / part)
        assert samples.keys() == {row["__key__"] for row in rows}
        for row in rows:
            sample = samples[row["__key__"]]
            assert (sample["t5.bytes"] == np.load(io.BytesIO(row["t5_encodings"]))).all()
            assert (sample["mean.bytes"] == np.load(io.BytesIO(row["mean"]))).all()
            assert sample["about"].get("timestep") == row.get("timestep")
