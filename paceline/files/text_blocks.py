"""Large texts in blocks that can be searched for secrets: no line and no private key is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

LONGEST_KEY_BYTES = 1 << 16
"""Of a private key; what is longer is none."""
_BEGIN, _END = b"-----BEGIN ", b"-----END "


class _Lines(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def readline(self, size: int, /) -> bytes: ...


def text_blocks(file: _Lines, size: int) -> Iterator[bytes]:
    """The file's bytes in blocks of about `size`, each of whole lines and whole private keys.

    A line that is longer than `size` is cut: it must not fill the memory.
    """
    while block := file.read(size):
        block += file.readline(size)
        most = len(block) + LONGEST_KEY_BYTES
        while _is_in_key(block) and (line := file.readline(most - len(block))):
            block += line
        yield block


def _is_in_key(block: bytes) -> bool:
    begin = block.rfind(_BEGIN, max(0, len(block) - LONGEST_KEY_BYTES))
    return begin >= 0 and b"PRIVATE KEY-----" in block[begin:] and _END not in block[begin:]
