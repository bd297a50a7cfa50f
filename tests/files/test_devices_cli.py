from __future__ import annotations

import json
import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.devices import devices
from paceline.core.errors import UserError
from paceline.files import catalog

app = typer.Typer()
app.command("devices")(devices)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def document(*arguments: str) -> Any:
    """What the verb prints as JSON; it must stand alone on standard output."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_all_devices_stand_in_the_table_in_units_that_it_states():
    lines = run().stdout.splitlines()
    assert "TFLOP/s" in lines[0] and "GiB" in lines[0] and "TB/s" in lines[0]
    titles = lines[2].split()
    row = next(line for line in lines if line.startswith("H100-SXM ")).split()
    shown = dict(zip(titles, row, strict=False))
    assert (shown["bf16"], shown["fp8"], shown["mxfp8"]) == ("989.5", "1979", "-")
    assert (shown["GiB"], shown["TB/s"]) == ("79.6", "3.35")
    assert {line.split()[0] for line in lines[3:]} == {d.name for d in catalog.devices()}


def test_one_device_shows_every_figure_with_its_source_and_its_other_names():
    shown = run("a100-sxm-40gb").stdout
    for figure in ("peak fp32", "peak bf16", "memory", "memory bandwidth", "driver context"):
        assert re.search(rf"^{figure} .*\d", shown, re.MULTILINE)
    assert "NVIDIA A100 Tensor Core GPU data sheet (2021)" in shown
    assert "NVIDIA A100-SXM4-40GB" in shown
    assert "1573 MiB" in shown


def test_the_note_on_an_open_name_stays_off_standard_output():
    result = run("h100", "--json")
    assert "could be any of" in result.stderr
    json.loads(result.stdout)


def test_a_device_without_figures_says_why():
    shown = run("cpu").stdout
    assert "No data sheet" in shown and "figure " not in shown
    assert document("cpu")["peaks"] == {}


def test_one_link_can_be_asked_for():
    assert [link["name"] for link in document("--links", "8x400Gb/s IB NDR")] == ["InfiniBand-NDR"]
    assert document("--links", "single node") == []


@pytest.mark.parametrize(
    "arguments", [("h1000",), ("--links", "nvlnk4"), ("--where", "colour=red")]
)
def test_an_unknown_name_is_an_error_of_the_user(arguments: tuple[str, ...]):
    result = run(*arguments)
    assert isinstance(result.exception, UserError)
    assert result.stdout == ""
