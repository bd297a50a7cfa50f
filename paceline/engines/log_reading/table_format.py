"""Log formats as data: a YAML file with the pattern of a step line and its fields.

    title: MMEngine
    source: runner/loops.py and hooks/logger_hook.py of open-mmlab/mmengine, v0.10
    mark: Iter(train)
    line: 'Iter\\(train\\) +\\[ *{step}/ *{total_steps}\\]'
    fields: [' time: {step_time_s}', ' loss: {loss}', ' memory: {reserved_mib:count}']
    example: 'Iter(train) [  10/1000] ... time: 2.7510 ... loss: 1.3000'

Patterns are regular expressions. A placeholder `{NAME}` stands for a number, whose name gives its
meaning and unit; `{NAME:KIND}` for another way to print it. Without `{step}` in `line`, the lines
are counted from 1. `table_reader` reads logs by these tables.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from re import _parser as re_parser  # type: ignore[attr-defined]
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, StringConstraints, model_validator

from paceline.core.errors import did_you_mean
from paceline.core.units import GIB, MIB, TERA
from paceline.core.value import PositiveInt, Value
from paceline.engines.log_reading.log_content import FACT_NAMES, Fact
from paceline.files.user_file import settings_folder
from paceline.files.yaml_file import read_model, read_shipped

GIGA = 1e9
MEMORY: dict[str, tuple[str, float]] = {
    f"{kind}_{unit}": (f"{kind}_bytes", factor)
    for kind in ("allocated", "reserved", "used")
    for unit, factor in {"bytes": 1.0, "mb": 1e6, "mib": MIB, "gb": GIGA, "gib": GIB}.items()
}
FACTORS: dict[str, tuple[str, float]] = {
    "step_time_s": ("step_time_s", 1.0),
    "step_time_ms": ("step_time_s", 1e-3),
    "step_time_us": ("step_time_s", 1e-6),
    "forward_ms": ("forward", 1e-3),
    "backward_ms": ("backward", 1e-3),
    "optimizer_ms": ("optimizer", 1e-3),
    "steps_per_s": ("steps_per_s", 1.0),
    "micro_step_ms": ("micro_step_s", 1e-3),
    "interval_s": ("interval_s", 1.0),
    "elapsed_s": ("elapsed_s", 1.0),
    "elapsed_ms": ("elapsed_s", 1e-3),
    "elapsed_min": ("elapsed_s", 60.0),
    "timestamp": ("timestamp", 1.0),
    "loss": ("loss", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "tokens": ("tokens", 1.0),
    "total_tokens": ("total_tokens", 1.0),
    "total_giga_tokens": ("total_tokens", GIGA),
    "total_samples": ("total_samples", 1.0),
    "global_batch": ("global_batch", 1.0),
    "samples_per_s": ("samples_per_s", 1.0),
    "tokens_per_s": ("tokens_per_s", 1.0),
    "tokens_per_s_per_device": ("tokens_per_s_per_device", 1.0),
    "tokens_per_s_per_rank": ("tokens_per_s_per_rank", 1.0),
    "mean_tokens_per_s": ("mean_tokens_per_s", 1.0),
    "rolling_tokens_per_s": ("rolling_tokens_per_s", 1.0),
    "tflops_per_device": ("flops_per_s_per_device", TERA),
    "mfu": ("mfu", 1.0),
    "mfu_percent": ("mfu", 0.01),
    **{name: target for name, target in MEMORY.items() if not name.startswith("used")},
}
"""Fields of a step line: the column of each, and the factor to its base unit.

