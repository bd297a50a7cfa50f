"""Reader of untrusted checkpoints: it runs no code from them and verifies all tensors.

DCP stores its metadata as a pickle, which can reference any function and can set attributes of any
class that it references. This reader therefore resolves the names that DCP writes to classes made
for the file, and builds DCP's values from their plain fields. It loads tensors only (DCP unpickles
everything else in full), stays in the checkpoint's folder, and verifies the CRC-32 of every tensor,
which torch.load ignores.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeVar
from zipfile import BadZipFile, ZipFile

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

PlainT = TypeVar("PlainT")
METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30
"""DCP writes about 1 kB per tensor and rank."""
DCP = "torch.distributed.checkpoint"
ALLOWED = {
    f"{DCP}.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    f"{DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "Path"},
    # Module of pathlib's classes in pickles of Python 3.13 and later.
    "pathlib._local": {"PosixPath", "Path"},
}
DTYPES = {
    f"{kind}{bits}"
    for kind, widths in (("float", (16, 32, 64)), ("int", (8, 16, 32, 64)), ("uint", (8,)))
    for bits in widths
} | {"bfloat16", "bool"}


class CheckpointReader(FileSystemReader):
    """DCP's reader for untrusted checkpoints; raises CorruptCheckpointError."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the checkpoint's table of tensors."""
        path = Path(self.path) / METADATA
        if not path.is_file():
            raise CorruptCheckpointError(f"{METADATA} is not a regular file")
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise CorruptCheckpointError(f"{METADATA} is larger than {MAX_METADATA_BYTES:,} bytes")
        with path.open("rb") as file:
            unpickler = _MetadataUnpickler(file)
            try:
                content = unpickler.load()
                metadata = unpickler.metadata(content, Path(self.path))
            except (CorruptCheckpointError, OSError):
                raise
            except Exception as error:  # a corrupt pickle can raise anything
                raise CorruptCheckpointError(f"{METADATA} is corrupt: {error!r}"[:200]) from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """Return one tensor's part of a file after verifying its checksum."""
        # Read into memory, because DCP's view of a part seeks incorrectly from the end.
        part = BytesIO(super()._slice_file(file, sinfo).read())
        try:
            with ZipFile(part) as archive:
                bad_file = archive.testzip()
        except (BadZipFile, NotImplementedError, ValueError, EOFError) as error:
            raise CorruptCheckpointError(f"{sinfo.relative_path} is corrupt: {error}") from error
        if bad_file is not None:
            raise CorruptCheckpointError(
                f"{sinfo.relative_path} is corrupt: the checksum of the tensor at byte "
                f"{sinfo.offset} does not match"
            )
        part.seek(0)
        return part


class CorruptCheckpointError(ValueError):
    """A checkpoint that is corrupt or that references more than tensors."""


_PYTHON_UNPICKLER: Any = pickle._Unpickler
"""Python's own unpickler, about 3 times slower than the one in C. Only it can refuse a key before
it is hashed: a tuple that is nested 60 times by reference takes 2^60 steps."""


