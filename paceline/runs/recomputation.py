"""Comparison of what a run folder states with what its raw files give, field by field.

Every derived file is computed again and compared as a whole: a value that differs, one that is
missing and one that was added are all found. Files that nothing here can compute again are listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from itertools import zip_longest
from math import isclose, isfinite
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from paceline.core.errors import PacelineError
from paceline.core.run_report import RunReport
from paceline.core.secrets import REDACTED
from paceline.core.steps import FLOATS, Steps
from paceline.core.text import printable, shorten
from paceline.core.units import pluralize
from paceline.core.value import Value
from paceline.files.documents import parse_json, read_lines, read_text
from paceline.files.run_folder import REPORT_FILE, RESULT_FILE, STEPS_FILE, run_files
from paceline.profiles.profile import PROFILE_FILE, PROFILE_PAGE
from paceline.runs.outcome import evaluate
from paceline.runs.profiling import profile_of_run, profile_page

TOLERANCE = 1e-9
"""Relative tolerance; another CPU may round the last digits of a sum differently."""
MAX_DIFFERENCES = 1000
"""Maximum number of differences that are listed."""
MAX_TEXT = 200
"""Maximum number of characters of a value that is quoted."""
PIXELS = 0.15
"""Tolerance of a coordinate in a chart, which pages round to a tenth."""
STEPS_AT_ONCE = 10_000
"""Number of steps that are formatted at a time, which bounds the memory use."""

DERIVED = (RESULT_FILE, STEPS_FILE, REPORT_FILE, PROFILE_FILE, PROFILE_PAGE)
"""Files that follow from the others."""
SECTION_TAGS = frozenset(("section", "header", "footer", "details", "figure", "style", "script"))
LAYOUT_TAGS = frozenset(("section", "figure", "div"))
"""Tags whose classes place them on the page."""
EXPECTED_CHART, EXPECTED_TEXT = "MFU waterfall to the", "how-sure"
"""Sections in which `paceline runs report` states what its machine expects of a run."""
MACHINE = "it depends on the machine that wrote it"

_MISSING = object()
_CLIP_NUMBER = re.compile(r"clip\d+")
"""Ids that the chart library counts over all charts of a process."""
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)")
_LINK = re.compile(r'<li><a href="([^"]*)"><code>')


class Difference(Value):
    """Stored value that the raw files do not give."""

    document: str
    """File of the run folder."""
    field: str
    """Path of the value in the file, such as `metrics.mfu.unit`."""
    stored_value: str
    recomputed_value: str


class Unchecked(Value):
    """File, or part of one, that cannot be computed again here."""

    path: str
    why: str


@dataclass
class Recomputation:
    """Outcome of the comparison of a run folder with its raw files."""

    differences: list[Difference] = field(default_factory=list[Difference])
    unchecked_parts: list[Unchecked] = field(default_factory=list[Unchecked])
    num_values: int = 0
    """Number of stored values that were compared."""
    raw_files: tuple[str, ...] = ()
    """Files and folders from which the others follow. They are taken as they are."""

    def compare(self, document: str, ours: Any, theirs: Any, path: str = "") -> None:
        """Compare a stored value of a document, and all values inside it, with a recomputed one."""
        if isinstance(ours, dict) and isinstance(theirs, dict):
            for name in {**ours, **theirs}:
                pair = ours.get(name, _MISSING), theirs.get(name, _MISSING)
                self.compare(document, *pair, f"{path}.{name}" if path else str(name))
        elif isinstance(ours, list) and isinstance(theirs, list):
            for number, pair in enumerate(zip_longest(ours, theirs, fillvalue=_MISSING)):
                self.compare(document, *pair, f"{path}[{number}]")
                if _MISSING in pair:  # The rest of the longer list says nothing new.
                    break
        else:
            self.num_values += ours is not _MISSING
            if _equal(ours, theirs):
                return
            if isinstance(ours, str) and REDACTED in ours:
                self.leave(document, path, "a secret was removed from it")
            elif len(self.differences) < MAX_DIFFERENCES:
                difference = Difference(
                    document=document,
                    field=path,
                    stored_value=_short_text(ours),
                    recomputed_value=_short_text(theirs),
                )
                self.differences.append(difference)

    def compare_pages(self, document: str, ours: str, theirs: str) -> None:
        """Compare a stored page with a recomputed one, section by section.

        What the writer's machine expects of a run cannot be computed elsewhere. The shapes of a
        chart depend on the library that drew it; its labels, which hold its values, do not.
        """
        sections, expected = page_sections(ours), page_sections(theirs)
        for name in [name for name in sections if name.startswith(EXPECTED_CHART)]:
            if name not in expected:
                del sections[name]
                self.leave(document, name, MACHINE)
        pages = sections, expected
        own_words, known_words = (each.get(EXPECTED_TEXT, _Section()).words for each in pages)
        if len(own_words) > len(known_words):
            self.leave(document, " ".join(own_words[len(known_words) + 1 :]), MACHINE)
            del own_words[len(known_words) :]
        shared = sorted(sections.keys() & expected)
        charts = [n for n in shared if not _same_shapes(sections[n].shapes, expected[n].shapes)]
        if charts:
            what = f"shapes of the charts {', '.join(charts)}"
            self.leave(document, what, "drawn otherwise here; their labels are compared")
        words = [{name: s.words for name, s in each.items()} for each in pages]
        self.compare(document, words[0], words[1])

    def leave(self, document: str, what: str, why: str) -> None:
        """Add a part of a document that cannot be compared."""
        path = f"{document}: {printable(shorten(what, MAX_TEXT))}"
        self.unchecked_parts.append(Unchecked(path=path, why=why))


def merged_lines(steps: Steps) -> Iterator[str]:
    """Yield the merged steps as JSON lines, with null for missing numbers."""
    for start in range(0, len(steps), STEPS_AT_ONCE):
        part = steps.select(slice(start, start + STEPS_AT_ONCE))
        columns = {name: part[name].tolist() for name in FLOATS}
        for row, number in enumerate(part.index.tolist()):
            values = {name: column[row] for name, column in columns.items()}
            finite = {name: value if isfinite(value) else None for name, value in values.items()}
            yield json.dumps({"step": number, **finite}) + "\n"


def run_page(report: RunReport) -> str:
    """Return the page of a run folder, which names the folder without its place."""
    from paceline.report.html import render_document  # Its charts need Altair, which is slow.
    from paceline.report.run_document import run_document

    return render_document(run_document(replace(report, folder="")))


def recompute(folder: Path) -> Recomputation:
    """Compute all derived files of a run folder from its raw files, and compare them."""
    outcome = Recomputation()
    files = run_files(folder)
    present = [name for name in DERIVED if name in files]
    top = dict.fromkeys(f"{file.split('/')[0]}{'/' if '/' in file else ''}" for file in files)
    outcome.raw_files = tuple(name for name in top if name not in DERIVED)
    try:
        report = evaluate(folder)
    except PacelineError as error:
        outcome.compare("run.json", "a run", f"cannot be evaluated: {error}")
        return outcome
    for name in present:
        try:
            if name in (PROFILE_FILE, PROFILE_PAGE):
                _compare_profile(outcome, folder, name, report)
            else:
                _compare_file(outcome, folder, name, report)
        except (OSError, ValueError) as error:
            outcome.compare(name, f"cannot be read: {error}", _MISSING)
    return outcome


def _compare_file(outcome: Recomputation, folder: Path, name: str, report: RunReport) -> None:
    """Compare one file that every run has; raise OSError or ValueError if it cannot be read."""
    path = folder / name
    if name == RESULT_FILE:
        outcome.compare(name, parse_json(read_text(path)), report.result.model_dump(mode="json"))
    elif name == STEPS_FILE:
        for number, pair in enumerate(zip_longest(read_lines(path), merged_lines(report.steps)), 1):
            stored_value, recomputed_value = (
                _MISSING if line is None else parse_json(line) for line in pair
            )
            outcome.compare(name, stored_value, recomputed_value, f"line {number}")
    else:
        page = read_text(path)
        links = tuple(map(unquote, _LINK.findall(page)))
        absent = [file for file in links if file not in report.files]
        if absent:
            what = f"{pluralize(len(absent), 'link')}, such as {absent[0]}"
            outcome.leave(name, what, "the file is not in this folder")
        outcome.compare_pages(name, page, run_page(replace(report, files=links)))


def _compare_profile(outcome: Recomputation, folder: Path, name: str, report: RunReport) -> None:
    """Compare a profile or its page; raise OSError or ValueError if it cannot be read."""
    settings = report.spec.profile if report.spec else None
    if settings is None or report.spec is None:
        outcome.compare(name, "a profile", _MISSING)
        return
    if settings.tool == "nsys":
        outcome.leave(name, "profile", "reading an nsys report starts nsys, which is not done here")
        return
    try:
        profile = profile_of_run(report)
    except PacelineError as error:
        outcome.leave(name, "profile", str(error))
        return
    text = read_text(folder / name)
    if name == PROFILE_FILE:
        outcome.compare(name, parse_json(text), profile.model_dump(mode="json"))
    else:
        outcome.compare_pages(name, text, profile_page(profile, report.spec.recipe))


@dataclass
class _Section:
    """Part of a page: its texts and tags, and apart from them those that draw its charts."""

    name: str = ""
    """Its id, else its first text."""
    words: list[str] = field(default_factory=list[str])
    shapes: list[str] = field(default_factory=list[str])


class _PageReader(HTMLParser):
    """Reader of a page. A section starts at every tag of SECTION_TAGS."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sections = [_Section("page")]
        self._svg_depth = 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = {name: value or "" for name, value in attrs}
        self._svg_depth += tag == "svg"
        if tag in SECTION_TAGS:
            self.sections.append(_Section(fields.pop("id", "")))
        if tag in LAYOUT_TAGS:
            fields.pop("class", "")
        if label := fields.pop("aria-label", ""):
            self.handle_data(label)
        if fields or tag not in LAYOUT_TAGS:
            token = " ".join((f"<{tag}", *(f"{name}={value}" for name, value in fields.items())))
            last = self.sections[-1]
            if self._svg_depth:
                last.shapes.append(_CLIP_NUMBER.sub("clip", token))
            else:
                last.words.append(token)

    def handle_endtag(self, tag: str) -> None:
        self._svg_depth -= tag == "svg"

    def handle_data(self, data: str) -> None:
        if text := " ".join(data.split()):
            last = self.sections[-1]
            last.name = last.name or text
            last.words.append(text)


