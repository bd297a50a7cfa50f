"""Fuzzing of every surface by one mechanism: valid examples, changed at random, and one property.

An input ends in an answer or in one clear error, within limits of time and memory, and leaves
nothing outside the folder that it was given.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import re
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError
from tests.attacks.fields import HOSTILE

Parts = dict[str, bytes]
"""An input: the content of each file or message by its name."""
Mutator = Callable[[bytes, random.Random], bytes]

LIMIT_S = 20
"""Limit for one input in seconds of processor time; the slowest real ones take 0.1 s."""
MAX_BYTES = 512 << 20
"""Limit of the memory that one input may take."""
UNCHANGED = 0.05
"""Share of inputs that stay valid."""
PIECES = (
    *(b"9" * 24, b"1e308", b"-1", b"nan", b"inf", b"", b"\x00", b"\xff\xfe", b"\x1b[0m", b"|"),
    *(b"\n", b"\r", b",", b'"', b"'", b": ", b"- ", b"[" * 300, b"]", b"{", b"&a [*a]", b"true"),
    *(b"\xe2\x80\xae", b"\xed\xa0\x80", b"x" * 3000, b"0x1f", b"1_000", b"~", b"!!python/none x"),
    *(b"\xc2\xb2", b"\xd9\xa3", b"1e999", b"9" * 5000, b"../../x", b"/", b"\\", b"\xe2\x80\xa8"),
)


@dataclass(frozen=True)
class Surface:
    """A way on which foreign input arrives."""

    name: str
    example: Callable[[random.Random], Parts]
    """A valid input."""
    read: Callable[[Parts, Path], object]
    """Reads an input in an empty folder; AssertionError for a wrong answer."""
    mutators: Sequence[Mutator] = ()

    def inputs(self, seed: int) -> Iterator[Parts]:
        """Yield inputs without end, the same for a seed."""
        rng = random.Random(f"{self.name} {seed}")
        mutators = self.mutators or MUTATORS
        while True:
            parts = dict(self.example(rng))
            names = sorted(parts)
            if self.mutators != NO_MUTATORS and rng.random() > UNCHANGED:
                for _ in range(rng.choice((1, 1, 1, 2, 3))):
                    name = rng.choice(names)
                    parts[name] = rng.choice(mutators)(parts[name], rng)
            yield parts


class Place:
    """The folder for inputs, with the folder for temporary files next to it."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.temporary = root, root / "folder", root / "temporary"
        self.num_answers = 0
        """Number of inputs that were read without an error."""
        self.temporary.mkdir(parents=True)
        tempfile.tempdir = str(self.temporary)
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        signal.signal(signal.SIGPROF, _too_long)

    def fault(self, surface: Surface, parts: Parts) -> str | None:
        """Return what is wrong with how an input is read, None if nothing is."""
        self.folder.mkdir()
        before_bytes = _reset_peak_bytes()
        try:
            fault = self._fault(surface, parts)
        finally:
            shutil.rmtree(self.folder)
        grown_bytes = peak_bytes() - before_bytes
        left = [*self.root.iterdir(), *self.temporary.iterdir()]
        left.remove(self.temporary)
        if fault is None and left:
            fault = f"leaves {left[0].name!r}"
        if fault is None and grown_bytes > MAX_BYTES:
            fault = f"takes {grown_bytes >> 20:,} MiB"
        return fault

    def _fault(self, surface: Surface, parts: Parts) -> str | None:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            surface.read(parts, self.folder)
            self.num_answers += 1
        except PacelineError as error:
            if "Too many open files" in error.what:
                return "files stay open"
            return None if error.where and error.what else "an error without words"
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in frames if "/paceline/" in frame.filename]
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} " if ours else ""
            return f"{place}{type(error).__name__}: {error}"[:200]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return None


def _reset_peak_bytes() -> int:
    """Let Linux forget the peak of this process's memory; return the memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the peak of this process's memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _too_long(*_: object) -> None:
    raise TimeoutError(f"takes longer than {LIMIT_S} s of the processor")


def with_pieces(content: bytes, rng: random.Random) -> bytes:
    """One to six places overwritten, doubled or cut out."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        start = rng.randint(0, len(changed))
        end = start + rng.choice((0, 1, 4, 12, 80))
        changed[start:end] = rng.choice((rng.choice(PIECES), bytes(changed[start:end]) * 2))
    return bytes(changed)


def with_number(content: bytes, rng: random.Random) -> bytes:
    """A number, or another word, replaced by a value that nobody would write."""
    words = list(re.finditer(rb"-?\d[\d.eE+-]*" if rng.random() < 0.7 else rb"\w+", content))
    if not words:
        return content
    start, end = rng.choice(words).span()
    return content[:start] + _text(rng.choice(HOSTILE), rng) + content[end:]


def with_lines(content: bytes, rng: random.Random) -> bytes:
    """Lines left out, repeated, exchanged or joined."""
    lines = content.splitlines(keepends=True)
    if not lines:
        return content
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    change = rng.randrange(4)
    if change == 0:
        del lines[at]
    elif change == 1:
        lines[at:at] = [lines[other]] * rng.choice((1, 3, 300))
    elif change == 2:
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[at] = lines[at].rstrip(b"\r\n")
    return b"".join(lines)


def with_value(content: bytes, rng: random.Random) -> bytes:
    """A value of a JSON document, or of one in a line, replaced, left out or repeated."""
    lines = content.splitlines(keepends=True)
    whole = not lines or lines[0].strip() in (b"{", b"[")
    line = content if whole else rng.choice(lines)
    start = line.find(b"{")
    try:
        document = json.loads(line[start:])
    except (ValueError, RecursionError):
        return with_pieces(content, rng)
    changed = line[:start] + json.dumps(_with_change(document, rng)).encode()
    return content.replace(line, changed + b"\n" * line.endswith(b"\n"), 1)


def packed(content: bytes, rng: random.Random) -> bytes:
    """The content compressed, sometimes without its end."""
    data = gzip.compress(content, 1)
    return data[: len(data) - rng.choice((0, 0, 1, 9))]


MUTATORS = (with_pieces, with_number, with_lines, with_value, with_value)
NO_MUTATORS = (lambda content, rng: content,)
"""For surfaces whose examples are changed already."""


def _with_change(document: Any, rng: random.Random) -> Any:
    """Return a JSON value with one hostile part, at any depth."""
    children = (
        list(document.items() if isinstance(document, dict) else enumerate(document))
        if (isinstance(document, (dict, list)))
        else []
    )
    if not children or rng.random() < 0.15:
        return copy.deepcopy(rng.choice(HOSTILE))
    key, value = rng.choice(children)
    kind = rng.random()
    if kind < 0.1:
        del document[key]
    elif kind < 0.2 and isinstance(document, list):
        document.insert(key, value)
    elif kind < 0.2:
        document[str(rng.choice(HOSTILE))[:100]] = document.pop(key)
    else:
        document[key] = _with_change(value, rng)
    return document


def _text(value: Any, rng: random.Random) -> bytes:
    text = value if isinstance(value, str) and rng.random() < 0.8 else json.dumps(value)
    return text.encode("utf-8", "surrogatepass")
