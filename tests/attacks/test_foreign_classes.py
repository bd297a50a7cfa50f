"""Pickles of others that change classes: nothing of them reaches the classes of the process."""

from __future__ import annotations

import pathlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.trainer.checkpoint_reader import (
    ALLOWED,
    CheckpointReader,
    CorruptCheckpointError,
)
from tests.trainer.test_checkpoint import saved

__all__ = ["saved"]


def class_attributes(module: str, name: str) -> bytes:
    """A pickle that sets attributes of a class by BUILD and returns the class."""
    state = pickle.dumps({"__str__": 1, "with_name": 2}, protocol=2)[2:-1]
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"N" + state + b"\x86b."


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in ALLOWED.items() for name in sorted(names)],
)
def test_a_checkpoint_changes_no_class_of_the_process(saved: Path, module: str, name: str) -> None:
    before = dict(vars(pathlib.PosixPath)), dict(vars(pathlib.Path)), dict(vars(torch.Size))
    (saved / ".metadata").write_bytes(class_attributes(module, name))

    with pytest.raises(CorruptCheckpointError):
        CheckpointReader(saved).read_metadata()

    after = dict(vars(pathlib.PosixPath)), dict(vars(pathlib.Path)), dict(vars(torch.Size))
    assert after == before


DOUBLED = b"2\x86" * 60
"""A tuple of a tuple twice, and so on: hashing it takes 2^60 steps."""


def test_a_checkpoint_that_takes_forever_to_hash_is_refused(tmp_path: Path) -> None:
    ends = {"item": b"})%sK\x01s.", "items": b"}()%sK\x01u.", "dict": b"()%sK\x01d."}
    ends |= {"set": b"\x8f()%s\x90.", "frozen": b"()%s\x91."}
    for name, pickled in ends.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(b"\x80\x04" + pickled % DOUBLED)
    program = (
        "import sys\nfrom paceline.trainer.checkpoint_reader import CheckpointReader as Reader\n"
        "for folder in sys.argv[1:]:\n"
        "    try:\n        Reader(folder).read_metadata()\n"
        "    except ValueError as error:\n        print(error)"
    )
    command = [sys.executable, "-c", program, *(str(tmp_path / name) for name in ends)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.count(".metadata is corrupt: ") == len(ends), done.stderr


def test_the_same_metadata_as_pytorch_reads(saved: Path) -> None:
    expected: Any = pickle.loads((saved / ".metadata").read_bytes())

    metadata = CheckpointReader(saved).read_metadata()

    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert metadata.storage_data == expected.storage_data
    assert [key.index for key in metadata.storage_data] == [
        key.index for key in expected.storage_data
    ]


def test_a_tensor_file_that_is_a_link_is_not_read(saved: Path, tmp_path: Path) -> None:
    (file,) = saved.glob("*.distcp")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(CorruptCheckpointError, match="not a file in its folder"):
        CheckpointReader(saved).read_metadata()
