"""Inputs of all kinds that others make, changed at random: does anything fall, hang or grow?

    python benchmarks/fuzz.py [--inputs 1000000] [--seed 1] [--kinds fields slurm]
    python benchmarks/fuzz.py --replay "log formats" 4711 [--seed 1]

Run folders with a hostile field (all verbs read them), logs of every format and of none, recipes,
CSV tables and what Slurm's commands print. A fall is any exception but a clear error, an answer
that breaks a promise of tests/engines, or an input that takes longer than a limit. The exit code is
then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from _result import FOLDER, Surroundings, keep

from paceline.core import stats
from paceline.core.errors import PacelineError
from paceline.engines import log_formats
from paceline.files.csv_table import TableDefaults, read_csv
from paceline.files.recipe import load_recipe, recipe_names
from paceline.machines.slurm import states, steps
from tests.attacks.fields import VERBS, Folders, changes
from tests.engines.generic_inputs import check_generic, random_log
from tests.engines.promises import check_read
from tests.engines.samples import log_text, times_of
from tests.machines.slurm.test_states import SACCT, SINFO, SQUEUE, SRUN

LIMIT_S, HANG_S = 20, 600
"""Limits for one input in seconds: of processor time (the slowest kind takes 0.1 s), and of wall
time, which other load extends."""
TOO_LONG = "takes longer than"
SHARES = {
    "fields": 0.02,
    "log formats": 0.28,
    "generic logs": 0.10,
    "recipes": 0.05,
    "tables": 0.25,
    "slurm": 0.40,
}
TABLES = Path(__file__).parents[1] / "tests" / "forms" / "inputs"
PIECES = (
    *(b"9" * 24, b"1e308", b"-1", b"nan", b"inf", b"", b"\x00", b"\xff\xfe", b"\x1b[0m", b"|"),
    *(b"\n", b"\r", b",", b'"', b"'", b": ", b"- ", b"[" * 300, b"]", b"{", b"&a [*a]", b"true"),
    *(b"\xe2\x80\xae", b"\xed\xa0\x80", b"x" * 3000, b"0x1f", b"1_000", b"~", b"!!python/none x"),
)
Try = Callable[[], object]


def mutate(text: bytes, rng: random.Random) -> bytes:
    """`text` with one to six places overwritten, doubled or cut out."""
    content = bytearray(text)
    for _ in range(rng.randint(1, 6)):
        start = rng.randint(0, len(content))
        end = start + rng.choice((0, 1, 4, 12, 80))
        piece = rng.choice((rng.choice(PIECES), bytes(content[start:end]) * 2))
        content[start:end] = piece
    return bytes(content)


def of_fields(rng: random.Random, work: Path) -> Iterator[Try]:
    """Run folders with one hostile field, through all verbs."""
    folders, change_kinds = Folders(work / "runs"), changes()
    VERBS["page"](folders)  # what charts are drawn with is put together once a process
    verbs = ("list", "show", "compare", "history", "names")
    while True:
        change = rng.choice(change_kinds)
        page = ("page",) if rng.random() < 0.05 else ()
        yield lambda change=change, page=page: _no_falls(folders.read_with(change, *verbs, *page))


def of_log_formats(rng: random.Random, work: Path) -> Iterator[Try]:
    """Logs of every log format, read in pieces of several sizes."""
    texts = {name: log_text(name, times_of(3)) for name in log_formats()}
    while True:
        name = rng.choice(sorted(texts))
        content = mutate(texts[name], rng)
        yield lambda name=name, content=content: _check_log_format(name, content)


def _check_log_format(name: str, content: bytes) -> None:
    try:
        check_read(log_formats()[name], content)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def of_generic_logs(rng: random.Random, work: Path) -> Iterator[Try]:
    """Logs of no known format: every figure must name its column."""
    while True:
        content = random_log(rng)
        yield lambda content=content: check_generic(content)


def of_recipes(rng: random.Random, work: Path) -> Iterator[Try]:
    """The recipes that come with Paceline."""
    folder = resources.files("paceline.files") / "recipes"
    texts = [(folder / f"{name}.yaml").read_bytes() for name in recipe_names()]
    path = work / "recipe.yaml"
    while True:
        path.write_bytes(mutate(rng.choice(texts), rng))
        yield lambda: load_recipe(str(path))


def of_tables(rng: random.Random, work: Path) -> Iterator[Try]:
    """Tables of measurements."""
    texts = [(TABLES / f"{name}.csv").read_bytes() for name in ("audit", "validate")]
    path = work / "table.csv"
    while True:
        path.write_bytes(mutate(rng.choice(texts), rng))
        yield lambda: read_csv(path, TableDefaults())


def of_slurm(rng: random.Random, work: Path) -> Iterator[Try]:
    """Return the output of squeue, sacct, sinfo and srun."""
    readers: list[tuple[str, Callable[[str], Any]]] = [
        (SQUEUE, _verdicts_of_queue),
        (SACCT, _verdicts_of_accounts),
        (SINFO, states.lost_nodes),
        (SINFO, states.unusable_nodes),
        (SRUN, states.failed_nodes),
        (SRUN, steps.cancellation),
    ]
    while True:
        text, reader = rng.choice(readers)
        printed = mutate(text.encode(), rng).decode(errors="replace")
        yield lambda reader=reader, printed=printed: reader(printed)


KINDS = {
    "fields": of_fields,
    "log formats": of_log_formats,
    "generic logs": of_generic_logs,
    "recipes": of_recipes,
    "tables": of_tables,
    "slurm": of_slurm,
}


def campaign(kind: str, inputs: int, seed: int, work: Path) -> dict[str, Any]:
    """Try `inputs` inputs of one kind; return failures by cause, seconds, the slowest, peak memory.

    `first` is the number of the first input with a cause, which --replay brings again.
    """
    falls: Counter[str] = Counter()
    first: dict[str, int] = {}
    slowest, begin = 0.0, time.monotonic()
    attempts = KINDS[kind](random.Random(f"{kind} {seed}"), work)
    for number, attempt in zip(range(inputs), attempts, strict=False):
        before = time.monotonic()
        if cause := _cause(attempt):
            falls[cause] += 1
            first.setdefault(cause, number)
        slowest = max(slowest, time.monotonic() - before)
    return {
        "inputs": inputs,
        "falls": dict(falls.most_common()),
        "first": first,
        "seconds": time.monotonic() - begin,
        "slowest_s": slowest,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _cause(attempt: Try) -> str | None:
    """Return the failure and its place, or None for an answer or a clear error.

    The clock goes on while the campaign is stopped, so an input that took long without the
    processor is asked again.
    """
    before_s = time.process_time()
    cause = _run_attempt(attempt)
    if cause and TOO_LONG in cause and time.process_time() - before_s < LIMIT_S:
        return _run_attempt(attempt)
    return cause


def _run_attempt(attempt: Try) -> str | None:
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.alarm(HANG_S)
    try:
        with contextlib.suppress(PacelineError):
            attempt()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "paceline" in f.filename]
        return f"{places[-1] if places else ''} {type(error).__name__}: {error}"[:200]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return None


def _verdicts_of_queue(text: str) -> list[object]:
    return [states.verdict_of(job) for job in states.parse_squeue(text).values()]


def _verdicts_of_accounts(text: str) -> list[object]:
    return [states.verdict_of(job) for job in states.parse_sacct(text).values()]


def _no_falls(falls: list[str]) -> None:
    if falls:
        raise AssertionError(falls[0])


def _too_long(*_: object) -> None:
    raise TimeoutError(f"{TOO_LONG} {LIMIT_S} s of the processor, or {HANG_S} s")


def main() -> int:
    """Store what was done; 1 when something fell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--replay", nargs=2, metavar=("KIND", "NUMBER"))
    options = parser.parse_args()
    if options.replay:
        return replay(options.replay[0], int(options.replay[1]), options.seed)
    around = Surroundings()
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _too_long)
    stats.BOOTSTRAP_RESAMPLES = 10  # its intervals do not matter here, and take most of the time
    kinds = _stored_kinds(options.inputs, options.seed)
    with tempfile.TemporaryDirectory() as name:
        for kind in options.kinds:
            inputs = round(options.inputs * SHARES[kind])
            outcome = kinds[kind] = campaign(kind, inputs, options.seed, Path(name))
            print(
                f"{kind}: {outcome['inputs']:,} inputs in {outcome['seconds']:.0f} s, the slowest "
                f"{outcome['slowest_s']:.2f} s, {sum(outcome['falls'].values())} falls"
            )
            for cause, count in outcome["falls"].items():
                print(f"  {count} x {cause}")
    kinds = {kind: kinds[kind] for kind in SHARES if kind in kinds}
    falls = sum(sum(outcome["falls"].values()) for outcome in kinds.values())
    inputs = sum(outcome["inputs"] for outcome in kinds.values())
    keep(
        "fuzz",
        "inputs",
        around,
        asked=options.inputs,
        seed=options.seed,
        inputs=inputs,
        falls=falls,
        kinds=kinds,
    )
    return int(falls > 0)


def replay(kind: str, number: int, seed: int) -> int:
    """Bring one input again, with its traceback."""
    with tempfile.TemporaryDirectory() as name:
        attempts = KINDS[kind](random.Random(f"{kind} {seed}"), Path(name))
        next(islice(attempts, number, None))()
    return 0


def _stored_kinds(inputs: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return the results of an earlier call of the same campaign; kinds may run one by one."""
    try:
        content = json.loads((FOLDER / "fuzz.json").read_text())
    except FileNotFoundError:
        return {}
    same = (content["asked"], content["seed"]) == (inputs, seed)
    return content["kinds"] if same else {}


if __name__ == "__main__":
    sys.exit(main())