class _MetadataUnpickler(_PYTHON_UNPICKLER):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.classes: dict[str, Any] = {}

    def load_setitem(self) -> None:
        """Add a key and its value to a table."""
        self._check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        """Add the keys and values after the mark to a table."""
        self._check_keys(self.stack[::2])
        super().load_setitems()

    def _check_keys(self, keys: list[Any]) -> None:
        if any(isinstance(key, tuple) for key in keys):
            raise CorruptCheckpointError(f"{METADATA} is corrupt: a key of a table is a tuple")

    dispatch = {
        **_PYTHON_UNPICKLER.dispatch,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }
    """Loader of each opcode."""
    for _code in (pickle.DICT, pickle.ADDITEMS, pickle.FROZENSET):
        del dispatch[_code[0]]  # they also hash, and DCP writes none of them

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        if name not in ALLOWED.get(module, ()):
            raise CorruptCheckpointError(
                f"{METADATA} references {module}.{name}, which no checkpoint needs; "
                "it may be crafted to run code"
            )
        if name not in self.classes:
            self.classes[name] = _record_class()
        return self.classes[name]

    def metadata(self, content: Any, folder: Path) -> Metadata:
        """Return the metadata; its tensors must be in files of the folder."""
        tensors = self._state(content, "Metadata").get("state_dict_metadata")
        if not isinstance(tensors, dict):
            raise CorruptCheckpointError(f"{METADATA} is corrupt: it has no table of tensors")
        files = self._state(content, "Metadata").get("storage_data")
        if not isinstance(files, dict):
            raise CorruptCheckpointError(f"{METADATA} is corrupt: it lists no files")
        storage = {self._index(key): self._storage(value) for key, value in files.items()}
        for name in {info.relative_path for info in storage.values()}:
            path = folder / name
            if Path(name).name != name or path.is_symlink() or not path.is_file():
                raise CorruptCheckpointError(
                    f"{METADATA} references {name[:100]!r}, which is not a file in its folder"
                )
        return Metadata(
            {_plain(str, key): self._tensor(key, value) for key, value in tensors.items()},
            storage_data=storage,
        )

    def _state(self, value: Any, name: str) -> dict[str, Any]:
        """Return the fields of a value of this class, {} for any other value."""
        fields = isinstance(value, self.classes.get(name, ())) and getattr(value, "state", None)
        return fields if isinstance(fields, dict) else {}

    def _tensor(self, key: str, value: Any) -> TensorStorageMetadata:
        fields = self._state(value, "TensorStorageMetadata")
        if not fields:
            raise CorruptCheckpointError(f"{METADATA}: {key[:100]!r} is not a tensor")
        chunks = [
            ChunkStorageMetadata(self._size(chunk["offsets"]), self._size(chunk["sizes"]))
            for value in _plain(list, fields["chunks"])
            for chunk in [self._state(value, "ChunkStorageMetadata")]
        ]
        dtype = _plain(str, _plain(tuple, fields["properties"].state)[0])
        if dtype not in DTYPES:
            raise CorruptCheckpointError(f"{METADATA}: {key[:100]!r} has no known dtype")
        properties = TensorProperties(getattr(torch, dtype))
        return TensorStorageMetadata(properties, self._size(fields["size"]), chunks)

    def _index(self, value: Any) -> MetadataIndex:
        fields = self._state(value, "MetadataIndex")
        offset, index = fields.get("offset"), fields.get("index")
        return MetadataIndex(
            _plain(str, fields["fqn"]),
            None if offset is None else self._size(offset),
            None if index is None else _plain(int, index),
        )

    def _storage(self, value: Any) -> _StorageInfo:
        fields = self._state(value, "_StorageInfo")
        if fields.get("transform_descriptors"):
            raise CorruptCheckpointError(f"{METADATA} references transformed tensors")
        offset, length = (_plain(int, fields[name]) for name in ("offset", "length"))
        return _StorageInfo(_plain(str, fields["relative_path"]), offset, length)

    def _size(self, value: Any) -> torch.Size:
        if not isinstance(value, self.classes.get("Size", ())):
            raise CorruptCheckpointError(f"{METADATA} is corrupt: a tensor has no size")
        (sizes,) = value.arguments
        return torch.Size([_plain(int, size) for size in _plain(tuple, sizes)])


def _record_class() -> Callable[..., Any]:
    """Return a new class whose objects hold what the pickle gives them."""

    class Record(dict[Any, Any]):
        # A dict, because DCP's tables may be ordered dicts.
        __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

        def __init__(self, *arguments: Any) -> None:
            self.arguments = arguments

        def __setstate__(self, state: Any) -> None:
            self.state = state

    return Record


def _plain(kind: type[PlainT], value: Any) -> PlainT:
    """Return a value of exactly this type."""
    if type(value) is not kind:
        raise CorruptCheckpointError(
            f"{METADATA} is corrupt: {type(value)!r} is not {kind!r}"[:200]
        )
    return value