`interval_s` is the time since the line before, and `micro_step_ms` that of one forward and backward
pass, of which `micro_step` counts all. A line with the `position` of the line before repeats it.
`tokens_per_s_per_rank` is of a data-parallel rank, `mean_tokens_per_s` the mean since the start,
and `rolling_tokens_per_s` that of the last steps.
"""
SETTINGS = {
    "tokens": "tokens of each later step over all devices",
    "batch_tokens": "tokens of a step over all devices, a multiple of `seq_len`",
    "micro_batch_tokens": "tokens of a micro-batch over all devices",
    "last_device": "index of the last device of the only node, from 0",
    "dp": "data-parallel size; with it, all axes multiply to the number of devices",
    "part": "name of a part of a step, before its `part_mfu`",
    "part_mfu": "MFU of a part of a step, which is a mistake above 1",
    "peak_flops": "FLOP/s per device that the printed MFU is relative to",
}
"""Settings in addition to FACT_NAMES and MEMORY, from which facts are computed."""
TEXTS = ("dtype", "device", "model", "framework_version", "part")
"""Settings that are text; all others are whole numbers."""
_NUMBER = rb"-?(?:nan|NaN|inf|Infinity)|[-+0-9.eE]{1,24}"
KINDS: dict[str, bytes] = {
    "number": rb"(" + _NUMBER + rb")",
    "count": rb"(-?[0-9][0-9,]{0,23}(?:\.[0-9]{1,12})?)",
    "suffix": rb"(-?(?:nan|inf)|[-+0-9.]{1,24}(?:[eE][-+]?\d{1,3})?[KMBGTPE]?)",
    "clock": rb"((?:\d{1,5} days?, )?(?:\d{1,4}:)?\d{1,2}:\d{2})",
    "date": rb"(\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)",
    "text": rb"([^\s,|'\"]{1,80})",
    "line": rb"([^|\r\n]{1,80}?)",
}
"""Ways to print a value: 1.5e-3; 12,000; 131.07K; 01:02:03; 2026-01-31 12:00:00; a word; words up
to what follows in the pattern."""
QUANTITY_KINDS = ("number", "count", "suffix", "clock")
COUNTER_KINDS = ("number", "count")
DATE_KINDS = ("date", "clock", "number")
RATES = ("samples_per_s", "steps_per_s", "tokens_per_s")
"""Rates of the whole run, over all devices."""
PLACEHOLDER = re.compile(r"\{([a-z_]+)(?::([a-z]+))?\}")
COUNTERS = ("step", "micro_step", "position", "total_steps")
MAX_REPEATS, MAX_WIDE_REPEATS = 256, 2
"""Repetitions from which on one counts as unlimited, and the number of these in a pattern."""
BROAD_SET = r"\[\((?:ANY|NOT_LITERAL|IN, \[\((?:NEGATE|CATEGORY, CATEGORY_NOT))"
"""Parsed set that most characters belong to, such as `.` or `[^|]`."""
_TIMED = {
    *("step_time_s", "step_time_ms", "step_time_us", "forward_ms", "steps_per_s", "samples_per_s"),
    *("tokens_per_s", "tokens_per_s_per_device", "elapsed_s", "elapsed_ms", "elapsed_min"),
    *("interval_s", "micro_step_ms", "timestamp"),
}
"""Fields from which a step time follows."""


def _pattern(text: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            expression, _ = compile_pattern(text, "capture")
            compile_pattern(text, "plain")  # fails for a reference to a placeholder
    except FutureWarning as error:
        what = str(error).partition(" at position")[0].lower()
        raise ValueError(
            f"{text!r} is ambiguous ({what}): in [...], write \\[ for [, and once each of - & | ~"
        ) from error
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    items: Any = re_parser.parse(expression.pattern, re.MULTILINE)  # type: ignore[attr-defined]
    if fault := _unbounded_time(items):
        raise ValueError(f"{text!r} can take unlimited time on a long line: {fault}")
    if expression.match(b""):
        raise ValueError(f"{text!r} matches an empty line")
    if expression.groups != len(placeholders(text)):
        raise ValueError(f"{text!r} has groups of its own; write (?:...)")
    return text


def _unbounded_time(pattern: Any) -> str | None:
    """Return what makes a parsed pattern try too many ways to match a line, or None.

    Repetitions of repetitions or of alternatives take exponential time on a line that does not
    match, and n repetitions in sequence the n-th power of its length.
    """
    num_wide = 0

    def fault_in(items: Any, inside: bool) -> str | None:
        nonlocal num_wide
        for operation, value in items:
            name, parts, repeats = str(operation), [], inside
            if name in ("MAX_REPEAT", "MIN_REPEAT"):
                low, high, body = value
                if inside and low != high:
                    return "it repeats a repetition; write e.g. [^|]* in place of (?:a+)*"
                is_wide = int(high) > MAX_REPEATS
                num_wide += is_wide and bool(re.match(BROAD_SET, str(body)))
                parts, repeats = [body], inside or is_wide
            elif name == "BRANCH":
                if inside:
                    return "it repeats alternatives; write them once, or as [ab]*"
                parts = value[1]
            elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
                parts = [value[-1]]
            for part in parts:
                if fault := fault_in(part, repeats):
                    return fault
        return None

    fault = fault_in(pattern, False)
    if fault is None and num_wide > MAX_WIDE_REPEATS:
        fault = (
            f"more than {MAX_WIDE_REPEATS} repetitions such as .* without a limit; write .{{0,40}}"
        )
    return fault


def _tuple_of(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Pattern = Annotated[str, AfterValidator(_pattern)]
Mark = Annotated[str, StringConstraints(min_length=4)]


class FormatTable(Value):
    """Log format as a user's file declares it."""

    title: Annotated[str, StringConstraints(min_length=1)]
    """Name of the program that writes the log."""
    source: str = ""
    """Part of the program that prints the line, and its versions."""
    mark: Annotated[tuple[Mark, ...], BeforeValidator(_tuple_of)]
    """Text that every step line contains, or texts of which it contains one. It is searched first,
    which is fast."""
    line: Pattern
    """Pattern of a step line or of its start."""
    recognition: Pattern | None = None
    """Pattern that only logs of this program have; by default `line` with a time or rate."""
    fields: tuple[Pattern, ...] = ()
    """Patterns of further values in the rest of the line, with one placeholder each. If several
    have the same placeholder, the first that a line has counts."""
    settings: tuple[Pattern, ...] = ()
    """Patterns of settings anywhere in the log."""
    flags: dict[Mark, dict[str, Fact]] = {}
    """Settings that follow from a text anywhere in the log."""
    figures: tuple[Pattern, ...] = ()
    """Patterns of rates of the whole run, with one placeholder each."""
    evaluation: Pattern | None = None
    """Pattern in the line of an evaluation, whose time the next step line includes. It is
    subtracted from `interval_s` if the pattern has `{evaluation_s}`; else that line has no time."""
    several_lines: bool = False
    """True if the fields of a step are on the lines up to the next step."""
    numbering: Literal["from 0", "from 1"] = "from 1"
    steps_per_line: PositiveInt | None = None
    """Steps over which a line averages; by default the distance of the step numbers."""
    digits: PositiveInt | None = None
    """Significant digits of printed numbers, if trailing zeros are omitted."""
    end_marker: str | None = None
    """Text of the line with which the program reports its end."""
    always_ends: bool = False
    """True if a log without `end_marker` is incomplete."""
    convention: str | None = None
    """FLOPs convention of printed FLOP/s."""
    notes: dict[str, str] = {}
    """Sentences for the reader of a log that has these fields."""
    example: Annotated[str, StringConstraints(min_length=1)]
    """Example of a step line."""

    @model_validator(mode="after")
    def _check_placeholders(self) -> FormatTable:
        settings = {*FACT_NAMES, *MEMORY, *SETTINGS}
        names = [name for text in (self.line, *self.fields) for name in placeholders(text)]
        for part, texts, allowed in (
            ("line: ", (self.line,), {*FACTORS, *COUNTERS}),
            ("fields: ", self.fields, set(FACTORS)),
            ("recognition: ", (self.recognition or "",), set[str]()),
            ("settings: ", self.settings, settings),
            ("figures: ", self.figures, set(RATES)),
            ("evaluation: ", (self.evaluation or "",), {"evaluation_s"}),
        ):
            for name, kind in (pair for text in texts for pair in PLACEHOLDER.findall(text)):
                if name not in allowed:
                    choices = ", ".join(sorted(allowed)) or "none"
                    hint = did_you_mean(name, sorted(allowed)) or f"allowed: {choices}"
                    raise ValueError(f"{part}{{{name}}} is unknown; {hint}")
                if kind and kind not in (kinds := _kinds_of(name)):
                    raise ValueError(f"{part}{{{name}:{kind}}}: allowed kinds: {', '.join(kinds)}")
        for text in (*self.fields, *self.figures):
            if len(placeholders(text)) != 1:
                raise ValueError(f"{text!r} must have one placeholder")
        for text in self.settings:
            if not placeholders(text):
                raise ValueError(f"{text!r} must have a placeholder")
        for facts in self.flags.values():
            if unknown := facts.keys() - FACT_NAMES.keys():
                raise ValueError(
                    f"flags: {min(unknown)} is unknown; allowed: {', '.join(FACT_NAMES)}"
                )
        if unknown := self.notes.keys() - set(names):
            raise ValueError(f"notes: {min(unknown)} is not a field; allowed: {', '.join(names)}")
        return self

    @property
    def timed_fields(self) -> list[str]:
        """Patterns of the fields from which a step time follows."""
        return [text for text in self.fields if is_timed(placeholders(text))]


