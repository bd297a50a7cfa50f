"""Encodings of tar shards: the same tensors, turns and times as elsewhere, or a refusal."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engines import native
from paceline.staging.conversions.random_data import bfloat16_bits
from paceline.staging.conversions.webdataset import index_shard, write_shard
from paceline.trainer.config import ConfigError, TrainerConfig, parse_config
from paceline.trainer.data import shards as reader
from paceline.trainer.data.corpus import load_corpus, load_validation
from paceline.trainer.data.shards import TRAIN, EncodedFiles, ShardedFiles, shapes
from paceline.trainer.evaluation import sample_weights
from paceline.trainer.parallel.mesh import ALONE, MeshAxis
from tests.example import make_spec
from tests.trainer.data.test_latents import encoded
from tests.trainer.data.test_validation_latents import pooled
from tests.trainer.flux_peer import SMALL, flux_config

MODEL = flux_config(SMALL.model_copy(update={"text_dropout": 0.1}))


def npy(values: Any) -> bytes:
    """A .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def sample(number: float, about: bytes = b"{}", **changes: Any) -> dict[str, bytes]:
    """The files of a sample that holds its number everywhere."""
    files = {"json": about}
    for name, shape in shapes(MODEL).items():
        values = bfloat16_bits(np.full(shape, number, np.float32))
        files[reader.FILES[name]] = npy(changes.get(name, values))
    return files


def shard(path: Path, samples: list[dict[str, bytes]]) -> Path:
    """A shard with its index."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_shard(path, [(f"{path.parent.name}-{path.stem}-{i}", s) for i, s in enumerate(samples)])
    index_shard(path)
    return path


def sharded(folder: Path, counts: tuple[int, ...] = (2, 3), held_out: int = 0) -> Path:
    """A folder as MLPerf's, whose samples hold their own number; no text is -1."""
    number = 0
    for at, count in enumerate(counts):
        samples = [sample(number + i) for i in range(count)]
        shard(folder / "train" / f"shard_{at:06d}.tar", samples)
        number += count
    if held_out:
        times = [b'{"timestep": %d}' % ((3 * i + 1) % 8) for i in range(held_out)]
        samples = [sample(100 + i, about) for i, about in enumerate(times)]
        shard(folder / "val" / "shard_000000.tar", samples)
    empty = folder / "empty_encodings"
    empty.mkdir()
    for name, file in reader.EMPTY.items():
        (empty / file).write_bytes(npy(np.full((1, *shapes(MODEL)[name]), -1, np.float16)))
    return folder


def config(folder: Path, **changes: Any) -> TrainerConfig:
    """A training on shards."""
    training = make_spec().training.model_copy(update={"seq_len": SMALL.seq_len})
    raw = native.settings(make_spec(ranks=1, model=SMALL, training=training))
    raw["model"]["text_dropout"] = 0.1
    raw["data"] |= {"source": "webdataset", "path": str(folder)}
    evaluation = {"every_samples": 8, "skip_first": 0, "samples": 5, "target": None, "path": None}
    raw["training"]["evaluation"] = {**evaluation, **changes}
    return parse_config(raw)


def test_shards_give_what_an_index_of_the_same_samples_gives(tmp_path: Path):
    """Tensors, order over several epochs, and the encodings of no text."""
    (tmp_path / "index").mkdir()
    files = EncodedFiles(str(encoded(tmp_path / "index")), MODEL, seed=1)
    parts = ShardedFiles(str(sharded(tmp_path / "shards")), TRAIN, MODEL, seed=1)

    nothing = torch.Generator()
    for number in range(12):
        ours, theirs = (source.sample(number, nothing) for source in (parts, files))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert all(tensor.dtype == torch.bfloat16 for tensor in ours.values())
    assert all(torch.equal(x, files.no_text()[name]) for name, x in parts.no_text().items())


