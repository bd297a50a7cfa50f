"""Charts as static SVG for pages: small, in the page's colours, with their tooltips as labels.

A page shows a chart without a chart library. vl-convert draws it when the page is written, and what
a page does not need is removed: default attributes, roles, fonts that the page sets anyway, and
digits beyond a tenth of a pixel.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

import altair as alt
import vl_convert

from paceline.core.text import printable
from paceline.report.theme import FONT

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
NAMESPACE = "{http://www.w3.org/2000/svg}"
LABEL = "aria-label"
REMOVED = frozenset(("role", "aria-roledescription", "aria-hidden", "pointer-events", "version"))
DEFAULTS = {
    "font-family": FONT,
    "font-size": "11px",
    "font-weight": "normal",
    "font-style": "normal",
    "opacity": "1",
    "stroke-opacity": "1",
    "fill-opacity": "1",
    "stroke-dashoffset": "0",
    "transform": "translate(0,0)",
    "stroke-miterlimit": "10",
}
"""Attributes without effect: the page's style sheet or SVG itself has the same values."""
CIRCLE = re.compile(r"M([\d.]+),0A\1,\1,0,1,1,-\1,0A\1,\1,0,1,1,\1,0")
TRANSLATION = re.compile(r"translate\(([-\d.]+,[-\d.]+)\)")
BEYOND_BASIC = re.compile("[\U00010000-\U0010ffff]")
NUMBER = re.compile(r"-?\d*\.\d{2,}(?:e-?\d+)?")


def page_svg(spec: Mapping[str, Any], width: int, name: str, *, labels: bool = True) -> str:
    """Return a Vega-Lite chart as an SVG element for a page.

    `name` makes the ids of the element unique within the page. With `labels`, each mark that has a
    tooltip carries its text as `aria-label`, separated by semicolons, which the page's
    script shows when the pointer is on the mark.
    """
    content = _printable({**copy.deepcopy(dict(spec)), "width": width})
    content.pop("title", None)
    for layer in content.get("layer", [content]):
        _describe_marks(layer)
    root = ElementTree.fromstring(vl_convert.vegalite_to_svg(content, VEGA_LITE))
    _shrink(root, labels, in_mark=False)
    if not labels:
        _merge_dots(root)
    _prefix_ids(root, name)
    root.set("role", "img")
    root.set(LABEL, str(content.get("description", "")))
    text = ElementTree.tostring(root, encoding="unicode")
    return text.replace("ns0:", "").replace(":ns0", "")


def _printable(value: Any) -> Any:
    """Return nested JSON values without characters in texts that cannot be drawn.

    These are control characters, and those beyond the basic plane: Vega cuts long labels between
    the two halves of such a character, which vl-convert then refuses.
    """
    if isinstance(value, dict):
        return {key: _printable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if not isinstance(value, str):
        return value
    return BEYOND_BASIC.sub("\N{REPLACEMENT CHARACTER}", printable(value))


def _describe_marks(layer: dict[str, Any]) -> None:
    """Make the tooltip of a layer the label of its marks; marks without one get no label."""
    encoding = layer.get("encoding", {})
    tooltip = encoding.pop("tooltip", None)
    if tooltip and "description" not in encoding:
        fields = tooltip if isinstance(tooltip, list) else [tooltip]
        calculate = " + '; ' + ".join(_label_line(each) for each in fields)
        layer["transform"] = [
            *layer.get("transform", []),
            {"calculate": calculate, "as": "tooltip_text"},
        ]
        encoding["description"] = {"field": "tooltip_text", "type": "nominal"}
    elif "description" not in encoding:
        mark = layer["mark"]
        layer["mark"] = {**(mark if isinstance(mark, dict) else {"type": mark}), "aria": False}


def _label_line(field: Mapping[str, Any]) -> str:
    """Return the Vega expression of one line of a tooltip: `TITLE: VALUE`."""
    value = f"datum[{json.dumps(field['field'])}]"
    form = json.dumps(field.get("format", ""))
    if field["type"] == "temporal":
        value = f"utcFormat(toDate({value}), {form})"
    elif "format" in field:
        value = f"format({value}, {form})"
    return f"{json.dumps(str(field.get('title') or field['field']) + ': ')} + {value}"


def _shrink(element: ElementTree.Element, labels: bool, in_mark: bool) -> None:
    """Remove what has no effect from an element and its children, in place."""
    in_mark = in_mark or "role-mark" in element.get("class", "")
    for key, value in list(element.attrib.items()):
        is_unwanted_label = key == LABEL and not (labels and in_mark)
        if key in REMOVED or is_unwanted_label or DEFAULTS.get(key) == value:
            del element.attrib[key]
        elif key not in (LABEL, "class", "id"):
            element.set(key, NUMBER.sub(lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), value))
    for child in list(element):
        invisible = child.get("display") == "none" or child.get("d") == ""
        background = child.get("class") == "background" and not child.get("fill")
        if invisible or (background and not child.get("stroke")):
            element.remove(child)
        else:
            _shrink(child, labels, in_mark)
    element.tail = None


def _merge_dots(root: ElementTree.Element) -> None:
    """Draw the circles of one colour in a layer as one path: zero-length lines with round ends."""
    for group in root.iter(f"{NAMESPACE}g"):
        dots: dict[tuple[str, str], ElementTree.Element] = {}
        for mark in list(group):
            circle = CIRCLE.match(mark.get("d", ""))
            place = TRANSLATION.fullmatch(mark.get("transform", ""))
            if not circle or not place or mark.get("stroke") or not mark.get("fill"):
                continue
            group.remove(mark)
            key = circle[1], mark.get("fill", "")
            if key not in dots:
                attributes = {"d": "", "stroke": key[1], "stroke-width": f"{2 * float(key[0]):g}"}
                dots[key] = ElementTree.SubElement(
                    group, mark.tag, {**attributes, "stroke-linecap": "round"}
                )
            dots[key].set("d", f"{dots[key].get('d')}M{place[1]}h0")


def _prefix_ids(root: ElementTree.Element, name: str) -> None:
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key in ("clip-path", "fill", "stroke") and value.startswith("url(#"):
                element.set(key, value.replace("url(#", f"url(#{name}-"))
