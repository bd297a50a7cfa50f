"""The share card: a PNG of the size that link previews show, with the result and nothing cut."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.report.card import card_svg, save_card
from tests.report.example import HOSTILE, failed_report, hostile_report, report


def texts(svg: str) -> list[str]:
    """Return the texts of a card in order."""
    return [element.text or "" for element in ET.fromstring(svg).iter() if element.text]


def test_a_card_is_a_png_of_1200_by_630(tmp_path: Path) -> None:
    content = save_card(report(), tmp_path / "cards" / "run.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (1200, 630)


def test_a_card_states_result_figures_hardware_software_and_date() -> None:
    lines = texts(card_svg(report()))
    assert " ".join(lines[:2]).startswith("tiny-llama: 17.4k tokens/s on 2x CPU")
    for part in ("Throughput", "17,422 tokens/s", "Step time, median", "0.2351 s", "2026-11-20"):
        assert part in lines
    assert any("2 x cpu (Epyc 9654)" in line for line in lines)
    assert any("torch 2.13.0" in line for line in lines)


def test_a_card_of_a_failed_run_states_its_status() -> None:
    assert "out of memory" in " ".join(texts(card_svg(failed_report("oom"))))


def test_text_of_a_run_is_escaped() -> None:
    assert HOSTILE[:9] in " ".join(texts(card_svg(hostile_report())))


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="PNG"):
        save_card(report(), tmp_path / "run.svg")
