"""Checkpoints of others: none runs code, and none with a flipped bit is trained on."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from paceline.trainer.checkpoint_reader import CheckpointReader, CorruptCheckpointError
from tests.trainer.example import end, settings, train
from tests.trainer.test_checkpoint import refusal, saved

__all__ = ["saved"]


class Poison:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def poison(checkpoint: Path, mark: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Poison(mark)))


def change(checkpoint: Path, edit: Callable[[Any], None]) -> None:
    """Rewrite the metadata of a checkpoint."""
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))


def test_a_poisoned_checkpoint_runs_nothing_when_a_run_goes_on_from_it(
    saved: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    poison(saved, mark)

    reason = refusal(tmp_path, saved)

    assert not mark.exists()
    assert "system, which no checkpoint needs; it may be crafted to run code" in reason
    assert pickle.loads((saved / ".metadata").read_bytes()) == 0 and mark.exists(), "it is poison"


def test_a_poisoned_checkpoint_runs_nothing_when_a_run_begins_with_its_weights(
    saved: Path, tmp_path: Path
) -> None:
    mark, run = tmp_path / "mark", tmp_path / "run"
    poison(saved, mark)
    raw = settings(steps=2, source="synthetic")
    raw["training"]["initial_weights"] = str(saved)

    assert train(run, raw) == 1

    assert not mark.exists() and "crafted to run code" in end(run)["reason"]


def test_what_is_no_tensor_is_not_unpickled(saved: Path, tmp_path: Path) -> None:
    def edit(metadata: Any) -> None:
        key = next(iter(metadata.state_dict_metadata))
        metadata.state_dict_metadata[key] = BytesStorageMetadata()

    change(saved, edit)

    assert "BytesStorageMetadata, which no checkpoint needs" in refusal(tmp_path, saved)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "", ".."])
def test_a_checkpoint_stays_in_its_folder(saved: Path, tmp_path: Path, name: str) -> None:
    def edit(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = name

    change(saved, edit)

    assert "which is not a file in its folder" in refusal(tmp_path, saved)


def test_transformed_tensors_are_refused(saved: Path, tmp_path: Path) -> None:
    def edit(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).transform_descriptors = ["stream_zstd"]

    change(saved, edit)

    assert "references transformed tensors" in refusal(tmp_path, saved)


@pytest.mark.parametrize("value", [None, 7, [], {}, "x"])
def test_a_pickle_of_anything_else_is_refused(saved: Path, value: Any) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(value))

    with pytest.raises(CorruptCheckpointError, match="has no table of tensors"):
        CheckpointReader(saved).read_metadata()


def test_metadata_that_is_no_regular_file_is_not_waited_for(saved: Path) -> None:
    (saved / ".metadata").unlink()
    os.mkfifo(saved / ".metadata")

    with pytest.raises(CorruptCheckpointError, match="is not a regular file"):
        CheckpointReader(saved).read_metadata()


def test_flipped_bits_inside_a_tensor_are_noticed(saved: Path, tmp_path: Path) -> None:
    (file,) = saved.glob("*.distcp")
    content = bytearray(file.read_bytes())
    info = max(
        CheckpointReader(saved).read_metadata().storage_data.values(), key=lambda kept: kept.length
    )
    middle = info.offset + info.length // 2
    content[middle : middle + 64] = bytes(255 - byte for byte in content[middle : middle + 64])
    file.write_bytes(content)

    assert "does not match; resume from another checkpoint" in refusal(tmp_path, saved)
