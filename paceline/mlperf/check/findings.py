"""The official checker's messages in plain words, with line numbers of the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.core.value import Value
from paceline.mlperf.rules import UNOFFICIAL

TOKEN = b":::MLLOG "
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
_NO_RULES = re.compile(r"Could not find config file: .*/(?:closed|open)_(?P<name>\w+)\.yaml")

_VALUE = r"\(?v\['value'\]"
_WORDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (rf"{_VALUE} == 1_200_000 - s\['(\w+)'\]", "must be 1200000 less {0}"),
        (rf"{_VALUE} == ('[^']*'|[^\s)]+)", "must be {0}"),
        (rf"{_VALUE} != ''", "must not be empty"),
        (rf"{_VALUE} in \[(.*)\]", "must be one of {0}"),
        (rf"{_VALUE} <= ([\d.e-]+)\)? and v\['value'\] > 0\.0", "must reach {0} or less, and be above 0"),
        (rf"{_VALUE} (>=?|<=?) ([\d.e-]+)", "must be {0} {1}"),
        (r"^'(\w+)' in v\['metadata'\]$", "must state {0} in its metadata"),
        (r"^\('(\w+)' in v\['metadata'\]\) \| \('(\w+)' in v\['metadata'\]\)$",
         "must state {0} or {1} in its metadata"),
        (r"^'value' in v$", "must have a value"),
        (r"^not s\['init_stopped'\]$", "must stand before init_stop"),
        (r"^not s\['run_started'\]$", "must stand before run_start"),
        (r"^s\['init_started'\]$", "must stand behind init_start"),
        (r"^\(? ?s\['init_stopped'\](?: == True )?\)?$", "must stand behind init_stop"),
        (r"^s\['run_started'\]$", "must stand behind run_start"),
        (r"^ll\.timestamp - s\['first_init_start'\]",
         "comes too late: initialisation takes longer than the division allows untimed"),
    )
)  # fmt: skip


class Finding(Value):
    """One thing that the rules object to."""

    key: str | None
    line: int | None
    """In the log as it is read, unpacked, from 1; None where no line is at fault."""
    message: str
    rule: str | None = None
    """The test as the official rules write it."""
    official: str
    """The official message's first lines."""


FileStatus = Literal["passed", "failed", "broken", "unreadable"]


class CheckedFile(Value):
    """One log under the official rules."""

    file: str
    status: FileStatus
    """`broken`: the checker gave no whole answer."""
    reason: str | None = None
    findings: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()


class Check(Value):
    """What `paceline mlperf check` answers."""

    place: str
    kind: Literal["logs", "description", "submission"] = "logs"
    ruleset: str
    ruleset_from: Literal["option", "path", "default"]
    checker: str
    official: Literal[False] = False
    label: str = UNOFFICIAL
    status: Literal["passed", "failed", "broken"]
    """`broken`: some file has no whole answer, and none of the others failed.

    A submission passes with one log that breaks the rules: it is the run that is dropped.
    """
    files: tuple[CheckedFile, ...]