def test_every_bit_of_a_number_and_floats_are_read(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(shapes(MODEL)["mean"], generator=generator)
    logvar = means.half()
    bits = means.bfloat16().view(torch.uint16).numpy()
    shard(
        tmp_path / "a.tar",
        [sample(0, mean=bits, logvar=logvar.numpy(), pooled=np.full((1, 12), 3, "f4"))],
    )

    read = ShardedFiles(str(tmp_path), TRAIN, replace(MODEL, text_dropout=0), seed=1).at(0)

    assert torch.equal(read["mean"], means.bfloat16())
    assert torch.equal(read["logvar"], logvar.bfloat16())
    assert read["pooled"].tolist() == [3.0] * 12


def test_context_ranks_share_a_sample_and_no_layout_changes_it(tmp_path: Path):
    corpus = load_corpus(config(sharded(tmp_path), samples=1))
    whole = corpus.collate([3, 4], ALONE)
    parts = [corpus.collate([3, 4], MeshAxis(2, i)) for i in range(2)]
    again = load_corpus(config(tmp_path, samples=1)).collate([4], ALONE)

    for field in (0, 1, 3):
        assert torch.equal(torch.cat([part[field] for part in parts], dim=1), whole[field])
    assert all(torch.equal(a[0], b[1]) for a, b in zip(again, whole, strict=True))


def test_the_stated_share_of_texts_is_the_empty_one(tmp_path: Path):
    corpus = load_corpus(config(sharded(tmp_path), path=str(tmp_path)))
    *_, texts, summaries = corpus.collate([*range(600)], ALONE)

    dropped = (summaries == -1).all(dim=1)
    assert dropped.double().mean() == pytest.approx(0.1, abs=0.04)
    assert torch.equal(dropped, (texts == -1).all(dim=(1, 2)))


def test_held_out_samples_are_those_of_val_at_the_times_that_they_state(tmp_path: Path):
    made = config(sharded(tmp_path, held_out=5))
    validation = load_validation(made)

    assert pooled(validation, [0, 1, 4]) == [100.0, 101.0, 104.0]
    times = validation.collate([*range(5)], ALONE)[2]
    assert times.tolist() == [1 / 8, 4 / 8, 7 / 8, 2 / 8, 5 / 8]
    assert set(pooled(load_corpus(made), [*range(60)])) == {-1.0, 0.0, 1.0, 2.0, 3.0, 4.0}


def test_a_time_that_is_tried_twice_counts_once(tmp_path: Path):
    samples = [sample(i, b'{"timestep": %d}' % (i == 2)) for i in range(3)]
    shard(tmp_path / "a.tar", samples)
    validation = load_validation(config(tmp_path, samples=3, path=str(tmp_path)))

    assert sample_weights(validation, 3).tolist() == pytest.approx([0.75, 0.75, 1.5])


def test_without_val_the_last_samples_are_held_out(tmp_path: Path):
    made = config(sharded(tmp_path), samples=2)

    assert pooled(load_validation(made), [0, 1]) == [3.0, 4.0]
    assert set(pooled(load_corpus(made), [*range(60)])) <= {-1.0, 0.0, 1.0, 2.0}
    flat = config(tmp_path / "train", samples=2)
    assert pooled(load_validation(flat), [0, 1]) == [3.0, 4.0]


def test_more_shards_than_may_be_open_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader, "MAX_OPEN_SHARDS", 2)
    files = ShardedFiles(str(sharded(tmp_path, (1, 2, 1, 1))), TRAIN, MODEL, seed=1)

    for index in (0, 4, 2, 1, 3, 0):
        assert files.at(index)["pooled"][0] == index


def cut_off(train: Path) -> None:
    path = train / "shard_000001.tar"
    path.write_bytes(path.read_bytes()[:2000])


def other_index(train: Path) -> None:
    index = train / "shard_000000.tar.idx"
    content = index.read_bytes()
    (second,) = struct.unpack_from("<Q", content, 8)
    index.write_bytes(content[:8] + struct.pack("<Q", second + 512) + content[16:])


def no_index(train: Path) -> None:
    (train / "shard_000000.tar.idx").unlink()


def torn_index(train: Path) -> None:
    (train / "shard_000000.tar.idx").write_bytes(b"1234")


def no_shards(train: Path) -> None:
    for path in train.glob("*.tar"):
        path.unlink()


def no_empty(train: Path) -> None:
    (train.parent / "empty_encodings" / "clip_empty.npy").unlink()


def other_shape(train: Path) -> None:
    shard(train / "shard_000000.tar", [sample(0, mean=np.zeros((16, 4, 4), np.uint16))])


def other_kind(train: Path) -> None:
    shard(train / "shard_000000.tar", [sample(0, mean=np.zeros((16, 8, 8), np.int64))])


def no_npy(train: Path) -> None:
    shard(train / "shard_000000.tar", [{**sample(0), "clip.bytes": b"12345"}])


def negative_size(train: Path) -> None:
    path = train / "shard_000000.tar"
    header = tarfile.TarInfo.frombuf(path.read_bytes()[:512], "utf-8", "strict")
    header.size = -1024
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + path.read_bytes()[512:])


def deep_head(train: Path) -> None:
    head = b"(" * 60_000
    text = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head
    shard(train / "shard_000000.tar", [{**sample(0), "clip.bytes": text}])


def no_latents(train: Path) -> None:
    files = sample(0)
    del files["logvar.bytes"]
    shard(train / "shard_000000.tar", [files])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut_off, "one of them is truncated"),
        (other_index, "is not where its index says"),
        (no_index, r"has no index shard_000000\.tar\.idx"),
        (torn_index, "is not an index of samples"),
        (no_shards, "has no shards"),
        (no_empty, r"replace a share of 0\.1 of the texts"),
        (other_shape, r"mean\.bytes is <u2 \(16, 4, 4\); the model needs \(16, 8, 8\)"),
        (other_kind, r"mean\.bytes is <i8 \(16, 8, 8\)"),
        (no_npy, r"clip\.bytes is not a \.npy file"),
        (negative_size, "is not where its index says"),
        (deep_head, r"clip\.bytes is not a \.npy file"),
        (no_latents, r"sample 0 has no logvar\.bytes"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, spoil: Callable[[Path], None], words: str):
    spoil(sharded(tmp_path) / "train")

    with pytest.raises(ConfigError, match=rf"^data\.path: .*{words}"):
        ShardedFiles(str(tmp_path), TRAIN, MODEL, seed=1).at(1)


@pytest.mark.parametrize("about", [b'{"timestep": 8}', b'{"timestep": "1"}', b"[1]", b"{"])
def test_a_time_that_is_no_eighth_is_refused(tmp_path: Path, about: bytes):
    shard(tmp_path / "a.tar", [sample(0, about)])
    validation = load_validation(config(tmp_path, samples=1, path=str(tmp_path)))

    with pytest.raises(ConfigError, match=r"a\.tar: sample 0"):
        validation.collate([0], ALONE)
