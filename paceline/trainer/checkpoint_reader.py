"""Reader of untrusted checkpoints: it runs no code from them and verifies all tensors.

DCP stores its metadata as a pickle, which can reference any function. This reader allows only the
classes that DCP writes, loads tensors only (DCP unpickles everything else in full), stays in the
checkpoint's folder, and verifies the CRC-32 of every tensor, which torch.load ignores.
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
            try:
                metadata = _MetadataUnpickler(file).load()
            except (CorruptCheckpointError, OSError):
                raise
            except Exception as error:  # a corrupt pickle can raise anything
                raise CorruptCheckpointError(f"{METADATA} is corrupt: {error!r}"[:200]) from error
        _check(metadata, Path(self.path))
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


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()) or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise CorruptCheckpointError(
            f"{METADATA} references {module}.{name}, which no checkpoint needs; "
            "it may be crafted to run code"
        )


def _check(metadata: Any, folder: Path) -> None:
    """Raise CorruptCheckpointError unless the metadata lists tensors in files of its folder."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CorruptCheckpointError(f"{METADATA} is corrupt: it has no table of tensors")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CorruptCheckpointError(f"{METADATA}: {str(key)[:100]!r} is not a tensor")
    if not isinstance(metadata.storage_data, dict):
        raise CorruptCheckpointError(f"{METADATA} is corrupt: it lists no files")
    files = metadata.storage_data.values()
    if any(getattr(file, "transform_descriptors", None) for file in files):
        raise CorruptCheckpointError(f"{METADATA} references transformed tensors")
    for name in {str(getattr(file, "relative_path", "")) for file in files}:
        if Path(name).name != name or not (folder / name).is_file():
            raise CorruptCheckpointError(
                f"{METADATA} references {name[:100]!r}, which is not a file in its folder"
            )
