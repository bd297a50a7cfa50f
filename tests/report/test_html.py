"""The HTML report as text: complete, self-contained, and nothing in it escapes."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import __version__
from paceline.core.result import Status
from paceline.report.charts import CHARTS
from paceline.report.document import Document
from paceline.report.figures import flatten_values
from paceline.report.html import render_document, with_no_break_spaces
from paceline.report.run_document import run_figures
from paceline.report.theme import DARK, LIGHT, Palette
from tests.report.example import (
    HOSTILE,
    STATUSES,
    failed_report,
    hostile_report,
    referenced_report,
    render_html,
    report,
)

VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """Elements, attributes, visible text and scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append((self.elements[-1][1], data))
        elif self.open and self.open[-1] != "style" and data.strip():
            self.texts.append(data)

    @property
    def text(self) -> str:
        """All visible text, with plain spaces."""
        return " ".join(" ".join(self.texts).replace("\N{NO-BREAK SPACE}", " ").split())

    def attributes(self, name: str) -> Iterator[str]:
        """The values of one attribute on all elements."""
        return (
            value or "" for _, attrs in self.elements for key, value in attrs.items() if key == name
        )


@pytest.fixture(scope="module")
def page() -> Page:
    """The page of a run with references."""
    return Page(render_html(referenced_report()))


def test_elements_close_in_order(page: Page) -> None:
    assert page.open == []


def test_the_folds_hold_command_script_recipe_environment_and_files(page: Page) -> None:
    assert [tag for tag, _ in page.elements].count("summary") == 6
    for part in (
        "paceline run tiny-llama --set steps=60",
        "torch.distributed.run",
        '"hidden_size": 256',
        "cpu.flags",
        "avx2, avx512_bf16",
        "steps/rank1.jsonl",
    ):
        assert part in page.text


def test_every_chart_is_drawn_for_wide_windows_and_for_phones(page: Page) -> None:
    charts = [attrs for _, attrs in page.elements if "chart" in (attrs.get("class") or "").split()]
    wide = [attrs["id"] for attrs in charts if "narrow" not in (attrs["class"] or "")]
    assert wide == [f"chart-{name}" for name in CHARTS]
    assert [tag for tag, _ in page.elements].count("svg") == len(charts) == 2 * len(wide) - 1
    ids = list(page.attributes("id"))
    assert len(ids) == len(set(ids))


def test_a_typical_page_is_small() -> None:
    assert len(render_html(referenced_report()).encode()) < 300_000
    assert len(render_html(report(8, 600, 5)).encode()) < 300_000


def test_nothing_is_loaded_from_elsewhere(page: Page) -> None:
    assert all(url.startswith("data:") for url in page.attributes("src"))
    hrefs = [url for tag, attrs in page.elements if tag == "link" for url in [attrs["href"]]]
    assert hrefs == ["data:,"]
    assert not re.search(r"@import|url\(", render_html(failed_report()))


def test_the_policy_allows_exactly_the_script_of_the_page(page: Page) -> None:
    policy = next(p for p in page.attributes("content") if "default-src" in p)
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    run = [text for attrs, text in page.scripts if "type" not in attrs]
    hashes = {base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in run}
    assert allowed == hashes and len(run) == 1


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_makes_a_page(status: Status) -> None:
    page = Page(render_html(failed_report(status, 3)))
    assert page.open == []
    assert ("What to do:" in page.text) == (status != "ok")


def test_ranks_are_named_with_their_pipeline_stage_where_there_are_several() -> None:
    ranks = tuple(r.model_copy(update={"stage": r.rank}) for r in report().result.ranks)
    assert "1, stage p1" in render_html(report(ranks=ranks))
    assert "stage p" not in render_html(report())


