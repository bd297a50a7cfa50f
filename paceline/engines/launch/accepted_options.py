"""Options that a checkout's program accepts, read from the source of its argument parser.

An option that a fork does not have would otherwise fail on every rank, after a wait in the queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from paceline.files.documents import read_text

ALWAYS_ACCEPTED = ("--deepspeed", "--deepspeed_config")
"""Options that `deepspeed.add_config_arguments` adds to those of a program."""
GENERATED = "ArgumentGroupFactory"
"""Helper by which Megatron-LM makes options of dataclass fields, which its source does not spell.
"""
_OPTION = re.compile(r"""["'](--[A-Za-z][\w-]*)["']""")


def accepted_options(files: Iterable[Path]) -> frozenset[str] | None:
    """Return the options in the first readable one of `files`.

    Returns None if no file is readable here, as in a container, or if its options are generated.
    """
    for file in files:
        try:
            text = read_text(file)
        except (OSError, ValueError):
            continue
        return None if GENERATED in text else frozenset(_OPTION.findall(text))
    return None


def rejected_options(words: Sequence[str], files: Iterable[Path]) -> Iterator[str]:
    """Yield the options in `words` that the parser in `files` does not have."""
    options = accepted_options(files)
    if options is None:
        return
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in options and name not in ALWAYS_ACCEPTED:
            yield name
