"""Verbs are listed without their modules, and found where the list says."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.options import with_option_groups
from paceline.cli.verbs import GROUPS, MAX_IN_ONE_LIST, VERBS, Verb

HEAVY = {"altair", "jinja2", "numpy", "ruamel", "scipy", "sqlalchemy", "vl_convert"}


def listed() -> list[Verb]:
    """Every verb that has a function."""
    tables = [*VERBS.values(), *GROUPS.values()]
    return [verb for table in tables for verb in table if verb.source != "group"]


def verb_path(verb: Verb) -> list[str]:
    """The words that name it on the command line."""
    group = next((name for name, verbs in GROUPS.items() if verb in verbs), None)
    return [group, verb.name] if group else [verb.name]


def modules_after(*arguments: str) -> set[str]:
    """What is imported when `paceline` with these arguments ends."""
    program = (
        "import json, sys\nfrom paceline.cli import app\n"
        "try:\n    app(sys.argv[1:])\n"
        "finally:\n    print(json.dumps(list(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["--help"], ["probe", "--help"], ["mlperf", "--help"]])
def test_help_imports_no_verb_and_no_heavy_library(arguments: list[str]):
    modules = modules_after(*arguments)

    own_modules = {name for name in modules if name.startswith("paceline.")}
    assert own_modules == {
        "paceline.cli",
        "paceline.cli.verbs",
        "paceline.core",
        "paceline.cli.terminal",
        "paceline.core.errors",
        "paceline.core.interrupts",
        "paceline.core.secrets",
        "paceline.core.text",
        "paceline.core.units",
    }
    assert HEAVY & modules == set()


def test_a_verb_imports_no_other_verb():
    modules = modules_after("recipes")

    assert "paceline.cli.recipes" in modules
    assert {"paceline.cli.run", "paceline.runs.flow", "altair"} & modules == set()


@pytest.mark.parametrize("verb", listed(), ids=lambda verb: verb.source)
def test_the_line_of_a_verb_is_the_first_sentence_of_its_docstring(verb: Verb):
    first, *_ = (inspect.getdoc(verb.function()) or "").split("\n\n")

    assert verb.line == " ".join(first.split())


@pytest.mark.parametrize("verb", listed(), ids=lambda verb: verb.source)
def test_help_shows_every_word_in_brackets(verb: Verb):
    told = [getattr(option, "help", None) or "" for option in verb.command().params]
    source = "\n".join([inspect.getdoc(verb.function()) or "", *told])
    words = re.findall(r"\\?(\[[a-z#/@][^\[\]]*\])", source)

    page = CliRunner().invoke(app, [*verb_path(verb), "--help"], terminal_width=200).output
    assert [word for word in words if word not in page] == []


@pytest.mark.parametrize("verb", listed(), ids=lambda verb: verb.source)
def test_many_options_are_shown_under_headings(verb: Verb):
    options = [option for option in verb.command().params if option.opts[0].startswith("-")]
    grouped = [option for option in options if option.rich_help_panel]

    assert all(option.help for option in options)
    if len(options) > MAX_IN_ONE_LIST:
        assert len(options) - len(grouped) <= 10
    else:
        assert grouped == []


@dataclass(frozen=True)
class PriceOptions:
    panel: ClassVar[str] = "Cost"
    price: Annotated[float, typer.Option(help="Price per device-hour.")] = 2.5
    where: Annotated[str | None, typer.Option(rich_help_panel="Output")] = None


def test_a_group_of_options_is_its_fields_on_the_command_line_and_one_value_in_the_verb():
    received: list[tuple[str, int, PriceOptions]] = []

    def verb(name: str, number: int = 1, *, prices: PriceOptions) -> None:
        received.append((name, number, prices))

    app = typer.Typer(add_completion=False)
    app.command()(with_option_groups(verb))
    command = typer.main.get_command(app)
    panels = {
        parameter.name: getattr(parameter, "rich_help_panel", None) for parameter in command.params
    }
    assert CliRunner().invoke(app, ["x", "--price", "3"]).exit_code == 0
    assert received == [("x", 1, PriceOptions(3.0, None))]
    assert list(panels) == ["name", "number", "price", "where"]
    assert (panels["price"], panels["where"]) == ("Cost", "Output")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("paceline mlp", {"mlperf"}),
        ("paceline mlperf sc", {"score"}),
        ("paceline recipes engines --j", {"--json"}),
        ("paceline run --device c", {"cpu", "cuda"}),
    ],
)
def test_the_shell_completes(typed: str, offered: set[str]):
    words = typed.split()
    environment = {
        "_PACELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }

    done = CliRunner().invoke(app, prog_name="paceline", env=environment)

    assert set(done.stdout.split()) == offered


def test_a_mistyped_verb_is_answered_with_its_neighbour():
    done = CliRunner().invoke(app, ["mlperf", "scor"])

    assert "did you mean `paceline mlperf score`?" in str(done.exception)


@pytest.mark.parametrize("verb", listed(), ids=lambda verb: verb.source)
def test_short_help_shows_about_ten_options_without_types_and_all_of_them_are_in_the_long_one(
    verb: Verb,
):
    options = {name for param in verb.command().params for name in param.opts if name[:2] == "--"}
    short, long = (
        CliRunner().invoke(app, [*verb_path(verb), name], terminal_width=200).output
        for name in ("--help", "--help-all")
    )
    assert re.findall(r"<(?:bool|str|int|float|path|list\[)", short + long) == []
    # Long names are wrapped.
    assert [name for name in options if name[:14] not in long] == []
    common = verb.command().common
    assert common <= options
    if common:
        shown = set(re.findall(r"^│ [* ] *(--[a-z-]+)|^│ (--[a-z-]+)", short, re.MULTILINE))
        assert 8 <= len(shown) <= 14
        assert f"`paceline {' '.join(verb_path(verb))} --help-all` shows" in short


def test_help_with_the_name_of_a_command_is_its_help():
    for words in (["run"], ["runs", "list"], ["probe"], []):
        asked = CliRunner().invoke(app, ["help", *words], prog_name="paceline")
        assert asked.exit_code == 0
        assert (
            asked.output == CliRunner().invoke(app, [*words, "--help"], prog_name="paceline").output
        )


def test_at_most_sixteen_commands_are_at_the_top():
    assert sum(len(verbs) for verbs in VERBS.values()) <= 16
