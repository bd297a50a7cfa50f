"""Every page of every verb: the answer first, nothing beyond its card, no figure without its unit.

Widths are those of a laptop's window and of a phone.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import Open, Opened
from tests.browser.pages import MADE, page

WIDTHS = (1280, 400)

UNITS = (
    r"[\d.,]*\d[ \u00a0](?:%|(?:[kMGTPE]i?)?(?:B|FLOP|FLOP/s|s|ms|Wh|W)\b|"
    r"days?\b|tokens/s|samples/s|min\b|minutes\b|nats/token)"
)
"""A figure with its unit, as a regular expression of JavaScript."""

LAYOUT_FAULTS = r"""((UNITS) => {
    document.querySelectorAll("details").forEach((fold) => (fold.open = true));
    const faults = [];
    const root = document.documentElement;
    if (root.scrollWidth > root.clientWidth) faults.push(`scrolls to ${root.scrollWidth}`);
    for (const table of document.querySelectorAll("table")) {
        const frame = table.closest(".card, .panel").getBoundingClientRect();
        const holder = table.closest(".scroll") || table;
        const box = holder.getBoundingClientRect();
        if (box.right > frame.right + 1 || box.left < frame.left - 1)
            faults.push(`table beyond its card: ${table.innerText.slice(0, 40)}`);
        const scrolls = getComputedStyle(holder).overflowX !== "visible";
        if (holder === table || !scrolls)
            for (const cell of table.querySelectorAll("tbody th, tbody td"))
                if (cell.getBoundingClientRect().right > frame.right + 1)
                    faults.push(`cell beyond its card: ${cell.innerText}`);
    }
    const figure = new RegExp(UNITS, "g");
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        if (node.parentElement.closest("script, style, noscript, svg, pre")) continue;
        const head = node.parentElement.closest("thead");
        if (head && getComputedStyle(head).position === "absolute") continue;
        for (const match of node.data.matchAll(figure)) {
            const range = document.createRange();
            range.setStart(node, match.index);
            range.setEnd(node, match.index + match[0].length);
            const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
            if (lines.size > 1) faults.push(`broken figure: ${match[0]}`);
        }
    }
    for (const big of document.querySelectorAll(".big")) {
        const unit = big.querySelector(".unit");
        const torn = unit && unit.getClientRects().length > 1;
        if (torn || big.scrollWidth > big.clientWidth + 1)
            faults.push(`figure too long for its card: ${big.innerText}`);
    }
    for (const word of document.querySelectorAll("thead th, .card h2")) {
        if (word.scrollWidth > word.clientWidth + 1 && !word.closest(".scroll"))
            faults.push(`cut off: ${word.innerText}`);
    }
    return faults;
})"""


def layout_faults(opened: Opened) -> list[str]:
    """What lies beyond the window or its card, and figures that are torn from their units."""
    faults: list[str] = opened.page.evaluate(LAYOUT_FAULTS, UNITS)
    return faults


def texts(opened: Opened, marks: str) -> list[str]:
    """The text of every element that a selector finds."""
    found: list[str] = opened.ask(
        f"[...document.querySelectorAll({marks!r})].map((each) => each.textContent.trim())"
    )
    return found


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_leaves_its_card_and_no_figure_is_broken(
    open_page: Open, name: str, width: int
) -> None:
    opened = open_page(page(name), width)
    assert layout_faults(opened) == []
    assert opened.messages == [] and opened.refused == []


@pytest.mark.parametrize("name", MADE)
def test_figures_stand_above_charts_that_say_whose_they_are(open_page: Open, name: str) -> None:
    opened = open_page(page(name))
    assert len(texts(opened, ".card")) >= 4 and texts(opened, ".title .chip")
    order: dict[str, Any] = opened.ask(
        """(() => {
            const top = (mark) => document.querySelector(mark).getBoundingClientRect().top;
            return { chip: top(".chip"), cards: top(".cards"), chart: top("figure"),
                     table: top("table") };
        })()"""
    )
    assert order["chip"] < order["cards"] < min(order["chart"], order["table"])
    titles = texts(opened, "figure > h2")
    assert titles and len(set(titles)) == len(titles)
    assert len(texts(opened, "figure > h2 .subject")) == len(titles)


def test_nodes_are_told_on_hover_and_the_slowest_is_named(open_page: Open) -> None:
    opened = open_page(page("scale"))
    assert "node-0007" in texts(opened, "#chart-nodes .names_marks text")
    opened.page.locator("#chart-nodes .alone_marks path").nth(1).hover()
    told = opened.page.locator("#tooltip").inner_text()
    assert "node-00" in told and "alone (samples/s)" in told


def test_a_broken_figure_a_wide_table_and_a_wide_page_would_be_seen(open_page: Open) -> None:
    broken = '<section class="panel"><p style="width: 5em">123,456.78 tokens/s</p></section>'
    cells = "".join(f"<td>{'x' * 30}</td>" for _ in range(20))
    style = "overflow-wrap: normal; display: table"
    wide = f'<section class="panel"><table style="{style}"><tr>{cells}</tr></table></section>'
    wide = wide.replace("<td>", '<td style="overflow-wrap: normal">')
    html = page("scale").replace("</main>", f"{broken}{wide}</main>")
    faults = " ".join(layout_faults(open_page(html)))
    for fault in ("broken figure: 123,456.78 tokens/s", "table beyond its card", "scrolls to"):
        assert fault in faults
