"""Run folders in which the field of a file holds what nobody would write, and what reads them."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.cli import output
from paceline.cli.options import ReportFormat
from paceline.cli.runs import computed_result
from paceline.core.errors import PacelineError
from paceline.files.index import Index
from paceline.files.run_folder import find_runs, groups
from paceline.report.document import Document
from paceline.report.run_document import run_document
from paceline.runs.comparison import ComparisonOptions, compare_runs
from paceline.runs.comparison_report import comparison_document
from paceline.runs.history import recipe_history
from paceline.runs.history_report import history_document
from paceline.runs.outcome import evaluate

RUNS = Path(__file__).parents[1] / "forms" / "runs"
CHANGED = "2026-01-15-tiny-llama-good-dp2-2xcpu-7a10b1a2"
BESIDE = "2026-01-15-tiny-llama-dp2-2xcpu-7a10b1a2-2"
RECIPE = "tiny-llama"
LINES_READ = 3
"""Event lines of a file whose fields are changed: one of each kind."""

NESTED: Any = []
for _ in range(90):
    NESTED = [NESTED]
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**20,
    10**300,
    -(2**70),
    0.5,
    -0.0,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "nan",
    "1e999",
    "x" * 5000,
    "../../etc/passwd",
    "\x00",
    "\x1b]0;owned\x07\x1b[31m",
    "\x9b31m\u202e\r\n",
    "\ud800",
    "<script>alert(1)</script>",
    "=cmd()",
    "2026-13-45T99:99:99Z",
    [],
    {},
    [None],
    [[], {}],
    {"": None},
    {"a": {"b": [1, 2, 3]}},
    NESTED,
    [0] * 2000,
)
"""Values of wrong types, beyond all bounds, or harmful to a terminal, a page or a table."""
TORN = (b"", b"{", b"[" * 100_000, b"null", b"\xff\xfe", b'{"a": NaN}', b"[]", b"7")
"""Files that are none."""


@dataclass(frozen=True)
class Change:
    """One field of one file replaced, deleted, or the whole file by bytes."""

    file: str
    line: int | None
    """Of a file of event lines; None for one document."""
    path: tuple[str | int, ...]
    value: Any
    """A hostile value; DELETED takes the field away."""

    def content(self) -> bytes:
        """The file's bytes with the change in it."""
        return _content((RUNS / CHANGED / self.file).read_bytes(), self)


DELETED = object()


def changes() -> list[Change]:
    """Every field of every file that a verb reads with every hostile value."""
    folder = RUNS / CHANGED
    listed: list[Change] = []
    for path in sorted(folder.rglob("*.json*")):
        file = str(path.relative_to(folder))
        text = path.read_text()
        listed += [Change(file, None, (), content) for content in TORN]
        for line, document in _documents(file, text):
            for place in _places(document):
                listed += [Change(file, line, place, value) for value in (*HOSTILE, DELETED)]
    return listed


def sample(count: int, seed: int) -> list[Change]:
    """`count` of the changes, each field as likely as each other."""
    everything = changes()
    return random.Random(seed).choices(everything, k=count)


class Folders:
    """Two runs under one root; one of them is changed and restored."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in (CHANGED, BESIDE):
            shutil.copytree(RUNS / name, root / name)

    @cached_property
    def index(self) -> Index:
        """Most verbs need none."""
        return Index.in_memory(self.root)

    def read_with(self, change: Change, *verbs: str) -> list[str]:
        """Crashes in these verbs, or in all: `verb: place: error`. A clear error is not a crash."""
        return self.read_file(change.file, change.content(), *verbs)

    def read_file(self, file: str, content: bytes, *verbs: str) -> list[str]:
        """Crashes as `read_with` returns them, with this content of a file."""
        path = self.root / CHANGED / file
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            falls = [_fall(name, self) for name in verbs or VERBS]
        finally:
            path.write_bytes(before)
        return [fall for fall in falls if fall]


def _fall(name: str, folders: Folders) -> str | None:
    try:
        VERBS[name](folders).encode()
    except PacelineError:
        return None
    except Exception as error:
        return f"{name}: {_where(error)}: {type(error).__name__}: {error}"[:300]
    return None


def _where(error: BaseException) -> str:
    """The last line of ours on the way to an error."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/paceline/" in file and "site-packages" not in file:
            place = f"{file.rpartition('/paceline/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _list(folders: Folders) -> str:
    listed = folders.index.rows(computed_result)
    broken = [line for line in listed.left_out if "cannot be evaluated" in line]
    if broken:
        raise AssertionError(broken[0])
    return json.dumps(listed.rows)


def _show(folders: Folders) -> str:
    return _printed(_run(folders))


def _run(folders: Folders) -> Document:
    return run_document(evaluate(folders.root / CHANGED))


def _comparison(folders: Folders) -> Document:
    options = ComparisonOptions(0.01, (), ())
    return comparison_document(compare_runs(folders.root, BESIDE, CHANGED, options))


def _history(folders: Folders) -> Document:
    paths = [folders.root / CHANGED, folders.root / BESIDE]
    return history_document(recipe_history(RECIPE, paths))


def _printed(document: Document) -> str:
    forms = (ReportFormat.text, ReportFormat.json, ReportFormat.md, ReportFormat.csv)
    return "\n".join(output.render(document, form) for form in forms)


def _page(document: Document) -> str:
    return output.render(document, ReportFormat.html)


def _names(folders: Folders) -> str:
    return str([find_runs(folders.root, "last"), groups(folders.root)])


VERBS: dict[str, Callable[[Folders], str]] = {
    "list": _list,
    "show": _show,
    "compare": lambda folders: _printed(_comparison(folders)),
    "history": lambda folders: _printed(_history(folders)),
    "names": _names,
    "show page": lambda folders: _page(_run(folders)),
    "compare page": lambda folders: _page(_comparison(folders)),
    "history page": lambda folders: _page(_history(folders)),
}
"""What reads a run folder, by the verb that does. Pages with charts take most of the time."""
PRINTED_VERBS = tuple(verb for verb in VERBS if not verb.endswith(" page"))


def _documents(file: str, text: str) -> Iterator[tuple[int | None, Any]]:
    if file.endswith(".json"):
        yield None, json.loads(text)
        return
    kinds: set[Any] = set()
    for number, line in enumerate(text.splitlines()):
        document = json.loads(line)
        kind = document.get("event", document.get("kind"))
        if kind not in kinds and len(kinds) < LINES_READ:
            kinds.add(kind)
            yield number, document


def _places(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _places(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node[:2]):
            yield from _places(value, (*path, index))


def _content(before: bytes, change: Change) -> bytes:
    if isinstance(change.value, bytes):
        return change.value
    if change.line is None:
        return _dumped(_changed(json.loads(before), change))
    lines = before.splitlines(keepends=True)
    lines[change.line] = _dumped(_changed(json.loads(lines[change.line]), change)) + b"\n"
    return b"".join(lines)


def _changed(document: Any, change: Change) -> Any:
    if not change.path:
        return {} if change.value is DELETED else change.value
    document = copy.deepcopy(document)
    node = document
    for part in change.path[:-1]:
        node = node[part]
    if change.value is DELETED:
        del node[change.path[-1]]
    else:
        node[change.path[-1]] = change.value
    return document


def _dumped(document: Any) -> bytes:
    return json.dumps(document).encode()
