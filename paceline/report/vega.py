"""The script that draws charts: bundled once, then read from the user's cache."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import altair as alt
import vl_convert

from paceline.core.errors import SystemFaultError
from paceline.files.documents import write_text
from paceline.files.home import cache_folder

_VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
_ENDS_SCRIPT = re.compile(r"<(?=/script|script|!--)", flags=re.IGNORECASE)


@cache
def vega_bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, in the version that the charts are made for.

    Bundling takes one to two seconds of a core. Without a cache that can be read and written it
    is done in each process.
    """
    kept = bundle_file()
    if kept:
        with suppress(OSError, UnicodeDecodeError):
            return kept.read_text(encoding="utf-8")
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", _VEGA_LITE)
    bundle = _ENDS_SCRIPT.sub(r"\\x3c", bundle)
    if kept:
        with suppress(SystemFaultError):
            write_text(kept, bundle)
    return bundle


def bundle_file() -> Path | None:
    """Where it is kept; None for a user without a home."""
    try:
        return cache_folder() / f"vega-{_VEGA_LITE}-{version('vl-convert-python')}.js"
    except RuntimeError:
        return None
