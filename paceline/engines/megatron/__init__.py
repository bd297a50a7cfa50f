"""Megatron-LM: pretrain_gpt.py of a checkout, or a Megatron-Core program; log format."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.engines.launch.accepted_options import rejected_options
from paceline.engines.launch.environments import interpreter, not_installed
from paceline.engines.launch.extra_settings import extra_arguments
from paceline.engines.launch.programs import launch, program_file, windows_program
from paceline.engines.log_reading.iteration_log import IterationLog
from paceline.engines.log_reading.log_content import LogContent, LogFormat
from paceline.engines.megatron import lm_arguments
from paceline.engines.megatron.arguments import REPLACEABLE, Arguments, words
from paceline.engines.megatron.support import SUPPORT as SUPPORT
from paceline.engines.megatron.support import unsupported as unsupported_fields
from paceline.engines.support import TestedProgram

REQUIREMENTS = ("megatron-core==0.16.1",)
IMPORTS = ("torch", "megatron.core", "numpy")

ENTRY = "pretrain_gpt.py"
PARSERS = ("megatron/training/arguments.py", "megatron/arguments.py")
PACKAGE = "paceline.engines.megatron"
PROGRAM = "core_program.py"
PROGRAM_FILES = (
    PROGRAM,
    "core_arguments_program.py",
    "core_model_program.py",
)
TESTED_PROGRAMS = (
    TestedProgram("Megatron-Core 0.16.1", "TP 2, PP 2, DP 2, ramp-up"),
    TestedProgram("Megatron-LM d98e8a6 (0.20)", "TP 2, PP 2, ramp-up"),
)


def unsupported(spec: RunSpec) -> list[str]:
    """Return what Megatron-LM or Paceline's program cannot do of `spec`, one sentence each."""
    problems, checkout = unsupported_fields(spec), spec.engine_settings.get("checkout")
    if problems or checkout is None:
        return problems
    argv = [*words(_arguments(spec)), *extra_arguments(spec)]
    files = [Path(str(checkout), name) for name in PARSERS]
    return [
        f"engine_settings.checkout {checkout} does not accept {option}; use a newer Megatron-LM"
        for option in rejected_options(argv, files)
    ]


def missing(spec: RunSpec) -> str | None:
    """Return a problem if Megatron-Core, or the checkout's program on this machine, is missing."""
    checkout = spec.engine_settings.get("checkout")
    if checkout is None:
        return not_installed(spec, IMPORTS)
    return missing_entry(spec, str(checkout))


def missing_entry(spec: RunSpec, checkout: str) -> str | None:
    """Return a problem if the program starts on this machine and has no pretrain_gpt.py."""
    if not spec.cluster.runs_here or (Path(checkout) / ENTRY).is_file():
        return None
    return (
        f"{Path(checkout) / ENTRY} does not exist; set engine_settings.checkout to the folder of a "
        "checkout"
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return the arguments by name; a switch is true."""
    return readable(_arguments(spec))


def readable(arguments: Arguments) -> dict[str, Any]:
    """Return arguments in JSON form: a value, a list of values, or true for a switch."""
    return {
        name: (values[0] if len(values) == 1 else list(values)) if values else True
        for name, values in arguments.items()
    }


def job(spec: RunSpec, name: str) -> Job:
    """Return the Job with one process per device, in the checkout's folder if there is one."""
    checkout = spec.engine_settings.get("checkout")
    entry = PROGRAM if checkout is None else ENTRY
    files = windows_program()
    for file in PROGRAM_FILES:
        files |= program_file(PACKAGE, file)
    return launch(
        spec,
        name,
        ["{python}", "-u", entry, *words(_arguments(spec))],
        python=interpreter(spec),
        env=lm_arguments.environment(spec),
        files=files if checkout is None else {},
        folder=None if checkout is None else Path(str(checkout)),
        replaceable=REPLACEABLE,
    )


def _arguments(spec: RunSpec) -> Arguments:
    arguments = lm_arguments.arguments(spec)
    if spec.data.source == "stdlib":
        arguments.pop("mock-data")
        arguments["text"] = ["stdlib"]
    return arguments


CAUSAL_SINCE = "2025-03-06"
"""Date since which Megatron-LM excludes the masked half of attention from FLOPs (core 0.12)."""

_DAY = re.compile(rb"\[(20\d\d-\d\d-\d\d) \d\d:\d\d:\d\d[0-9.]{0,8}\] {1,4}iteration ")


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps, numbered from 1; times are means over the log interval, TFLOP/s per device."""
    day = None
    for batch in IterationLog(log).batches(blocks):
        log.add_steps(batch.index, **batch.columns)
        day = day or _DAY.search(batch.text)
    if day and day[1].decode() < CAUSAL_SINCE:
        log.facts["framework_version"] = "core 0.11 or older"


LOG_FORMAT = LogFormat(
    title="Megatron-LM",
    marks=(b"elapsed time per iteration (", b" | consumed samples: "),
    step_line=re.compile(
        rb"iteration {1,24}+\d{1,18}/ {0,24}+\d{1,18} {0,4}+\| {1,4}"
        rb"(?:consumed samples|elapsed time)"
    ),
    read=read,
    example="`iteration 35/ 50 | ... elapsed time per iteration (ms): 5690.4`",
    numbering="from 1",
    end_marker="[after training is done]",
    precedence=4,
    convention="causal",
)
