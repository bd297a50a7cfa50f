"""The official package checker's messages in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from paceline.core.units import counted
from paceline.mlperf.check.findings import CheckFinding, finding_without_line
from paceline.mlperf.submission.official_package_checker import CheckerMessage

_REPEATED = re.compile(
    r"System description (file )?checker failed|Seed checker failed$"
    r"|Unknown files in result directory|Detected (%d|\d+) total files|RCP test failed but allowed"
)
"""Summaries of what other messages say, and files that are looked for here."""
_COUNT = re.compile(r"Incorrect number of files in dir.* found (\d+), expected (\d+)")
_BREAKING = re.compile(r"(\d+) files do not comply")
_ONE_BREAKS = re.compile(r"1 file does not comply, accepting this")
_SKIPPED = re.compile(r"Skipping benchmark: (.*)")
_SEEDS = "Seed checker failed and found the following errors:"
_NO_SEED = re.compile(r"Result file (\S+) logs no seed")
_SEED_TWICE = re.compile(
    r"Result file (\S+) logs seed (\S+) on (.*?)\. However, result file (\S+) already logs"
)
_SEED_UNREAD = re.compile(r"Error found when querying seeds from (\S+): (.*)", re.DOTALL)
_CONVERGENCE = re.compile(r"RCP Test Failed: (.*)")
_MISSING_REFERENCE = re.compile(r"Missing RCP, please submit RCP with BS = (\d+)")
_CONVERGED_TOO_FAST = ("RCP found", "RCP Interpolation")
_REASONS = {
    "Could not detect global_batch_size": "no log states its global_batch_size",
    "Insufficient convergence": "more than one run did not converge",
    "Cannot find any RCPs": "the round has no reference convergence points for it",
}


def package_findings(messages: Iterable[CheckerMessage]) -> Iterator[CheckFinding]:
    """What messages about one folder of logs say, one finding each."""
    for message in messages:
        if _REPEATED.match(message.text):
            continue
        for words in _words(message.text):
            yield finding_without_line(words, message.text[:600])


def _words(text: str) -> Iterator[str]:
    if text.startswith(_SEEDS):
        yield from map(_seed_words, text.removeprefix(_SEEDS).strip().splitlines())
    elif match := _COUNT.match(text):
        files = counted(int(match[1]), "file", "are")
        yield f"{files} called result_<number>.txt, the rules want exactly {match[2]}"
    elif match := _BREAKING.match(text):
        yield (
            f"{match[1]} logs break the rules, and only 1 may: it counts as the run that is dropped"
        )
    elif _ONE_BREAKS.match(text):
        yield "1 log breaks the rules; it counts as the run that is dropped"
    elif match := _SKIPPED.match(text):
        yield f"{match[1]} is no benchmark of this round: nothing in it was checked"
    elif match := _CONVERGENCE.match(text):
        yield f"the test against the reference convergence points fails: {_reason(match[1])}"
    else:
        yield text


def _reason(text: str) -> str:
    if match := _MISSING_REFERENCE.match(text):
        return f"no reference reaches a batch of {int(match[1]):,}"
    if text in _CONVERGED_TOO_FAST:
        return "the runs needed fewer samples than chance explains"
    return _REASONS.get(text, text)


def _seed_words(text: str) -> str:
    if match := _NO_SEED.match(text):
        return f"{_name(match[1])} states no seed"
    if match := _SEED_TWICE.match(text):
        return f"{_name(match[1])} and {_name(match[4])} state the same seed {match[2]}"
    if match := _SEED_UNREAD.match(text):
        return f"the seeds of {_name(match[1])} cannot be read: {match[2].splitlines()[0]}"
    return text


def _name(path: str) -> str:
    return path.rpartition("/")[2]
