"""Text to Megatron's indexed data sets: Paceline against the loop of Megatron's preprocessing.

    python benchmarks/tokenization.py --python ENVIRONMENT/bin/python [--pairs 5] [--megabytes 40]

Both read the same jsonl (sources of the interpreter), use the same tokenizer.json (byte-level BPE,
8192 tokens, trained on them) and the same number of worker processes on the same cores, and end
when both files are on the disk. Megatron's side is a pool of workers that encode a record each and
one writer, its own IndexedDatasetBuilder, as in its tools/preprocess_data.py; `--python` names an
interpreter that has megatron-core and tokenizers (`paceline recipes engines install megatron`).
Sides run in turn (A B A B ...); a pair's ratio is taken inside the pair, and starting Python and
importing count for neither, but the start of the workers does. Processor seconds (all processes of
a side) hold where other programs use the cores too. The files of both sides must be equal byte by
byte.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.staging.conversions import stdlib_corpus
from paceline.staging.conversions.indexed import files_of
from paceline.staging.conversions.tokenization import tokenization, tokenize
from paceline.trainer.data.indexed_corpus import read_indexed

HERE = Path(__file__).parent
VOCABULARY = 8192


def records(megabytes: int) -> Iterator[str]:
    """Lines of jsonl, the sources again and again."""
    remaining = megabytes * 10**6
    texts = [text for _, text in stdlib_corpus.sources()]
    while remaining > 0:
        for text in texts:
            yield json.dumps({"text": text}) + "\n"
            remaining -= len(text)
            if remaining <= 0:
                return


def ours(folder: Path, workers: int) -> tuple[float, float]:
    """(seconds, processor seconds) of Paceline's side."""
    how = tokenization(folder / "tokenizer.json")
    begin, used = time.perf_counter(), processor_s()
    tokenize([folder / "text.jsonl"], folder / "ours", how, workers=workers)
    return time.perf_counter() - begin, processor_s() - used


def processor_s() -> float:
    """Seconds that this process and those it waited for have computed."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def megatrons(folder: Path, workers: int, python: str) -> tuple[float, float]:
    """(seconds, processor seconds) of Megatron's side."""
    result = subprocess.run(
        [python, "-W", "ignore", str(HERE / "_megatron_tokens.py"), str(folder), str(workers)],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, used = result.stdout.splitlines()[-1].split()
    return float(seconds), float(used)


def measure(pairs: int, megabytes: int, python: str) -> dict[str, Any]:
    """Seconds of both sides and their ratios."""
    # Imported here, because a worker imports this file's head too.
    from _result import spread_of

    from paceline.machines.probe.inventory import usable_cores

    workers = usable_cores()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stdlib_corpus.make_tokenizer(folder, vocab_size=VOCABULARY)
        (folder / "text.jsonl").write_text("".join(records(megabytes)))
        sides: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for _ in range(pairs):
            sides.append((ours(folder, workers), megatrons(folder, workers, python)))
            print(f"paceline, megatron (seconds, processor seconds): {sides[-1]}", flush=True)
        for mine, theirs in zip(
            files_of(folder / "ours"), files_of(folder / "theirs"), strict=True
        ):
            assert mine.read_bytes() == theirs.read_bytes(), f"{mine.name} differs"
        return {
            "workers": workers,
            "text_bytes": (folder / "text.jsonl").stat().st_size,
            "tokens": len(read_indexed(str(folder / "ours")).tokens),
            "vocabulary": VOCABULARY,
            **{
                name: {
                    "paceline": spread_of([mine[at] for mine, _ in sides]),
                    "megatron": spread_of([theirs[at] for _, theirs in sides]),
                    "megatron_over_paceline": spread_of([t[at] / m[at] for m, t in sides]),
                }
                for at, name in enumerate(("seconds", "processor_seconds"))
            },
            "files_are_equal": True,
        }


def main() -> None:
    """Measure, write the result, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=40)
    options = parser.parse_args()
    from _result import Surroundings, keep, spread_text

    around = Surroundings()
    result = measure(options.pairs, options.megabytes, options.python)
    keep("tokenization", "s", around, **result)
    for name in ("seconds", "processor_seconds"):
        print(
            f"megatron / paceline: {spread_text(result[name]['megatron_over_paceline'], 2)} {name}"
        )


if __name__ == "__main__":
    main()
