"""Recipes as runs of Megatron-LM and Megatron-DeepSpeed, and command lines as settings.

Iteration records as the Megatron family prints them, made up field by field.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.engines.log_reading.log_content import LogContent, LogFormat
from paceline.files import catalog
from paceline.files.recipe import load_recipe, resolve

Settings = dict[str, tuple[str, ...]]
CHECKOUT = 'engine_settings.checkout="/code/megatron"'


def study(
    folder: Path,
    *changes: str,
    variant: str | None = None,
    name: str = "megatron_deepspeed",
    recipe: str = "gpt-1b3",
) -> RunSpec:
    """The 1.3B study on two nodes of its cluster, with an indexed data set in `folder`."""
    data = folder / "pile_text_document.bin"
    data.touch()
    tokens = ("data.source=tokens", f"data.path={data}")
    overrides = (f"engine={name}", CHECKOUT, *tokens, *changes)
    cluster = catalog.cluster("jean-zay-v100-32g")
    return resolve(load_recipe(recipe, variant, overrides), cluster, False, variant)


def settings(words: Sequence[str]) -> Settings:
    """Options of a command line with their values; raises AssertionError for one given twice."""
    told: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in told, word
            told[word] = []
        else:
            told[list(told)[-1]].append(word)
    return {name: tuple(values) for name, values in told.items()}


def started(spec: RunSpec) -> Settings:
    """The options with which the engine of `spec` starts pretrain_gpt.py."""
    assert engine(spec.engine).unsupported(spec) == []
    program = engine(spec.engine).job(spec, spec.recipe).program
    return settings(program[program.index("pretrain_gpt.py") + 1 :])


def same(one: Settings, other: Settings) -> bool:
    """Whether two sets of options mean the same; numbers are compared as numbers."""
    return _numbers(one) == _numbers(other)


def _numbers(told: Settings) -> dict[str, tuple[object, ...]]:
    return {name: tuple(map(_number, values)) for name, values in told.items()}


def _number(word: str) -> object:
    try:
        return float(word)
    except ValueError:
        return word


FIELDS = {
    "consumed samples": "        1024",
    "elapsed time per iteration (ms)": "1250.5",
    "learning rate": "2.093023E-06",
    "global batch size": "  128",
    "lm loss": "8.995420E+00",
    "loss scale": "1.0",
    "grad norm": "6.042",
    "number of skipped iterations": "  0",
    "number of nan iterations": "  0",
}
MS, S = "elapsed time per iteration (ms)", "elapsed time per iteration (s)"


def fields(changed: dict[str, str | None]) -> dict[str, str]:
    """FIELDS with other values; those of None are not printed, new ones come last."""
    return {name: value for name, value in (FIELDS | changed).items() if value is not None}


def record(number: int, changed: dict[str, str | None] | None = None, before: str = " ") -> bytes:
    """One iteration's line with these fields changed."""
    printed = "".join(f" {name}: {value} |" for name, value in fields(changed or {}).items())
    return f"{before}iteration {number:8d}/     500 |{printed}\n".encode()


def records(times_ms: Sequence[float], first: int = 1) -> bytes:
    """Lines of iterations that took these times."""
    return b"".join(
        record(number, {MS: f"{time:.1f}"}) for number, time in enumerate(times_ms, first)
    )


def read(kind: LogFormat, *blocks: bytes) -> LogContent:
    """What the log format reads of these blocks."""
    log = LogContent()
    kind.read(blocks, log)
    return log


def column(log: LogContent, name: str) -> list[float | None]:
    """A column as plain numbers with the digits of 32 bit; None where nothing is said."""
    return [
        None if np.isnan(value) else float(f"{value:.7g}") for value in log.steps()[name].tolist()
    ]
