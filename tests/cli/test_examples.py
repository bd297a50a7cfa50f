"""The examples of all help texts: understood as they stand, and run where that is quick."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paceline.cli import app
from paceline.cli.verbs import GROUPS, VERBS
from tests.command import paceline

QUICK = ("table convert", "check hosts", "recipes", "scale --from")
"""Beginnings of examples that need neither runs nor logs nor minutes."""
ELSEWHERE = ("--idle", "--check", "meta-llama/", "stage", "install", "remove")
"""What needs a cluster or a network."""
MEASURED = "nodes,host,samples_per_s,benchmark\n" + "".join(
    f"1,node-{number},{70 + number % 3}.25,opt-13b_bs16_zero0\n1,node-{number},{940 + number},b\n"
    for number in range(1, 9)
)


def examples() -> Iterator[tuple[str, ...]]:
    """The words of every example, without the remark that stands behind two spaces."""
    groups = {"": [verb for verbs in VERBS.values() for verb in verbs], **GROUPS}
    for verbs in groups.values():
        for verb in verbs:
            text = "" if verb.source == "group" else verb.function().__doc__ or ""
            for paragraph in re.split(r"\n\s*\n", text):
                command = re.search(r"^\s*(?:Example: )?paceline ((?:.|\n)*)", paragraph)
                for part in command[1].split("&& paceline ") if command else ():
                    line = re.split(r" {2,}(?=\S)", re.sub(r"\n\s*", " ", part))[0]
                    yield tuple(shlex.split(line.partition(" > ")[0]))


def runs(words: tuple[str, ...]) -> bool:
    """Whether an example is answered at once, on any machine."""
    text = " ".join(words)
    return text.startswith(QUICK) and not any(odd in text for odd in ELSEWHERE)


@pytest.mark.parametrize("words", sorted(set(examples())), ids=" ".join)
def test_every_example_of_a_help_text_is_understood(words: tuple[str, ...]):
    """Its options exist and take these values; nothing is called."""
    command: Any = typer.main.get_command(app)
    context, rest = command.make_context("paceline", ["recipes"]), list(words)
    while hasattr(command, "resolve_command"):
        _, command, rest = command.resolve_command(context, rest)
    command.make_context(words[0], rest, parent=context)


@pytest.mark.parametrize("words", sorted(set(filter(runs, examples()))), ids=" ".join)
def test_quick_examples_run_as_they_stand(words: tuple[str, ...], tmp_path: Path):
    (tmp_path / "hosts.txt").write_text("node-1\nnode-2\n")
    (tmp_path / "results.csv").write_text(MEASURED)
    done = paceline(*words, cwd=tmp_path, runs=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_words_of_an_example_end_where_its_remark_begins():
    words = set(examples())
    assert ("run", "llama31-8b", "--dry-run") in words and ("run", "mine.yaml") in words
    assert len(words) > 60