@dataclass
class ResultLines:
    """The result lines of a log as the checker numbers them, and where they stand in the file."""

    numbers: list[int] = field(default_factory=list[int])
    texts: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, content: bytes) -> ResultLines:
        """Of a whole log; line numbers count line feeds, as editors do."""
        found = cls()
        for number, line in enumerate(content.split(b"\n"), 1):
            # The checker also ends a line at a carriage return, which progress bars print.
            for part in line.split(b"\r"):
                if TOKEN in part:
                    found.numbers.append(number)
                    text = part[part.rindex(TOKEN) :].decode("latin-1").strip()
                    found.texts.append(text)
        return found

    def record(self, at: int) -> dict[str, Any]:
        """The record of result line `at`, empty when it has none."""
        try:
            record = json.loads(self.texts[at][len(TOKEN) :])
        except (ValueError, IndexError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def number_of(self, text: str) -> int | None:
        """The first line with this result, None when no line has it."""
        return self.numbers[self.texts.index(text)] if text in self.texts else None

    def of_key(self, key: str) -> list[int]:
        """The lines that state `key`."""
        said = f'"{key}"'
        return [
            self.numbers[at]
            for at, text in enumerate(self.texts)
            if said in text and self.record(at).get("key") == key
        ]


def finding(message: str, lines: ResultLines) -> Finding:
    """An official message in plain words; what is not understood is passed on as it is."""
    official = "\n".join(message.splitlines()[:3])[:600]
    for read in (_of_a_line, _of_a_count, _of_no_line):
        found = read(message, lines)
        if found is not None:
            key, line, words, rule = found
            return Finding(key=key, line=line, message=words, rule=rule, official=official)
    return Finding(key=None, line=None, message=official, official=official)


Words = tuple[str | None, int | None, str, str | None]
"""Key, line, words and rule."""


def unread_finding(text: str, why: str, lines: ResultLines) -> Finding:
    """A result line that the checker could not parse."""
    message = f"this result line cannot be read: {why}"
    return Finding(
        key=None, line=lines.number_of(text.strip()), message=message, official=text[:300]
    )


def incomplete_records(lines: ResultLines) -> list[Finding]:
    """Result lines that lack a field, on which the checker breaks off."""
    found: list[Finding] = []
    for at, number in enumerate(lines.numbers):
        record = lines.record(at)
        missing = [name for name in FIELDS if record and name not in record]
        if missing:
            message = f"this result line has no {' and no '.join(missing)}"
            text = lines.texts[at][:300]
            found.append(Finding(key=None, line=number, message=message, official=text))
    return found


def in_words(test: str) -> str:
    """What a test of the rules asks for, behind the name of its key."""
    bare = test.strip()
    for pattern, words in _WORDS:
        if found := pattern.search(bare):
            return words.format(*found.groups())
    return f"breaks the rule `{bare}`"


def _of_a_line(message: str, lines: ResultLines) -> Words | None:
    """A check of one line that failed, or broke off."""
    if found := _LINE.match(message):
        at = int(found["at"])
        record = lines.record(at)
        number = lines.numbers[at] if at < len(lines.numbers) else lines.number_of(found["text"])
        test = _TEST.search(message)
        rule = test["test"].strip() if test else None
        words = f"{found['key']} {in_words(rule or '')}{_said(rule, record)}"
        return found["key"], number, words, rule
    trigger = _TRIGGER.search(message)
    if trigger is None:
        return None
    number, code = lines.number_of(trigger["text"].strip()), _CODE.match(message)
    key = next((k for k in _keys_of([trigger["text"]])), None)
    rule = code["test"].strip() if code else None
    words = in_words(rule) if rule else "follows a rule that cannot be executed on it"
    return key, number, f"{key or 'this line'} {words}; the check itself failed on it", rule


def _of_a_count(message: str, lines: ResultLines) -> Words | None:
    """A key that is missing, or stands too often."""
    if found := _COUNT.match(message):
        key, n = found["key"], int(found["n"])
        places = lines.of_key(key)
        if n == 0:
            return key, None, f"{key} is missing", None
        values = (
            f" with different values ({found['values'].strip('[]')})" if found["values"] else ""
        )
        once = "once" if found["need"] == "EXACTLY_ONE" else f"at least {found['least']} times"
        words = f"{key} stands {n} times{values}, it must stand {once}{_listed(places)}"
        return key, places[0] if places else None, words, None
    if found := _EITHER.match(message):
        keys = " or ".join(sorted(re.findall(r"'([^']*)'", found["keys"])))
        return None, None, f"{keys} is missing: one of them must be there", None
    if found := _NONE_OF.match(message):
        key, rule = found["key"], found["test"].strip()
        places = lines.of_key(key)
        words = f"no {key} passes: one of its {len(places)} {in_words(rule)}"
        return key, places[-1] if places else None, words, rule
    return None


def _of_no_line(message: str, lines: ResultLines) -> Words | None:
    """What is said of the log as a whole."""
    if message.startswith("No log lines detected"):
        return None, None, "the log holds no result line", None
    if found := _NO_RULES.search(message):
        return None, None, f"the ruleset has no rules for {found['name']!r}", None
    if found := _TEST.match(message):
        return None, None, f"at its end the log {in_words(found['test'])}", found["test"].strip()
    return None


def _said(rule: str | None, record: dict[str, Any]) -> str:
    """`, and is 0.8` when the rule is about the value."""
    if rule is None or "['value']" not in rule or "value" not in record:
        return ""
    return f", and is {json.dumps(record['value'])[:100]}"


def _keys_of(texts: Iterable[str]) -> list[str]:
    read: Callable[[str], re.Match[str] | None] = re.compile(r'"key": "([^"]*)"').search
    return [found[1] for text in texts if (found := read(text))]


def _listed(places: list[int]) -> str:
    return f" (lines {', '.join(map(str, places[:5]))}{' ...' if len(places) > 5 else ''})"
