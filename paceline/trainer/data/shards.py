"""Encoded images and texts in files: with a JSON index, or in tar shards as in MLPerf's Flux.1.

FOLDER/train/*.tar and FOLDER/val/*.tar (or a folder of shards itself) hold the files KEY.json,
KEY.t5.bytes, KEY.clip.bytes, KEY.mean.bytes and KEY.logvar.bytes. The files of a sample are
adjacent. All but the first are .npy files with bf16 stored as uint16. SHARD.tar.idx has the start
offsets of the samples (u64, little-endian, one more than there are samples). FOLDER/empty_encodings
holds t5_empty.npy and clip_empty.npy. Source of the format: mlcommons/training_results_v5.1,
NVIDIA/benchmarks/flux1; megatron-energon.

A sample is the autoencoder's mean and log variance of an image (C, S, S), the T5 encoding of its
text (text, E) and the CLIP encoding of the whole text (P,).

A JSON index {"schema": 1, "parts": [{"samples": n, "text": ..., "pooled": ..., "mean": ...,
"logvar": ...}, ...], "empty": {"text": ..., "pooled": ...}} refers to files in its folder. Each
file holds a part's samples in sequence in bf16; `empty` is the encoding of an empty text.
"""

from __future__ import annotations

import ast
import json
import os
import tarfile
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from paceline.trainer.config import ConfigError
from paceline.trainer.model.network import derive_seed
from paceline.trainer.model_config import FluxConfig

TEXT, IMAGE = ("text", "pooled"), ("mean", "logvar")


def shapes(model: FluxConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a sample."""
    latents = (model.latent_channels, model.latent_size, model.latent_size)
    text = {"text": (model.text_len, model.text_width), "pooled": (model.pooled_width,)}
    return {**text, "mean": latents, "logvar": latents}


class LatentFiles(ABC):
    """Stored samples, in another order every epoch."""

    def __init__(self, path: str, num_files: int, seed: int, held_out: int) -> None:
        """Exclude the last `held_out` samples from training; raises ConfigError if none are left.

        `num_files` counts all samples, `num_samples` those that are trained on.
        """
        self.num_files, self.num_samples, self.seed = num_files, num_files - held_out, seed
        if self.num_samples <= 0:
            problem = (
                f"has {num_files} samples, all held out for evaluation; set evaluation.path"
                if num_files
                else "has no samples"
            )
            raise ConfigError(f"data.path: {path} {problem}")
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def sample(self, number: int, generator: Generator) -> dict[str, Tensor]:
        """Return the sample at position `number` of the run's order."""
        epoch, position = divmod(number, self.num_samples)
        if epoch != self._epoch:
            shuffle = Generator().manual_seed(derive_seed(self.seed, epoch))
            self._epoch, self._order = epoch, torch.randperm(self.num_samples, generator=shuffle)
        return self.at(int(self._order[position]))

    @abstractmethod
    def at(self, index: int) -> dict[str, Tensor]:
        """Return a sample by its index."""

    @abstractmethod
    def no_text(self) -> dict[str, Tensor]:
        """Return the encodings of an empty text."""

    def eighth(self, index: int) -> int | None:
        """Return the evaluation time of a sample in eighths; None if it is not given."""
        return None


class EncodedFiles(LatentFiles):
    """Samples in the files of a JSON index, mapped into memory."""

    def __init__(self, path: str, model: FluxConfig, seed: int, held_out: int = 0) -> None:
        self.folder, self.shapes = Path(path).parent, shapes(model)
        index = _index(path)
        try:
            counts = [int(part["samples"]) for part in index["parts"]]
            self._parts = [
                {name: self._map(part[name], name, count) for name in (*TEXT, *IMAGE)}
                for part, count in zip(index["parts"], counts, strict=True)
            ]
            self._empty = {name: self._map(index["empty"][name], name, 1)[0] for name in TEXT}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"data.path: {path} is not an index of latents: {error!r}") from error
        self._ends = list(accumulate(counts))
        super().__init__(path, self._ends[-1] if self._ends else 0, seed, held_out)

    def at(self, index: int) -> dict[str, Tensor]:
        """Return a sample by its index."""
        part = bisect_right(self._ends, index)
        place = index - (self._ends[part - 1] if part else 0)
        return {name: tensor[place] for name, tensor in self._parts[part].items()}

    def no_text(self) -> dict[str, Tensor]:
        """Return the encodings of an empty text."""
        return self._empty

    def _map(self, file: str, name: str, count: int) -> Tensor:
        """Map the (count, ...) tensor of a file; raises ConfigError if its size is different."""
        path, shape = self.folder / file, (count, *self.shapes[name])
        needed_bytes = prod(shape) * torch.bfloat16.itemsize
        size_bytes = path.stat().st_size if path.is_file() else 0
        if size_bytes != needed_bytes:
            raise ConfigError(
                f"data.path: {path} has {size_bytes} bytes, but "
                f"{count} x {name} {self.shapes[name]} in bf16 is {needed_bytes}"
            )
        values = torch.from_file(str(path), shared=False, size=prod(shape), dtype=torch.bfloat16)
        return values.view(shape)


