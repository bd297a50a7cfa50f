"""Reads checkpoints that somebody else may have written: nothing in them is run or believed.

DCP keeps its metadata as a pickle, which can name any function. This reader lets it name only the
classes that DCP writes, takes tensors alone (DCP unpickles all else in full), stays in the
checkpoint's folder, and holds every tensor against the CRC-32 that torch.save wrote beside it,
which torch.load itself does not look at.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

METADATA = ".metadata"
LARGEST_METADATA = 1 << 30
"""Bytes; DCP writes about 1 kB a tensor and rank."""
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
    # What pathlib's classes are pickled as from Python 3.13 on.
    "pathlib._local": {"PosixPath", "Path"},
}
DTYPES = {
    f"{kind}{bits}"
    for kind, widths in (("float", (16, 32, 64)), ("int", (8, 16, 32, 64)), ("uint", (8,)))
    for bits in widths
} | {"bfloat16", "bool"}


class CheckpointReader(FileSystemReader):
    """DCP's reader for others' checkpoints; raises UnsoundCheckpointError for what is not sound."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The checkpoint's table of tensors."""
        path = Path(self.path) / METADATA
        if not path.is_file():
            raise UnsoundCheckpointError(f"{METADATA} is no regular file")
        if path.stat().st_size > LARGEST_METADATA:
            raise UnsoundCheckpointError(f"{METADATA} is larger than {LARGEST_METADATA} bytes")
        with path.open("rb") as file:
            try:
                metadata = _MetadataUnpickler(file).load()
            except (UnsoundCheckpointError, OSError):
                raise
            except Exception as error:  # a broken pickle raises whatever its bytes lead to
                raise UnsoundCheckpointError(f"{METADATA} is broken: {error!r}"[:200]) from error
        _check(metadata, Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """One tensor's part of a file, read once before it is believed."""
        # In memory, because DCP's own view of a part seeks wrongly from its end.
        part = BytesIO(super()._slice_file(file, sinfo).read())
        try:
            with ZipFile(part) as archive:
                broken = archive.testzip()
        except (BadZipFile, NotImplementedError, ValueError, EOFError) as error:
            raise UnsoundCheckpointError(f"{sinfo.relative_path} is broken: {error}") from error
        if broken is not None:
            raise UnsoundCheckpointError(
                f"{sinfo.relative_path} is broken: a tensor at byte {sinfo.offset} does not have "
                "its checksum"
            )
        part.seek(0)
        return part


class UnsoundCheckpointError(ValueError):
    """A checkpoint that is broken, or that asks for more than tensors."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()) or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise UnsoundCheckpointError(
            f"{METADATA} asks for {module}.{name}, which no checkpoint needs; "
            "it may have been made to run code"
        )


def _check(metadata: Any, folder: Path) -> None:
    """Raises UnsoundCheckpointError unless the metadata names tensors in files of its folder."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise UnsoundCheckpointError(f"{METADATA} is broken: it holds no table of tensors")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise UnsoundCheckpointError(f"{METADATA} names {str(key)[:100]!r}, which is no tensor")
    if not isinstance(metadata.storage_data, dict):
        raise UnsoundCheckpointError(f"{METADATA} is broken: it names no files")
    files = metadata.storage_data.values()
    if any(getattr(kept, "transform_descriptors", None) for kept in files):
        raise UnsoundCheckpointError(f"{METADATA} asks for transformed tensors")
    for name in {str(getattr(kept, "relative_path", "")) for kept in files}:
        if Path(name).name != name or not (folder / name).is_file():
            raise UnsoundCheckpointError(
                f"{METADATA} names {name[:100]!r}, which is no file beside it"
            )