def test_mfu_comes_first_and_names_a_missing_probe() -> None:
    metrics = dict(report().result.metrics)
    metrics["mfu"] = metrics["mfu"].model_copy(update={"value": 0.3617, "note": None})
    metrics["achievable_fraction"] = metrics["mfu"].model_copy(
        update={"value": None, "note": "the reachable rate was not probed"}
    )
    card = run_figures(report(metrics=metrics))[2]
    assert card.value == "36.2%"
    assert card.details == (
        "of the data-sheet peak in bf16, causal FLOPs",
        "achievable GEMM throughput: the reachable rate was not probed",
    )


def test_an_impossible_mfu_is_marked_and_not_in_the_title() -> None:
    metrics = dict(report().result.metrics)
    metrics["mfu"] = metrics["mfu"].model_copy(update={"value": 79.9, "note": None})
    page = Page(render_html(report(metrics=metrics)))
    assert "✕ impossible MFU" in page.text and "Comparisons exclude this run." in page.text
    assert ("span", {"class": "chip alert"}) in page.elements[page.elements.index(("h1", {})) :]
    titles = [text for text in page.texts if text.startswith("tiny-llama: ")]
    assert titles and not any("MFU" in title for title in titles)


def test_the_footer_has_version_run_and_command() -> None:
    run = report()
    page = Page(render_html(run))
    assert f"Made with Paceline {__version__}. Source: {run.result.run}." in page.text
    assert f"Reproduce with {run.command}" in page.text
    assert (
        f"Reproduce with {'paceline compare a b'}"
        in Page(render_document(Document("a", "b"), "paceline compare a b")).text
    )


def test_nothing_measured_means_no_cards() -> None:
    assert run_figures(failed_report()) == ()


def test_hostile_names_stay_text_everywhere() -> None:
    page = Page(render_html(hostile_report()))
    assert page.open == []
    assert not any(tag == "img" for tag, _ in page.elements)
    assert page.text.count(HOSTILE) > 20


def test_a_file_name_cannot_become_another_kind_of_link() -> None:
    links = [
        a["href"] or "" for tag, a in Page(render_html(hostile_report())).elements if tag == "a"
    ]
    assert len(links) == 2
    assert not any(":" in link or "<" in link for link in links)


@cache
def tags_of(text: str) -> list[str]:
    """The elements of a page whose free texts are all `text`."""
    return [tag for tag, _ in Page(render_html(hostile_report(text))).elements]


def test_a_long_name_of_emoji_does_not_break_the_charts() -> None:
    assert tags_of("0" + "\N{ROCKET}" * 80) == tags_of("plain")


@settings(max_examples=12, deadline=None)
@given(
    st.text(max_size=40), st.sampled_from(["<!--<script>", "</style>", "'\" onclick=", "{{7*7}}"])
)
def test_any_text_leaves_the_structure_of_the_page_alone(text: str, start: str) -> None:
    assert tags_of(start + text) == tags_of("plain")


def test_numbers_keep_their_units_on_a_line() -> None:
    assert with_no_break_spaces("band ± 1.3% of 20 steps") == "band ±\xa01.3% of 20\xa0steps"


def test_nested_inventory_becomes_lines() -> None:
    nested = {"a": {"b": [1, 2], "c_bytes": 2**30}, "d": [{"e": None}], "f": [], "g": {}}
    assert dict(flatten_values(nested)) == {
        "a.b": "1, 2",
        "a.c_bytes": "1.00 GiB",
        "d.0.e": "none",
        "f": "none",
        "g": "none",
    }


def contrast(colour_a: str, colour_b: str) -> float:
    """WCAG contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(colour_a), luminance(colour_b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_text_and_marks_stand_out_from_their_ground(palette: Palette) -> None:
    for ground in (palette.page, palette.card):
        for text in (
            palette.ink,
            palette.muted,
            palette.steady,
            palette.accent,
            palette.danger,
            palette.good,
        ):
            assert contrast(text, ground) >= 4.5
    for mark in (palette.steady, palette.warmup):
        assert contrast(mark, palette.card) >= 2.5
    assert contrast(palette.steady, palette.band) >= 3