def _index(path: str) -> dict[str, Any]:
    try:
        index = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.path: {path} is not an index of latents: {error}") from error
    if not isinstance(index, dict) or index.get("schema") != 1:
        raise ConfigError(f"data.path: {path} is not an index of latents with schema 1")
    return index


TRAIN, VAL = "train", "val"
FILES = {"text": "t5.bytes", "pooled": "clip.bytes", "mean": "mean.bytes", "logvar": "logvar.bytes"}
EMPTY = {"text": "t5_empty.npy", "pooled": "clip_empty.npy"}
EMPTY_FOLDER = "empty_encodings"
DTYPES = {"<u2": torch.bfloat16, "<f2": torch.float16, "<f4": torch.float32}
"""Torch dtype of each stored NumPy dtype; bf16, which NumPy lacks, is stored as uint16 bits."""
MAGIC = b"\x93NUMPY"
MAX_OPEN_SHARDS = 256
"""Maximum number of open shards; a process may usually open 1,024 files."""
BLOCK_BYTES = 512
EIGHTHS = range(8)


def part_folder(path: str, part: str) -> Path:
    """Return the folder of a part's shards: PATH/PART, or PATH itself."""
    inside = Path(path) / part
    return inside if inside.is_dir() else Path(path)


class ShardedFiles(LatentFiles):
    """Samples in the shards of a folder, in the order of the shards' names."""

    def __init__(
        self, path: str, part: str, model: FluxConfig, seed: int, held_out: int = 0
    ) -> None:
        """Open a part's shards.

        Raises ConfigError for invalid files, and if a sample does not have the model's shape.
        """
        self.folder, self.model, self.shapes = part_folder(path, part), model, shapes(model)
        self.shards = sorted(self.folder.glob("*.tar"))
        if not self.shards:
            raise ConfigError(f"data.path: {self.folder} has no shards (*.tar)")
        self._places = [_places(shard) for shard in self.shards]
        self._ends = list(accumulate(len(places) - 1 for places in self._places))
        self._open: dict[int, int] = {}
        weakref.finalize(self, _close, self._open)
        super().__init__(str(self.folder), self._ends[-1], seed, held_out)
        self.at(0)
        if part == TRAIN and model.text_dropout:
            _ = self._empty

    def at(self, index: int) -> dict[str, Tensor]:
        """Return a sample by its index; raises ConfigError if it is not of the model's shape."""
        where, files = self._files(index)
        if absent := [name for name in FILES.values() if name not in files]:
            raise ConfigError(f"{where} has no {', '.join(absent)}")
        return {
            name: npy_tensor(files[file], self.shapes[name], f"{where}: {file}")
            for name, file in FILES.items()
        }

    def no_text(self) -> dict[str, Tensor]:
        """Return the encodings of an empty text; raises ConfigError if they are missing."""
        return self._empty

    def eighth(self, index: int) -> int | None:
        """Return a held-out sample's `timestep`; raises ConfigError if it is not an eighth."""
        shard, number = self._place(index)
        where = self._where(shard, number)
        try:
            timestep = json.loads(self._json(shard, number) or "{}").get("timestep")
        except tarfile.HeaderError as error:
            raise _offset_error(where, error) from error
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{where}: json is not an object: {error}") from error
        if timestep is None or (type(timestep) is int and timestep in EIGHTHS):
            return timestep
        raise ConfigError(f"{where}: timestep {timestep!r}: use an integer from 0 to 7")

    @cached_property
    def _empty(self) -> dict[str, Tensor]:
        for folder in (self.folder, self.folder.parent):
            files = {name: folder / EMPTY_FOLDER / file for name, file in EMPTY.items()}
            if all(file.is_file() for file in files.values()):
                return {
                    name: npy_tensor(
                        memoryview(bytearray(files[name].read_bytes())),
                        self.shapes[name],
                        f"data.path: {files[name]}",
                    )
                    for name in TEXT
                }
        raise ConfigError(
            f"data.path: {self.folder.parent / EMPTY_FOLDER} lacks {' or '.join(EMPTY.values())}, "
            f"which replace a share of {self.model.text_dropout} of the texts; put them there, or "
            "set model.text_dropout=0"
        )

    def _files(self, index: int) -> tuple[str, dict[str, memoryview]]:
        """Return (location, contents by name) of a sample, read with one call."""
        shard, number = self._place(index)
        where = self._where(shard, number)
        start, end = self._places[shard][number : number + 2].tolist()
        content = memoryview(bytearray(end - start))
        if os.preadv(self._file_descriptor(shard), [content], start) != len(content):
            raise ConfigError(f"{where} is truncated; stage the shard again")
        files: dict[str, memoryview] = {}
        place = 0
        try:
            while place < len(content):
                name, size, behind = _member(bytes(content[place : place + BLOCK_BYTES]))
                files[name] = content[place + BLOCK_BYTES : place + BLOCK_BYTES + size]
                place += behind
        except tarfile.HeaderError as error:
            raise _offset_error(where, error) from error
        return where, files

    def _json(self, shard: int, number: int) -> bytes | None:
        """Return a sample's JSON, without reading its encodings, which are 1,000 times larger."""
        place, end = self._places[shard][number : number + 2].tolist()
        file = self._file_descriptor(shard)
        while place < end:
            name, size, behind = _member(os.pread(file, BLOCK_BYTES, place))
            if name == "json":
                return os.pread(file, size, place + BLOCK_BYTES)
            place += behind
        return None

    def _place(self, index: int) -> tuple[int, int]:
        """Return (shard, number in it) of a sample."""
        shard = bisect_right(self._ends, index)
        return shard, index - (self._ends[shard - 1] if shard else 0)

    def _where(self, shard: int, number: int) -> str:
        return f"data.path: {self.shards[shard]}: sample {number}"

    def _file_descriptor(self, shard: int) -> int:
        """Return a shard's file descriptor; opening one can take as long as reading a sample."""
        file = self._open.pop(shard, None)
        if file is None:
            if len(self._open) >= MAX_OPEN_SHARDS:
                os.close(self._open.pop(next(iter(self._open))))
            file = os.open(self.shards[shard], os.O_RDONLY | os.O_CLOEXEC)
        self._open[shard] = file
        return file


