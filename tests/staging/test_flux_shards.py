"""Shards of Flux.1: encodings as MLCommons ships them go in, MLPerf's data sets come out."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.staging.conversions.flux import save_rows
from paceline.staging.conversions.webdataset import index_shard, shard_samples, write_shard
from paceline.staging.converters import ConversionJob, convert
from tests.staging.flux_samples import SIZES, SOURCES, converted, rows_of
from tests.staging.staged import recipe_of, stage_all

NAMES = {
    "t5.bytes": "t5_encodings", "clip.bytes": "clip_encodings",
    "mean.bytes": "mean", "logvar.bytes": "logvar",
}  # fmt: skip
CC12M, COCO = (1_099_776, 2_385_802_388_158), (29_696, 64_421_101_643)
"""Samples, and bytes as webdataset: MLPerf Training 5.1, flux1's rules and expected-mounts.csv."""

RECIPE = recipe_of(
    {"name": "encodings", "kind": "made", "source": "synthetic-encodings", "settings": SIZES},
    {"name": "energon", "kind": "made", "source": "flux-shards", "needs": ["encodings"],
     "settings": {**SOURCES, "samples_per_shard": 8}},
)  # fmt: skip


def contents(shard: Path) -> dict[str, bytes]:
    """The files of a tar in their order, as tarfile reads them."""
    with tarfile.open(shard) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def test_each_sample_has_the_bytes_of_its_row_and_a_key_of_its_own(encodings: Path, shards: Path):
    keys: list[str] = []
    for part in ("train", "val"):
        rows = iter(rows_of(encodings / part))
        for path in sorted((shards / part).glob("*.tar")):
            files = contents(path)
            for sample in shard_samples(path):
                row = next(rows)
                assert [file.name for file in sample.files] == ["json", *NAMES]
                for file in sample.files[1:]:
                    assert files[f"{sample.key}.{file.name}"] == row[NAMES[file.name]]
                about = json.loads(files[f"{sample.key}.json"])
                expected = {"key": row["__key__"]}
                assert about == expected | ({"timestep": row["timestep"]} if part == "val" else {})
                keys.append(sample.key)
        assert next(rows, None) is None

    assert len(set(keys)) == len(keys) == 29
    for name in ("t5_empty.npy", "clip_empty.npy"):
        copied, shipped = (f / "empty_encodings" / name for f in (shards, encodings))
        assert copied.read_bytes() == shipped.read_bytes()


