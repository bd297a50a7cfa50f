"""Coverage-guided fuzzing of every log format, of the file reader and of the way to a status.

    python benchmarks/fuzz_logs.py [--seconds 600] [--seed 1] [--corpus DIR]

libFuzzer, through atheris, changes made-up logs so that new branches of the readers are reached.
It searches for exceptions, answers that depend on the block size, numbers that are not valid
figures, time beyond a linear bound, and memory that grows. An input that breaks a promise is kept
in the folder `found` of the corpus and told; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.engines import log_formats
from paceline.files.documents import write_text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.engines.samples import NOISE, PREFIXES, SAMPLES, log_text, times_of  # noqa: E402

TARGET = ROOT / "benchmarks" / "_fuzz_target.py"
RESULT = ROOT / "benchmarks" / "results" / "fuzz_logs.json"
MAX_GROWTH_BYTES = 8 << 20
MAX_FINDINGS = 10
LONGEST_INPUT = 6000
WORD = re.compile(rb"[A-Za-z][A-Za-z_/-]{3,30}|[=:|,\[\]{}'\"]{1,2}")


def write_seeds(corpus: Path) -> None:
    """Short logs of every log format, for its own reader and for the whole way."""
    for at, name in enumerate(log_formats()):
        text = log_text(name, times_of(3))[:LONGEST_INPUT]
        (corpus / f"seed-{name}-file").write_bytes(b"\xff" + text)
        (corpus / f"seed-{name}-packed").write_bytes(b"\xfe" + text)
        for number, prefix in enumerate(PREFIXES[:3]):
            text = log_text(name, times_of(3, number), prefix)[:LONGEST_INPUT]
            (corpus / f"seed-{name}-{number}").write_bytes(bytes([at]) + text)


def write_dictionary(path: Path) -> None:
    """Words that the fuzzer may insert: marks, field names, odd numbers."""
    words = {
        b"nan",
        b"inf",
        b"-1",
        b"1e308",
        b"1e-308",
        b"9" * 20,
        b"\r\n",
        b"\x1b[0m",
        *PREFIXES[1:],
    }
    for name, kind in log_formats().items():
        words |= {*kind.marks, *WORD.findall(SAMPLES[name].line(12, 3.5) + SAMPLES[name].head)}
    words |= {word for line in NOISE for word in WORD.findall(line)}
    lines = ("".join(f"\\x{byte:02x}" for byte in word) for word in sorted(words))
    path.write_text("".join(f'"{line}"\n' for line in lines))


def fuzz(work: Path, corpus: Path, seconds: int, seed: int) -> dict[str, Any]:
    """One run of the fuzzer, to the end of its time or to the first broken promise."""
    statistics = work / "statistics.json"
    statistics.unlink(missing_ok=True)
    result = subprocess.run(
        [
            sys.executable,
            str(TARGET),
            str(statistics),
            str(corpus),
            f"-max_total_time={seconds}",
            f"-seed={seed}",
            f"-max_len={LONGEST_INPUT}",
            f"-dict={work / 'words'}",
            "-timeout=30",
            "-rss_limit_mb=4096",
            f"-artifact_prefix={work / 'found'}/",
        ],
        capture_output=True,
        text=True,
        errors="replace",
        cwd=work,
    )
    counts = json.loads(statistics.read_text()) if statistics.exists() else {}
    coverage = re.findall(r"cov: (\d+) ft: (\d+)", result.stderr)
    return {
        "executions": counts.get("executions", 0),
        "branches": int(coverage[-1][0]) if coverage else 0,
        "features": int(coverage[-1][1]) if coverage else 0,
        "finding": _finding(result.stdout + result.stderr) if result.returncode else None,
    }


def _finding(text: str) -> str:
    """Return the reader, the exception, and the last line of Paceline's code in its traceback."""
    readers = re.findall(r"^read by (\w+)$", text, re.MULTILINE)
    errors = re.findall(r"^(?:[\w.]*(?:Error|Exception|Warning)\b|SUMMARY).*$", text, re.MULTILINE)
    places = re.findall(r'File ".*?(paceline/[\w/]+\.py)", line (\d+)', text)
    parts = [*readers[:1], *errors[:1], ":".join(places[-1]) if places else ""]
    return "; ".join(part[:300] for part in parts if part) or text[-300:]


def replay(corpus: Path) -> dict[str, Any]:
    """All inputs once more without instrumentation: their speed, and whether memory grows."""
    command = [sys.executable, str(TARGET), "--replay", str(corpus)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def campaign(work: Path, corpus: Path, seconds: int, seed: int) -> dict[str, Any]:
    """Fuzzer runs until the time is over, another one after each finding."""
    (work / "found").mkdir(exist_ok=True)
    write_dictionary(work / "words")
    runs: list[dict[str, Any]] = []
    end = time.monotonic() + seconds
    while (seconds_left := int(end - time.monotonic())) > 5 and len(runs) <= MAX_FINDINGS:
        runs.append(fuzz(work, corpus, seconds_left, seed + len(runs)))
        print(
            "{executions:,} inputs, {branches} branches, finding: {finding}".format_map(runs[-1]),
            flush=True,
        )
    findings = [run["finding"] for run in runs if run["finding"]]
    return {
        "executions": sum(run["executions"] for run in runs),
        "branches": max((run["branches"] for run in runs), default=0),
        "features": max((run["features"] for run in runs), default=0),
        "findings": findings,
        "replay": replay(corpus) if not findings else None,
    }


def main() -> int:
    """Store what was done; 1 when a promise was broken or memory grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--corpus", type=Path, default=None, help="Folder of inputs, kept between runs."
    )
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        corpus = options.corpus or work / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        write_seeds(corpus)
        outcome = campaign(work, corpus, options.seconds, options.seed)
        if options.corpus and outcome["findings"]:
            shutil.copytree(work / "found", options.corpus.with_name("found"), dirs_exist_ok=True)
    result = {
        "benchmark": "fuzz_logs",
        "seconds": options.seconds,
        "seed": options.seed,
        "atheris": version("atheris"),
        "python": platform.python_version(),
        "log formats": list(log_formats()),
        **outcome,
    }
    write_text(options.result, json.dumps(result, indent=2) + "\n")
    return int(bool(outcome["findings"]) or _grew(outcome["replay"]))


def _grew(replay: dict[str, Any]) -> bool:
    growth_bytes = (
        replay["resident_bytes_after_last_pass"] - replay["resident_bytes_after_first_pass"]
    )
    print(
        f"{replay['inputs']:,} inputs replayed: {growth_bytes / 1024:+,.0f} KiB of memory from "
        f"pass 1 to {replay['passes']}; the slowest takes {replay['slowest_s'] * 1000:.0f} ms, "
        f"repeated to {replay['enlarged_bytes'] >> 10} KiB "
        f"{replay['slowest_enlarged_s'] * 1000:.0f} ms"
    )
    return growth_bytes > MAX_GROWTH_BYTES


if __name__ == "__main__":
    sys.exit(main())
