"""Speed and memory of `paceline parse` for a large log.

    python benchmarks/parse_speed.py [--size 1073741824] [--only megatron,gzip] [--folder DIR]

For every log format, also those declared as tables and the generic one, a log of 358 bytes a step
(1 GiB: 3 million steps), and files that are hard for any reader. Each is made in a temporary
folder, read by a `paceline parse FILE --json` of its own and removed. Rows of earlier calls with
other files are kept. Speed is text over processor time of that process, start included; memory is
its largest resident set. The contract is 50 MB/s and 200 MiB.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, BinaryIO

from paceline.engines import log_formats
from paceline.files.documents import write_text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.engines.sample import Sample  # noqa: E402
from tests.engines.samples import NOISE, SAMPLES  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "parse_speed.json"
MIN_MB_PER_S = 50.0
MAX_MIB = 200.0
BYTES_PER_STEP = 358
"""1 GiB over 3 million steps."""

GENERIC = Sample(
    lambda number, seconds: f"step: {number} | loss: 2.3 | step_time: {seconds:.4f} s\n".encode()
)
STEPS_A_WRITE = 4096
DIFFERENT_TIMES = 997
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """One file to read and how many bytes of text it holds."""

    name: str
    parts: Iterator[bytes]
    packed: bool = False


def format_log(name: str, num_steps: int, bytes_per_step: int = 0) -> Iterator[bytes]:
    """Write a log of `steps` steps; noise lines fill each up to its share of bytes."""
    sample = GENERIC if name == "generic" else SAMPLES[name]
    yield sample.head
    num_bytes = 0
    noise = cycle(NOISE)
    for start in range(0, num_steps, STEPS_A_WRITE):
        parts: list[bytes] = []
        for step in range(start, min(start + STEPS_A_WRITE, num_steps)):
            number = sample.first + step * sample.every
            parts.append(sample.line(number, 1 + step % DIFFERENT_TIMES / 1e4))
            num_bytes += len(parts[-1])
            while num_bytes < (step + 1) * bytes_per_step:
                parts.append(next(noise))
                num_bytes += len(parts[-1])
        yield b"".join(parts)
    yield sample.tail


def repeat_piece(piece: bytes, size: int) -> Iterator[bytes]:
    """`size` bytes or a little less of `piece` again and again."""
    block = piece * max(1, MIB // len(piece))
    return islice(cycle([block]), max(1, size // len(block)))


def near_matches(size: int) -> Iterator[bytes]:
    """Every log format's step line without its beginning, without its end, and broken inside."""
    lines = [SAMPLES[name].line(20, 1.25).rstrip(b"\r\n") for name in log_formats()]
    failures = [
        part + b"\n"
        for line in lines
        for part in (line[1:-1], line[: len(line) // 2], line.replace(b"2", b"x"), line[:40] * 8)
    ]
    return repeat_piece(b"".join(failures), size)


def cases(size: int) -> Iterator[Case]:
    """Every file of the benchmark."""
    num_steps = size // BYTES_PER_STEP
    names = [*log_formats(), "generic"]
    for name in names:
        yield Case(name, format_log(name, num_steps, BYTES_PER_STEP))
    for name in names:
        yield Case(f"{name}, steps only", format_log(name, num_steps))
    yield Case("no line end", repeat_piece(b"iteration | x: 1.0, ", size))
    yield Case("carriage returns only", repeat_piece(b"\r", size))
    yield Case("near matches", near_matches(size))
    yield Case("gzip 100:1", format_log("maxtext", size >> 14, 1 << 14), packed=True)
    yield Case("zeros in gzip", repeat_piece(b"\0", size), packed=True)


def write_case(case: Case, path: Path) -> tuple[int, float]:
    """Bytes of text written, and the seconds that took."""
    begin = time.perf_counter()
    with path.open("wb") as raw:
        file: BinaryIO = (
            gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1) if case.packed else raw
        )  # type: ignore[assignment]
        num_bytes = sum(file.write(part) for part in case.parts)
        if case.packed:
            file.close()
    return num_bytes, time.perf_counter() - begin


def parse(path: Path) -> tuple[dict[str, Any], float, float]:
    """The document of `paceline parse`, its processor seconds and its largest resident MiB."""
    answer = path.with_suffix(".json")
    program = [sys.executable, "-m", "paceline", "parse", str(path), "--json"]
    result = subprocess.run(
        [sys.executable, "-S", str(ROOT / "benchmarks" / "_usage.py"), str(answer), *program],
        check=True,
        capture_output=True,
        text=True,
        cwd=path.parent,
    )
    code, cpu_s, peak_bytes = result.stdout.split()
    if code != "0":
        raise SystemExit(f"{path.name}: exit code {code}: {result.stderr}")
    return json.loads(answer.read_text()), float(cpu_s), float(peak_bytes) / MIB


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """One row of the result."""
    path = folder / ("a.log.gz" if case.packed else "a.log")
    try:
        num_bytes, written_s = write_case(case, path)
        on_disk = path.stat().st_size
        document, cpu_s, peak_mib = parse(path)
    finally:
        path.unlink(missing_ok=True)
    return {
        "file": case.name,
        "bytes": num_bytes,
        "bytes_on_disk": on_disk,
        "engine": document["engine"],
        "status": document["status"],
        "steps": document["n_steps"],
        "cpu_s": round(cpu_s, 2),
        "mb_per_s": round(num_bytes / 1e6 / cpu_s, 1),
        "peak_mib": round(peak_mib, 1),
        "written_mb_per_s": round(num_bytes / 1e6 / written_s, 1),
    }


def main() -> int:
    """Print a row per file and store all; 1 when one misses the contract."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1 << 30, help="Bytes of text per file.")
    parser.add_argument("--only", default="", help="File names or prefixes, separated by commas.")
    parser.add_argument("--folder", type=Path, default=None, help="Folder for the files.")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    beginnings = tuple(options.only.split(",")) if options.only else ("",)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        if shutil.disk_usage(name).free < 2 * options.size:
            raise SystemExit(f"{name}: less than {2 * options.size:,} bytes are free; see --folder")
        for case in cases(options.size):
            if case.name.startswith(beginnings):
                rows.append(measure(case, Path(name)))
                print(
                    "{file:28} {mb_per_s:7.1f} MB/s {peak_mib:6.1f} MiB {steps:9,} steps "
                    "{status}".format_map(rows[-1]),
                    flush=True,
                )
    slow = [r["file"] for r in rows if r["mb_per_s"] < MIN_MB_PER_S or r["peak_mib"] > MAX_MIB]
    write_text(options.result, json.dumps(result(earlier_rows(options.result), rows), indent=2))
    print(f"beyond the limits: {', '.join(slow) or 'none'}")
    return int(bool(slow))


def earlier_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows that are stored already."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def result(earlier: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the stored result: limits, machine, and the rows with those of other files."""
    rows_by_file = {row["file"]: row for row in [*earlier, *rows]}
    return {
        "benchmark": "parse_speed",
        "least_mb_per_s": MIN_MB_PER_S,
        "most_mib": MAX_MIB,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "rows": list(rows_by_file.values()),
    }


if __name__ == "__main__":
    sys.exit(main())