def is_timed(names: Iterable[str]) -> bool:
    """Return whether a step time follows from one of the fields."""
    return not _TIMED.isdisjoint(names)


def placeholders(text: str) -> list[str]:
    """Return the names of the values in a pattern."""
    return [name for name, _ in PLACEHOLDER.findall(text)]


def compile_pattern(
    text: str, groups: Literal["capture", "plain"] = "capture"
) -> tuple[re.Pattern[bytes], list[str]]:
    """Return a pattern with its placeholders filled in, and the kinds of their values.

    `plain` patterns have no groups. Raises re.error and ValueError.
    """
    kinds: list[str] = []

    def fill(match: re.Match[str]) -> str:
        name, kind = match[1], match[2] or _default_kind(match[1])
        if kind not in KINDS:
            raise ValueError(f"{{{name}:{kind}}}: allowed kinds: {', '.join(KINDS)}")
        kinds.append(kind)
        is_counter = name in COUNTERS and kind == "number"
        value = rb"(\d{1,18})" if is_counter else KINDS[kind]
        return (value if groups == "capture" else b"(?:" + value[1:]).decode()

    return re.compile(PLACEHOLDER.sub(fill, text).encode(), re.MULTILINE), kinds


def _default_kind(name: str) -> str:
    return _kinds_of(name)[0] if name not in TEXTS else "text"


def _kinds_of(name: str) -> tuple[str, ...]:
    """Return the ways in which a value may be printed, the default first."""
    if name == "timestamp":
        return DATE_KINDS
    if name in COUNTERS:
        return COUNTER_KINDS
    return tuple(KINDS) if name in TEXTS else QUANTITY_KINDS


def shipped_tables() -> dict[str, FormatTable]:
    """Return the tables of this package by name."""
    files = resources.files("paceline.files") / "log_formats"
    return {
        file.name.removesuffix(".yaml"): FormatTable.model_validate(read_shipped(file))
        for file in files.iterdir()
        if file.name.endswith(".yaml")
    }


def read_table(path: Path) -> FormatTable:
    """Return the table in a user's file; raise UserError with the line for an invalid one."""
    return read_model(FormatTable, path)[0]


def user_tables_folder() -> Path:
    """Return the folder whose tables are known by their names, like those of this package."""
    return settings_folder() / "log_formats"


def is_table_path(name: str) -> bool:
    """Return whether the name of a log format is the path of a file with a table."""
    return Path(name).suffix in (".yaml", ".yml")
