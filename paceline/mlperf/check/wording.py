"""The official checker's messages in plain words, with line numbers of the file."""

from __future__ import annotations

import json
import re
from typing import Any

from paceline.mlperf.check.findings import CheckFinding, finding_without_line
from paceline.mlperf.check.result_lines import ResultLines
from paceline.mlperf.rules import SIBLINGS

FIELDS = ("time_ms", "key", "value", "metadata")

_LINE = re.compile(r"CHECK for '(?P<key>[^']*)' failed in line (?P<at>\d+):\n(?P<text>.*)")
_TRIGGER = re.compile(r"triggered by line ?:\n(?P<text>.*)")
_CODE = re.compile(r"Failed executing CHECK code:\n(?P<test>.*)")
_TEST = re.compile(r"^failed test: ?(?P<test>.*)$", re.MULTILINE)
_NONE_OF = re.compile(r"Failed checks for (?P<key>\S+) : (?P<test>.*)", re.DOTALL)
_COUNT = re.compile(
    r"Required (?P<need>EXACTLY_ONE|AT_LEAST_ONE|AT_LEAST\((?P<least>\d+)\)) occurrence of "
    r"'(?P<key>[^']*)' but found (?P<n>\d+)(?: with different values: (?P<values>.*))?",
    re.DOTALL,
)
_EITHER = re.compile(r"Required AT_LEAST_ONE occurrence of (?P<keys>'.*)")
_KEY = re.compile(r'"key": "([^"]*)"')
_NO_RULES = re.compile(r"Could not find config file: .*/(?:closed|open)_(?P<name>\w+)\.yaml")

_VALUE = r"\(?v\['value'\]"
_WORDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (rf"{_VALUE} == 1_200_000 - s\['(\w+)'\]", "must be 1200000 less {0}"),
        (rf"{_VALUE} == ('[^']*'|[^\s)]+)", "must be {0}"),
        (rf"{_VALUE} != ''", "must not be empty"),
        (rf"{_VALUE} in \[(.*)\]", "must be one of {0}"),
        (
            rf"{_VALUE} <= ([\d.e-]+)\)? and v\['value'\] > 0\.0",
            "must reach {0} or less, and be above 0",
        ),
        (rf"{_VALUE} (>=?|<=?) ([\d.e-]+)", "must be {0} {1}"),
        (r"^'(\w+)' in v\['metadata'\]$", "must state {0} in its metadata"),
        (
            r"^\('(\w+)' in v\['metadata'\]\) \| \('(\w+)' in v\['metadata'\]\)$",
            "must state {0} or {1} in its metadata",
        ),
        (r"^'value' in v$", "must have a value"),
        (r"^not s\['init_stopped'\]$", "must stand before init_stop"),
        (r"^not s\['run_started'\]$", "must stand before run_start"),
        (r"^s\['init_started'\]$", "must stand behind init_start"),
        (r"^\(? ?s\['init_stopped'\](?: == True )?\)?$", "must stand behind init_stop"),
        (r"^s\['run_started'\]$", "must stand behind run_start"),
        (
            r"^ll\.timestamp - s\['first_init_start'\]",
            "comes too late: initialisation takes longer than the division allows untimed",
        ),
    )
)

WordedMessage = tuple[str | None, int | None, str, str | None]
"""Key, line, words and rule."""


def finding(message: str, lines: ResultLines) -> CheckFinding:
    """An official message in plain words; what is not understood is passed on as it is."""
    official = "\n".join(message.splitlines()[:3])[:600]
    for read in (_of_a_line, _of_a_count, _of_no_line):
        worded = read(message, lines)
        if worded is not None:
            key, line, words, rule = worded
            return CheckFinding(key=key, line=line, message=words, rule=rule, official=official)
    return finding_without_line(official, official)


def unread_finding(text: str, why: str, lines: ResultLines) -> CheckFinding:
    """A result line that the checker could not parse."""
    message = f"this result line cannot be read: {why}"
    number = lines.number_of(text.strip())
    return CheckFinding(key=None, line=number, message=message, official=text[:300])