def test_the_index_says_where_tarfile_finds_every_file(shards: Path):
    database = sqlite3.connect(shards / ".nv-meta" / "index.sqlite")
    counts = json.loads((shards / ".nv-meta" / ".info.json").read_text())["shard_counts"]
    assert (shards / ".nv-meta" / ".info.yaml").read_text() == (
        shards / ".nv-meta" / ".info.json"
    ).read_text()
    assert counts == {
        "train/shard_000000.tar": 8, "train/shard_000001.tar": 8, "train/shard_000002.tar": 4,
        "val/shard_000000.tar": 8, "val/shard_000001.tar": 1,
    }  # fmt: skip
    for number, (shard, count) in enumerate(counts.items()):
        listed = database.execute(
            "SELECT s.sample_key || '.' || p.part_name, content_byte_offset, content_byte_size "
            "FROM samples s JOIN sample_parts p USING (tar_file_id, sample_index) "
            "WHERE tar_file_id = ? ORDER BY content_byte_offset",
            (number,),
        ).fetchall()
        with tarfile.open(shards / shard) as tar:
            members = tar.getmembers()
        assert listed == [(m.name, m.offset_data, m.size) for m in members]
        index = (shards / f"{shard}.idx").read_bytes()
        *starts, end = struct.unpack(f"<{count + 1}Q", index)
        assert starts == [m.offset for m in members if m.name.endswith(".json")]
        assert end == members[-1].offset_data + -(-members[-1].size // 512) * 512
    database.close()
    assert (shards / "val" / "index.txt").read_text() == "shard_000000.tar\nshard_000001.tar\n"


def test_the_whole_data_sets_have_the_published_sizes(tmp_path: Path):
    """A form that differed by one padded block a sample would be off by half a gigabyte."""

    def npy(*shape: int) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, np.zeros(shape, np.uint16))
        return buffer.getvalue()

    latent = npy(16, 32, 32)
    sample = {
        "json": b"{}", "t5.bytes": npy(256, 4096), "clip.bytes": npy(768),
        "mean.bytes": latent, "logvar.bytes": latent,
    }  # fmt: skip
    write_shard(tmp_path / "a.tar", [("train-00000000", sample)])
    (measured,) = index_shard(tmp_path / "a.tar")

    def shard_bytes(count: int) -> int:
        whole = -(-(count * measured.end + 1024) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE
        return whole + 8 * (count + 1) + len("shard_000000.tar\n")

    for samples, published in (CC12M, COCO):
        full, rest = divmod(samples, 10_000)
        assert full * shard_bytes(10_000) + shard_bytes(rest) == published
    assert (tmp_path / "a.tar").stat().st_size == shard_bytes(1) - 16 - 17


def test_data_sets_of_several_files_are_one_row_after_the_other(tmp_path: Path, encodings: Path):
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    rows = rows_of(encodings / "train")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    Dataset.from_dict(columns).save_to_disk(tmp_path / "several" / "train", num_shards=3)
    for other in ("val", "empty_encodings"):
        shutil.copytree(encodings / other, tmp_path / "several" / other)
    (tmp_path / "shards").mkdir()
    folder = converted(tmp_path / "shards", tmp_path / "several", samples_per_shard=6)

    files = [contents(path) for path in sorted((folder / "train").glob("*.tar"))]
    assert [len(part) // 5 for part in files] == [6, 6, 6, 2]
    texts = [data for part in files for name, data in part.items() if name.endswith("t5.bytes")]
    assert texts == columns["t5_encodings"]


def test_several_processes_write_what_one_writes(
    tmp_path: Path, encodings: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline.staging.conversions.flux.MIN_BYTES_FOR_WORKERS", 0)
    monkeypatch.setattr("paceline.staging.converters.usable_cores", lambda: 2)

    seen: list[tuple[int, int]] = []
    how = {**SOURCES, "samples_per_shard": 8}
    inputs = {"encodings": encodings}
    convert(
        "flux-shards",
        ConversionJob(tmp_path, inputs, how, lambda: None, lambda *at: seen.append(at)),
    )

    assert all(0 <= done <= total for done, total in seen)
    assert seen[-1][0] == seen[-1][1]
    for path in sorted(p for p in shards.rglob("*") if p.is_file()):
        assert (tmp_path / path.relative_to(shards)).read_bytes() == path.read_bytes(), path


def test_a_staging_that_was_killed_keeps_whole_shards_alone(tmp_path: Path):
    stage_all(RECIPE, tmp_path)
    (asset,) = tmp_path.glob("energon-*")
    before = {path.name: path.stat().st_ino for path in asset.glob("content/train/*.tar")}
    (asset / "partial").mkdir()
    (asset / "content").rename(asset / "partial" / "complete")
    (asset / "manifest.json").unlink()
    train = asset / "partial" / "complete" / "train"
    (train / "shard_000001.tar").unlink()
    (train / "shard_000001.tar.abc.part").write_bytes(b"cut off")

    stage_all(RECIPE, tmp_path)

    after = {path.name: path.stat().st_ino for path in asset.glob("content/train/*.tar")}
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] == before[name]] == sorted(
        before.keys() - {"shard_000001.tar"}
    )
    assert not [*asset.rglob("*.part")]


def test_a_damaged_shard_alone_is_written_again(tmp_path: Path):
    stage_all(RECIPE, tmp_path)
    (asset,) = tmp_path.glob("energon-*")
    shard = asset / "content" / "val" / "shard_000000.tar"
    whole, kept = shard.read_bytes(), (asset / "content/train/shard_000000.tar").stat().st_ino
    shard.write_bytes(whole[:4000] + b"!" + whole[4001:])
    (asset / "manifest.json").rename(asset / "damaged.json")

    stage_all(RECIPE, tmp_path)

    assert shard.read_bytes() == whole
    assert (asset / "content/train/shard_000000.tar").stat().st_ino == kept


def no_column(folder: Path) -> None:
    shutil.rmtree(folder / "val")
    save_rows(folder / "val", [{"__key__": "a", "mean": b"", "timestep": 0}])


def cut_off(folder: Path) -> None:
    path = folder / "train" / "data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:3000])


def no_empty(folder: Path) -> None:
    (folder / "empty_encodings" / "t5_empty.npy").unlink()


def outside(folder: Path) -> None:
    (folder / "val" / "state.json").write_text('{"_data_files": [{"filename": "../a.arrow"}]}')


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_column, "has no column clip_encodings, logvar, t5_encodings"),
        (cut_off, "is not a complete Arrow stream"),
        (no_empty, "has 0 files named t5_empty.npy, not 1"),
        (outside, "which is not in the same folder"),
    ],
)
def test_other_data_is_refused(
    tmp_path: Path, encodings: Path, spoil: Callable[[Path], None], words: str
):
    shutil.copytree(encodings, tmp_path / "in")
    spoil(tmp_path / "in")
    (tmp_path / "out").mkdir()

    with pytest.raises(UserError, match=words):
        converted(tmp_path / "out", tmp_path / "in")
    assert not (tmp_path / "out" / ".nv-meta" / ".info.json").exists()


def test_a_source_that_is_no_need_is_refused(tmp_path: Path, encodings: Path):
    with pytest.raises(UserError, match=r"coco: is not among its needs; allowed: encodings"):
        converted(tmp_path, encodings, val="coco")


def test_a_torn_tar_and_a_key_without_a_name_are_refused(tmp_path: Path, shards: Path):
    shard = tmp_path / "torn.tar"
    shard.write_bytes((shards / "train" / "shard_000000.tar").read_bytes()[:5000])
    with pytest.raises(UserError, match=r"torn\.tar: is (not a complete tar file|truncated)"):
        index_shard(shard)
    write_shard(shard, [("folder/", {"": b""})])
    with pytest.raises(UserError, match=r"is not a file named KEY\.NAME"):
        index_shard(shard)