def page_sections(page: str) -> dict[str, _Section]:
    """Return the sections of a page by their names; equal names are numbered."""
    sections: dict[str, _Section] = {}
    for section in _PageReader(page).sections:
        name, number = section.name, 2
        while name in sections:
            name, number = f"{section.name} {number}", number + 1
        if section.words or section.shapes:
            sections[name] = section
    return sections


def _same_shapes(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Return whether two charts are drawn alike."""
    mine, yours = _NUMBER.split("\n".join(ours)), _NUMBER.split("\n".join(theirs))
    return len(mine) == len(yours) and all(
        a == b or (number % 2 and isclose(float(a), float(b), abs_tol=PIXELS))
        for number, (a, b) in enumerate(zip(mine, yours, strict=True))
    )


def _equal(ours: Any, theirs: Any) -> bool:
    if all(type(each) in (int, float) for each in (ours, theirs)):
        try:
            return isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=1e-12)
        except OverflowError:  # an integer above the largest float
            return ours == theirs
    return type(ours) is type(theirs) and ours == theirs


def _short_text(value: Any) -> str:
    if value is _MISSING:
        return "-"
    if isinstance(value, dict | list):
        return f"{pluralize(len(value), 'value')} ({'object' if type(value) is dict else 'list'})"
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    return printable(shorten(text, MAX_TEXT))