def incomplete_records(lines: ResultLines) -> list[CheckFinding]:
    """Result lines that lack a field, on which the checker breaks off."""
    findings: list[CheckFinding] = []
    for at, number in enumerate(lines.numbers):
        record = lines.record(at)
        missing = [name for name in FIELDS if record and name not in record]
        if missing:
            message = f"this result line has no {' and no '.join(missing)}"
            text = lines.texts[at][:300]
            findings.append(CheckFinding(key=None, line=number, message=message, official=text))
    return findings


def in_words(test: str) -> str:
    """What a test of the rules asks for, behind the name of its key."""
    bare = test.strip()
    for pattern, words in _WORDS:
        if match := pattern.search(bare):
            return words.format(*match.groups())
    return f"breaks the rule `{bare}`"


def _of_a_line(message: str, lines: ResultLines) -> WordedMessage | None:
    """A check of one line that failed, or broke off."""
    if match := _LINE.match(message):
        at = int(match["at"])
        record = lines.record(at)
        number = lines.numbers[at] if at < len(lines.numbers) else lines.number_of(match["text"])
        test = _TEST.search(message)
        rule = test["test"].strip() if test else None
        words = f"{match['key']} {in_words(rule or '')}{_value_words(rule, record)}"
        return match["key"], number, words, rule
    trigger = _TRIGGER.search(message)
    if trigger is None:
        return None
    number, code = lines.number_of(trigger["text"].strip()), _CODE.match(message)
    stated = _KEY.search(trigger["text"])
    key = stated[1] if stated else None
    rule = code["test"].strip() if code else None
    words = in_words(rule) if rule else "follows a rule that cannot be executed on it"
    return key, number, f"{key or 'this line'} {words}; the check itself failed on it", rule


def _of_a_count(message: str, lines: ResultLines) -> WordedMessage | None:
    """A key that is missing, or stands too often."""
    if match := _COUNT.match(message):
        key, n = match["key"], int(match["n"])
        numbers = lines.of_key(key)
        if n == 0:
            return key, None, f"{key} is missing", None
        values = (
            f" with different values ({match['values'].strip('[]')})" if match["values"] else ""
        )
        once = "once" if match["need"] == "EXACTLY_ONE" else f"at least {match['least']} times"
        words = f"{key} stands {n} times{values}, it must stand {once}{_listed(numbers)}"
        return key, numbers[0] if numbers else None, words, None
    if match := _EITHER.match(message):
        keys = " or ".join(sorted(re.findall(r"'([^']*)'", match["keys"])))
        return None, None, f"{keys} is missing: one of them must be there", None
    if match := _NONE_OF.match(message):
        key, rule = match["key"], match["test"].strip()
        numbers = lines.of_key(key)
        words = f"no {key} passes: one of its {len(numbers)} {in_words(rule)}"
        return key, numbers[-1] if numbers else None, words, rule
    return None


def _of_no_line(message: str, _lines: ResultLines) -> WordedMessage | None:
    """What is said of the log as a whole."""
    if message.startswith("No log lines detected"):
        return None, None, "the log holds no result line", None
    if match := _NO_RULES.search(message):
        return None, None, _no_rules(match["name"]), None
    if match := _TEST.match(message):
        return None, None, f"at its end the log {in_words(match['test'])}", match["test"].strip()
    return None


def _no_rules(benchmark: str) -> str:
    there = "; --ruleset tiny has some" if benchmark in SIBLINGS else ""
    return f"the ruleset has no rules for {benchmark!r}{there}"


def _value_words(rule: str | None, record: dict[str, Any]) -> str:
    """`, and is 0.8` when the rule is about the value."""
    if rule is None or "['value']" not in rule or "value" not in record:
        return ""
    return f", and is {json.dumps(record['value'])[:100]}"


def _listed(numbers: list[int]) -> str:
    return f" (lines {', '.join(map(str, numbers[:5]))}{' ...' if len(numbers) > 5 else ''})"
