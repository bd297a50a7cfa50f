"""One input after another through the reading of logs: the program that the fuzzer drives.

    python benchmarks/_fuzz_target.py STATISTICS CORPUS [libFuzzer options]
    python benchmarks/_fuzz_target.py --replay CORPUS

The first byte of an input chooses what reads the rest: a log format, or the whole way from a file.
A broken promise is an exception. Replaying needs no fuzzer and says what time and memory it took.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
REPLAY = sys.argv[1] == "--replay"
if REPLAY:
    _instrumentation = contextlib.nullcontext()
else:
    import atheris

    _instrumentation = atheris.instrument_imports(include=["paceline"])
with _instrumentation:
    from paceline.engines import log_formats
    from paceline.files.log_file import BLOCK_BYTES, LogFile
    from tests.engines.promises import check_parse, check_read, read

KINDS = list(log_formats().items())
WHOLE_WAY = 255
PACKED = 254
"""First bytes that choose the whole way from a file to a status, plain and through gzip."""

LARGE_BYTES = 1 << 18
ENLARGED_EVERY = 128
MAX_S = 0.5
MAX_S_PER_BYTE = 2e-6
PASSES = 6


class TooSlowError(Exception):
    """An input takes more time than its length allows."""


def reader(first: int) -> str:
    """Return the name of the reader that the first byte of an input selects."""
    readers = {WHOLE_WAY: "the_whole_way", PACKED: "the_file_reader"}
    return readers.get(first) or KINDS[first % len(KINDS)][0]


def take(content: bytes, path: Path) -> None:
    """Reads what the first byte asks for, and raises when a promise is broken."""
    which, content = content[0], content[1:]
    if which == WHOLE_WAY:
        path.write_bytes(content)
        check_parse(path)
    elif which == PACKED:
        packed = gzip.compress(content, 1)
        path.write_bytes(packed[: max(10, len(packed) - len(content) % 32)])
        text = b"".join(LogFile(path))
        assert text in (content, content[: len(text)])
    else:
        check_read(KINDS[which % len(KINDS)][1], content, (BLOCK_BYTES, 61))


def take_in_time(content: bytes, path: Path) -> float:
    """Processor seconds of `take`; raises TooSlowError."""
    begin = time.process_time()
    take(content, path)
    took = time.process_time() - begin
    if took > MAX_S + MAX_S_PER_BYTE * len(content):
        raise TooSlowError(f"{took:.2f} s for {len(content)} bytes")
    return took


def read_enlarged(content: bytes) -> float:
    """Processor seconds for the input as one text, again and again; raises TooSlowError."""
    kind = KINDS[content[0] % len(KINDS)][1]
    text = content[1:] * (LARGE_BYTES // len(content))
    begin = time.process_time()
    read(kind, text)
    took = time.process_time() - begin
    if took > MAX_S + 4 * MAX_S_PER_BYTE * len(text):
        raise TooSlowError(f"{took:.2f} s for {len(text)} bytes of repeated input")
    return took


def fuzz(statistics: Path, arguments: list[str], path: Path) -> None:
    """Never returns: the fuzzer ends the process."""
    import atheris

    executions = 0

    def take(content: bytes) -> None:
        nonlocal executions
        executions += 1
        if executions % 1000 == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            statistics.write_text(json.dumps({"executions": executions, "peak_bytes": peak}))
        if not content:
            return
        try:
            take_in_time(content, path)
            if executions % ENLARGED_EVERY == 0:
                read_enlarged(content)
        except Exception:
            print(f"read by {reader(content[0])}", file=sys.stderr)
            raise

    atheris.Setup([sys.argv[0], *arguments], take)
    atheris.Fuzz()


def replay(corpus: Path, path: Path) -> dict[str, float]:
    """Every input of the corpus several times: the slowest, and memory from pass to pass."""
    inputs = [content for file in sorted(corpus.iterdir()) if (content := file.read_bytes())]
    slowest_s, resident = 0.0, list[int]()
    for _ in range(PASSES):
        slowest_s = max(slowest_s, *(take_in_time(content, path) for content in inputs))
        resident.append(_resident_bytes())
    return {
        "inputs": len(inputs),
        "slowest_s": slowest_s,
        "enlarged_bytes": LARGE_BYTES,
        "slowest_enlarged_s": max(map(read_enlarged, inputs)),
        "passes": PASSES,
        "resident_bytes_after_first_pass": resident[0],
        "resident_bytes_after_last_pass": resident[-1],
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.log"
        if REPLAY:
            print(json.dumps(replay(Path(sys.argv[2]), file)))
        else:
            fuzz(Path(sys.argv[1]), sys.argv[2:], file)
