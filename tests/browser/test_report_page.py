"""The HTML report in a real browser: drawn as measured, quiet, readable, closed to the network."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from paceline.core.run_report import RunReport
from paceline.report.run_description import window_mask
from tests.browser.conftest import Open, Opened
from tests.report import example

PAGES = ("finished", "referenced", "ranks", "failed", "stopped", "single", "hostile", "endless")


@cache
def run(name: str) -> RunReport:
    """An example run by name."""
    match name:
        case "referenced":
            return example.referenced_report()
        case "ranks":
            return example.report(64, 200, 37)
        case "failed":
            return example.failed_report("oom")
        case "stopped":
            return example.failed_report("timeout", 40)
        case "single":
            return example.single_step_report()
        case "hostile":
            return example.hostile_report()
        case "endless":
            return example.hostile_report("endless" * 40)
        case _:
            return example.report()


@cache
def html(name: str) -> str:
    """The page of an example run."""
    return example.render_html(run(name))


def boxes(opened: Opened, marks: str) -> list[dict[str, Any]]:
    """Place, colour and label of every drawn mark that a selector finds."""
    return opened.ask(
        f"""[...document.querySelectorAll({marks!r})].map((mark) => {{
            const box = mark.getBoundingClientRect();
            return {{
                x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2,
                left: box.left, right: box.right, top: box.top, bottom: box.bottom,
                fill: getComputedStyle(mark).fill, label: mark.getAttribute("aria-label") || "",
            }};
        }})"""
    )


def text_faults(opened: Opened) -> list[str]:
    """Texts that stick out of the window or of their panel, or that are cut off."""
    return opened.ask(
        """(() => {
            document.querySelectorAll("details").forEach((fold) => (fold.open = true));
            const faults = [];
            const scrolled = (element) => {
                const box = element.closest(".scroll");
                return box && getComputedStyle(box).overflowX !== "visible";
            };
            const root = document.documentElement;
            if (root.scrollWidth > root.clientWidth) faults.push(`scrolls to ${root.scrollWidth}`);
            const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            for (let node = walker.nextNode(); node; node = walker.nextNode()) {
                const parent = node.parentElement;
                if (!node.data.trim() || parent.closest("script, style, noscript, thead")) continue;
                if (scrolled(parent)) continue;
                const range = document.createRange();
                range.selectNodeContents(node);
                const frame = (parent.closest(".card, .panel") || document.body)
                    .getBoundingClientRect();
                for (const box of range.getClientRects())
                    if (box.left < frame.left - 1 || box.right > frame.right + 1)
                        faults.push(`outside: ${node.data.trim()}`);
            }
            for (const element of document.querySelectorAll("body *")) {
                const hides = getComputedStyle(element).overflowX !== "visible";
                const small = element.closest("thead") || scrolled(element);
                if (hides && !small && element.scrollWidth > element.clientWidth + 1)
                    faults.push(`cut off: ${element.className || element.tagName}`);
            }
            return faults;
        })()"""
    )


@pytest.mark.parametrize("name", ["finished", "ranks", "stopped", "single"])
def test_n_steps_give_n_points(open_page: Open, name: str) -> None:
    opened = open_page(html(name))
    points = boxes(opened, "#chart-step-times .steps_marks path")
    assert len(points) == len(run(name).steps)


def test_the_points_of_the_window_have_its_colour(open_page: Open) -> None:
    opened = open_page(html("finished"))
    window = run("finished").result.window
    assert window is not None
    fills = [p["fill"] for p in boxes(opened, "#chart-step-times .steps_marks path")]
    assert len(set(fills)) == 2
    assert fills.count(fills[-1]) == window.n
    assert fills[: window.n_warmup] == [fills[0]] * window.n_warmup


def test_later_steps_stand_further_right_and_slower_ones_higher(open_page: Open) -> None:
    points = boxes(open_page(html("finished")), "#chart-step-times .steps_marks path")
    times = run("finished").steps["step_time_s"]
    inside = np.flatnonzero(window_mask(run("finished")) & (times < np.quantile(times, 0.9)))
    assert [p["x"] for p in points] == sorted(p["x"] for p in points)
    heights = [-points[i]["y"] for i in inside]
    assert np.corrcoef(heights, times[inside])[0, 1] > 0.999


def test_axis_titles_are_read_with_their_units(open_page: Open) -> None:
    titles = open_page(html("referenced")).ask(
        "[...document.querySelectorAll('.role-axis-title text')].map((t) => t.textContent)"
    )
    assert set(titles) == {
        "step time (s)",
        "step (number)",
        "steps in the window (count)",
        "rank (number)",
        "time in a step (s)",
        "loss (nats/token)",
        "memory at the peak (GiB)",
        "peak memory of the fullest rank (GiB)",
        "share of the peak (%)",
        "this run / reference (ratio)",
    }


def test_the_band_holds_the_steps_that_lie_in_it(open_page: Open) -> None:
    opened = open_page(html("finished"))
    result, times = run("finished").result, run("finished").steps["step_time_s"]
    window, median = result.window, result.metrics["step_time_s"].value
    assert window is not None and window.half_width_s is not None and median is not None
    (band,) = boxes(opened, "#chart-step-times .band_marks path")
    assert band["label"].startswith(f"Window's band: {median:.4f} s ± ")
    points = boxes(opened, "#chart-step-times .steps_marks path")
    drawn = [
        p for p in points if band["top"] <= p["y"] <= band["bottom"] and p["x"] >= band["left"]
    ]
    inside = window_mask(run("finished")) & (np.abs(times - median) <= window.half_width_s)
    assert len(drawn) == int(inside.sum())
    assert 0 < len(drawn) < len(points)


def test_the_warm_up_is_shaded_up_to_the_window(open_page: Open) -> None:
    opened = open_page(html("finished"))
    (shade,) = boxes(opened, "#chart-step-times .warmup_marks path")
    (band,) = boxes(opened, "#chart-step-times .band_marks path")
    window = run("finished").result.window
    assert window is not None
    assert shade["label"] == f"Warm-up: {window.n_warmup} steps before the window"
    assert shade["right"] == pytest.approx(band["left"], abs=1)
    points = boxes(opened, "#chart-step-times .steps_marks path")
    assert sum(p["x"] < shade["right"] for p in points) == window.n_warmup


def test_ranks_losses_bins_and_references_are_all_drawn(open_page: Open) -> None:
    opened = open_page(html("referenced"))
    result = run("referenced").result
    assert len(boxes(opened, "#chart-ranks .ranks_marks path")) == len(result.ranks)
    assert len(boxes(opened, "#chart-loss .losses_marks path")) == len(run("referenced").steps)
    assert len(boxes(opened, "#chart-memory .kinds_marks path")) == 1
    assert len(boxes(opened, "#chart-references .references_marks path")) == 3
    assert opened.ask("document.querySelector('#chart-ranks .straggler_marks').textContent") == (
        "rank 1: +2.0%"
    )


def test_the_distribution_stands_on_the_axis_of_the_series(open_page: Open) -> None:
    opened = open_page(html("finished"))
    medians = [
        boxes(opened, f"#chart-{c} .median_marks path")[0] for c in ("step-times", "distribution")
    ]
    assert medians[0]["y"] == pytest.approx(medians[1]["y"], abs=2)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_asks_for_nothing_and_the_console_is_clean(open_page: Open, name: str) -> None:
    opened = open_page(html(name), keep_policy=False)
    assert opened.refused == [] and opened.messages == [] and opened.dialogs == []


@pytest.mark.parametrize("name", ["referenced", "finished"])
def test_the_page_works_under_its_own_policy(open_page: Open, name: str) -> None:
    opened = open_page(html(name))
    opened.page.locator("#chart-step-times .steps_marks path").first.hover()
    assert opened.page.locator("#tooltip").is_visible()
    assert opened.refused == [] and opened.messages == []


def test_a_request_would_be_refused_and_reported(open_page: Open) -> None:
    bait = '<img src="https://paceline.invalid/pixel.png">'
    page = html("failed").replace("</main>", f"{bait}</main>")
    assert open_page(page, keep_policy=False).refused == ["https://paceline.invalid/pixel.png"]
    guarded = open_page(page)
    assert guarded.refused == [] and "Content Security Policy" in guarded.messages[0]


def test_a_foreign_script_would_not_run(open_page: Open) -> None:
    page = html("failed").replace("</main>", "<script>alert(1)</script></main>")
    assert open_page(page).dialogs == []
    assert open_page(page, keep_policy=False).dialogs == ["1"]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_reads_well_in_light_and_dark(open_page: Open, name: str, width: int) -> None:
    opened = open_page(html(name), width)
    assert text_faults(opened) == []
    opened.page.emulate_media(color_scheme="dark")
    assert text_faults(opened) == []


def test_text_that_does_not_fit_would_be_found(open_page: Open) -> None:
    wide = '<p style="white-space:nowrap">' + "wide " * 200 + "</p>"
    cut = '<p style="white-space:nowrap;overflow:hidden;width:90px">a text that is cut off here</p>'
    page = html("failed")
    assert any(
        "scrolls" in f for f in text_faults(open_page(page.replace("</main>", wide + "</main>")))
    )
    faults = text_faults(open_page(page.replace("</main>", cut + "</main>")))
    assert any("cut off" in f for f in faults)


def test_charts_follow_a_change_of_the_window_width(open_page: Open) -> None:
    opened = open_page(html("finished"), 1280)
    sizes = """[...document.querySelectorAll('.chart svg')]
        .map((svg) => svg.getBoundingClientRect().width).filter((width) => width > 0)"""
    wide = opened.ask(sizes)
    opened.page.set_viewport_size({"width": 400, "height": 900})
    narrow = opened.ask(sizes)
    assert len(wide) == len(narrow) and max(narrow) < 400 < max(wide)
    assert text_faults(opened) == []


def test_dark_mode_turns_ground_text_and_marks(open_page: Open) -> None:
    script = """(() => {
        const mark = document.querySelector('#chart-step-times .steps_marks path:last-child');
        const rgb = (colour) => colour.match(/\\d+/g).slice(0, 3).map(Number);
        const body = getComputedStyle(document.body);
        return [body.backgroundColor, body.color, getComputedStyle(mark).fill].map(rgb);
    })()"""
    light, dark = (open_page(html("finished"), scheme=s).ask(script) for s in ("light", "dark"))
    brightness = [[sum(colour) / 3 for colour in colours] for colours in (light, dark)]
    assert brightness[0][0] > 200 > 100 > brightness[0][1]
    assert brightness[1][0] < 60 < 200 < brightness[1][1]
    assert brightness[1][2] > brightness[0][2] + 40


def test_paper_is_light_and_shows_the_folds(open_page: Open) -> None:
    opened = open_page(html("finished"), scheme="dark")
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert opened.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    opened.ask("dispatchEvent(new Event('beforeprint'))")
    assert opened.ask("document.querySelectorAll('details:not([open])').length") == 0
    opened.ask("dispatchEvent(new Event('afterprint'))")
    assert opened.ask("document.querySelectorAll('details[open]').length") == 0
    assert opened.page.pdf().startswith(b"%PDF")


def test_a_run_named_like_markup_stays_text(open_page: Open) -> None:
    opened = open_page(html("hostile"), keep_policy=False)
    assert opened.dialogs == [] and opened.refused == []
    title = f"{example.HOSTILE}: 17.4k tokens/s on 2x CPU"
    assert opened.ask("document.title") == title
    assert opened.ask("document.querySelector('h1').textContent") == title
    assert opened.ask("document.images.length") == 0
    names = opened.ask(
        "[...document.querySelectorAll('#chart-references text')].map((t) => t.textContent)"
    )
    assert names.count(example.HOSTILE) == 3


def test_a_tooltip_shows_the_figures_and_keeps_markup_as_text(open_page: Open) -> None:
    opened = open_page(html("hostile"), keep_policy=False)
    opened.page.locator("#chart-ranks .ranks_marks path").first.hover()
    tooltip = opened.page.locator("#tooltip")
    assert tooltip.is_visible()
    text = tooltip.inner_text()
    assert example.HOSTILE in text and "busy (s)" in text
    assert opened.ask("document.images.length") == 0 and opened.dialogs == []


def test_figures_are_readable_without_scripts(open_page: Open) -> None:
    opened = open_page(html("finished"), scripts=False)
    text = opened.page.locator("body").inner_text()
    assert "17,422" in text
    assert opened.page.locator("#chart-step-times svg").is_visible()


def test_the_stacked_table_names_every_cell(open_page: Open) -> None:
    opened = open_page(html("finished"), 400)
    labels = opened.ask("""[...document.querySelectorAll('#metrics td')]
        .filter((cell) => cell.textContent)
        .map((cell) => getComputedStyle(cell, '::before').content)""")
    assert len(labels) > 20 and "none" not in labels
