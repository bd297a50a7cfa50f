"""Commands in README, docs and help texts are valid; console blocks show what they print."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from paceline.cli import app
from paceline.cli.verbs import GROUPS, VERBS
from paceline.files.hf_hub import is_hub_id
from paceline.files.recipe import load_recipe, recipe_names

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUTPUTS = runpy.run_path(str(ROOT / "docs" / "outputs.py"))
DATE = re.compile(r"\d{4}-\d\d-\d\d")


def shown_in(path: Path) -> Iterator[str]:
    """Commands of a document's blocks, comments and what stands apart behind them left out."""
    text = path.read_text()
    blocks = re.findall(r"```(?:bash|sh|text)\n(.*?)```", text, re.DOTALL)
    blocks += re.findall(r"^ {4}.*$", text, re.MULTILINE)
    for line in re.sub(r"\s*\\\n\s*", " ", "\n".join(blocks)).splitlines():
        command = line.strip().removeprefix("$ ")
        if re.match(r"paceline (?!--)", command):
            yield without_remark(command)


def shown_by_verbs() -> Iterator[str]:
    """Commands among the examples of help texts, one a paragraph."""
    for verb in [verb for table in (VERBS, GROUPS) for verbs in table.values() for verb in verbs]:
        if verb.source == "group":
            continue
        text = (verb.function().__doc__ or "").partition("Examples:")[2]
        for paragraph in text.split("\n\n"):
            lines = [without_remark(line.strip()) for line in paragraph.splitlines()]
            if lines[:1] and " ".join(lines).strip().startswith("paceline "):
                yield " ".join(lines).strip()


def without_remark(command: str) -> str:
    return re.split(r"\s#|\s{2,}|\s>|\s&&", command)[0].rstrip()


EXAMPLES = sorted({*shown_by_verbs(), *(line for path in DOCUMENTS for line in shown_in(path))})


def parsed(command: str) -> dict[str, Any]:
    """The parameters of the verb, as its arguments and options are read; nothing runs."""
    verb: Any = typer.main.get_command(app)
    arguments, context = shlex.split(command)[1:], None
    while isinstance(verb, TyperGroup):
        context = typer.Context(verb, parent=context)
        _, verb, arguments = verb.resolve_command(context, arguments)
    return verb.make_context(verb.name, arguments, parent=context).params


def test_examples_are_there():
    assert len(EXAMPLES) > 80


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_example_is_understood(command: str):
    parameters = parsed(command)
    recipe = parameters.get("recipe") or parameters.get("model")
    is_file = isinstance(recipe, str) and recipe.endswith((".yaml", ".json"))
    if isinstance(recipe, str) and not is_file and not is_hub_id(recipe):
        assert recipe in recipe_names()
        overrides = parameters.get("overrides") or ()
        single = [text for text in overrides if "," not in text or "{" in text]
        load_recipe(recipe, parameters.get("variant"), single)


def test_every_command_of_a_build_file_exists():
    files = [ROOT / "Makefile", ROOT / ".ci" / "run"]
    files += [path for name in (".github", "packaging") for path in (ROOT / name).rglob("*.*")]
    text = "\n".join(path.read_text() for path in files if path.is_file())
    commands = set(re.findall(r"(?<=[/`]paceline )[a-z]+", text))
    assert {"compare", "recipes", "run"} <= commands
    assert commands <= {verb.name for verbs in VERBS.values() for verb in verbs}


@pytest.mark.parametrize("page", OUTPUTS["pages"](), ids=lambda path: str(path.relative_to(ROOT)))
def test_console_blocks_show_what_their_commands_print(page: Path, tmp_path: Path):
    """`python docs/outputs.py PAGE` records the output again after an intended change."""
    shell = OUTPUTS["Shell"](tmp_path)
    for step in OUTPUTS["steps"](page.read_text("utf-8")):
        output = shell.run(step.command)
        if step.kind == "recorded":
            assert DATE.sub("DATE", output) == DATE.sub("DATE", step.output), step.command
        else:
            assert shell.code in (0, 3, 4), f"{step.command}\n{output}"


def test_steps_of_a_page_are_found_with_their_output():
    text = (
        "<!-- setup: true -->\n```console\n$ echo a \\\n  b\na b\n$ false\n```\n"
        "<!-- varies -->\n```console\n$ date\nnow\n```\n"
    )
    found = [(step.command, step.output, step.kind) for step in OUTPUTS["steps"](text)]
    assert found == [
        ("true", "", "setup"),
        ("echo a \\\n  b\n", "a b\n", "recorded"),
        ("false\n", "", "recorded"),
        ("date\n", "now\n", "varies"),
    ]


FOREIGN_OPTIONS = frozenset(
    """
    --backend-store-uri --collector --data_split --embed-layernorm --exclude --gres --help
    --help-all --install-completion --logdir --profiling --rampup-batch-size --version
    """.split()  # noqa: SIM905
)
"""Options of other programs, of `paceline` itself, and those that every command has."""


def test_every_option_in_the_text_exists():
    """Pages of engines name options of other programs, and pages for developers are left out."""
    verbs = [verb for table in (*VERBS.values(), *GROUPS.values()) for verb in table]
    params = [param for verb in verbs if verb.source != "group" for param in verb.command().params]
    options = {name for param in params for name in (*param.opts, *param.secondary_opts)}
    for path in DOCUMENTS:
        if not {"dev", "engines"} & set(path.parts):
            text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
            spans = " ".join(re.findall(r"`([^`\n]+)`", text))
            named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", spans))
            assert named - options <= FOREIGN_OPTIONS, path


def test_an_option_that_is_not_there_is_noticed():
    with pytest.raises(Exception, match="is not an option"):
        parsed("paceline run tiny-llama --fast")