def npy_tensor(content: memoryview, shape: tuple[int, ...], where: str) -> Tensor:
    """Return the bf16 array of a .npy file, sharing its memory if it is stored as bf16.

    An array of one sample may have a leading dimension: (1, ...). Raises ConfigError for another
    shape or dtype; its message starts with `where`.
    """
    long = 2 if bytes(content[6:7]) == b"\x01" else 4
    begin = 8 + long + int.from_bytes(content[8 : 8 + long], "little")
    try:
        if bytes(content[:6]) != MAGIC:
            raise ValueError("wrong magic bytes")
        head = ast.literal_eval(bytes(content[8 + long : begin]).decode("latin1"))
        stored_shape, descr, fortran_order = (
            tuple(head["shape"]),
            head["descr"],
            head["fortran_order"],
        )
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{where} is not a .npy file: {error}") from error
    if descr not in DTYPES or fortran_order or stored_shape not in (shape, (1, *shape)):
        raise ConfigError(
            f"{where} is {descr} {stored_shape}; the model needs {shape} as {', '.join(DTYPES)}"
        )
    dtype, count = DTYPES[descr], prod(shape)
    if len(content) - begin != count * dtype.itemsize:
        raise ConfigError(f"{where} is truncated")
    values = torch.frombuffer(content, dtype=dtype, count=count, offset=begin)
    return values.view(shape).to(torch.bfloat16)


def _member(header: bytes) -> tuple[str, int, int]:
    """Return (name after its first dot, bytes, bytes of the blocks with header) of a tar member."""
    member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    if member.size < 0:  # the format allows it, and reading would loop forever
        raise tarfile.HeaderError("a negative size")
    blocks = 1 - (-member.size // BLOCK_BYTES)
    return member.name.rpartition("/")[2].partition(".")[2], member.size, blocks * BLOCK_BYTES


def _close(files: dict[int, int]) -> None:
    for file in files.values():
        os.close(file)


def _offset_error(where: str, error: tarfile.HeaderError) -> ConfigError:
    return ConfigError(f"{where} is not where its index says ({error}); write the .idx again")


def _places(shard: Path) -> Tensor:
    """Return the start offsets of a shard's samples and the end of the last, in bytes (int64)."""
    index = shard.with_name(f"{shard.name}.idx")
    try:
        content, size_bytes = bytearray(index.read_bytes()), shard.stat().st_size
    except OSError as error:
        raise ConfigError(
            f"data.path: {shard} has no index {index.name} ({error.strerror}); create it with "
            "`energon prepare`"
        ) from error
    if len(content) < 16 or len(content) % 8:
        raise ConfigError(f"data.path: {index} is not an index of samples; write it again")
    places = torch.frombuffer(content, dtype=torch.int64)
    if int(places[0]) != 0 or int(places.diff().min()) <= 0 or int(places[-1]) > size_bytes:
        raise ConfigError(
            f"data.path: {index} does not match {shard.name}; one of them is truncated"
        )
    return places
