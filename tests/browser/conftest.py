"""A real headless Chromium that refuses every request but the page itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Dialog, Page, Route, sync_playwright

QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
"""Options for a browser without background requests."""

Scheme = Literal["light", "dark"]


@dataclass
class Opened:
    """A page in the browser with what it asked for and what it complained about."""

    page: Page
    refused: list[str] = field(default_factory=list[str])
    messages: list[str] = field(default_factory=list[str])
    dialogs: list[str] = field(default_factory=list[str])

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self.page.evaluate(script)


Open = Callable[..., Opened]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium; skips where there is none, unless it is required."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        missing = "Chromium is not installed; `make deps-browser` installs it"
        if "browser" in os.environ.get("PACELINE_REQUIRE", "").split(","):
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=QUIET)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens the text of a page as a file, in a window of its own."""
    contexts: list[Any] = []

    def opened(
        html: str,
        width: int = 1280,
        scheme: Scheme = "light",
        *,
        keep_policy: bool = True,
        scripts: bool = True,
    ) -> Opened:
        file = tmp_path / f"page-{len(contexts)}.html"
        file.write_text(html, encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            bypass_csp=not keep_policy,
            java_script_enabled=scripts,
        )
        contexts.append(context)
        seen = Opened(context.new_page())

        def admit(route: Route) -> None:
            if route.request.url == file.as_uri():
                route.continue_()
            else:
                seen.refused.append(route.request.url)
                route.abort()

        def dismiss(dialog: Dialog) -> None:
            seen.dialogs.append(dialog.message)
            dialog.dismiss()

        context.route("**/*", admit)
        seen.page.on("console", lambda message: seen.messages.append(message.text))
        seen.page.on("pageerror", lambda error: seen.messages.append(str(error)))
        seen.page.on("dialog", dismiss)
        seen.page.goto(file.as_uri())
        return seen

    yield opened
    for context in contexts:
        context.close()
