"""What is still to be sent to a node: blocks of bytes, read when they are needed."""

from __future__ import annotations

import json
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.core.assets import StagedFile
from paceline.core.errors import SystemFaultError

BLOCK_BYTES = 1 << 20


class Outbox:
    """Texts and files in the order in which they were added; few bytes of them are in memory."""

    def __init__(self) -> None:
        self._parts: deque[Iterator[bytes]] = deque()
        self._block = memoryview(b"")

    def add(self, text: bytes) -> None:
        """Send a text."""
        self._parts.append(iter((text,)))

    def add_files(self, folder: Path, files: Sequence[tuple[StagedFile, int]]) -> None:
        """Send files of a folder from a byte on, each behind a line that says what kind it is."""
        self._parts.extend(_file(folder / file.path, file.bytes, begin) for file, begin in files)

    def clear(self) -> None:
        """Nobody takes it any more."""
        self._parts.clear()
        self._block = memoryview(b"")

    def write(self, handle: int) -> None:
        """Send what can be sent at once; raises SystemFaultError where a file cannot be read."""
        if not self:
            return
        try:
            self._block = self._block[os.write(handle, self._block) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.clear()  # the node's last words and the exit code say why

    def __bool__(self) -> bool:
        while not self._block and self._parts:
            self._block = memoryview(next(self._parts[0], b""))
            if not self._block:
                self._parts.popleft()
        return bool(self._block)


def _file(path: Path, num_bytes: int, begin: int) -> Iterator[bytes]:
    try:
        status = path.lstat()
        is_link = stat.S_ISLNK(status.st_mode)
        head = {"mode": stat.S_IMODE(status.st_mode), "link": is_link}
        yield (json.dumps(head) + "\n").encode()
        if is_link:
            target = str(path.readlink()).encode()[:num_bytes]
            left = num_bytes - len(target)
            yield target
        else:
            left = num_bytes - begin
            with path.open("rb") as file:
                file.seek(begin)
                while left and (block := file.read(min(left, BLOCK_BYTES))):
                    left -= len(block)
                    yield block
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be read: {error.strerror}") from error
    if left:
        raise SystemFaultError(
            str(path), f"ends before the {num_bytes} bytes that were staged", remedy="--verify"
        )
