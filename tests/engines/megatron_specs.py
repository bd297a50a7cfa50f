"""Recipes as runs of Megatron-LM and Megatron-DeepSpeed, and command lines as settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.files import catalog
from paceline.files.recipe import load_recipe, resolve

Settings = dict[str, tuple[str, ...]]
CHECKOUT = 'engine_settings.checkout="/code/megatron"'


def study(
    folder: Path,
    *changes: str,
    variant: str | None = None,
    name: str = "megatron_deepspeed",
    recipe: str = "gpt-1b3",
) -> RunSpec:
    """The 1.3B study on two nodes of its cluster, with an indexed data set in `folder`."""
    data = folder / "pile_text_document.bin"
    data.touch()
    tokens = ("data.source=tokens", f"data.path={data}")
    overrides = (f"engine={name}", CHECKOUT, *tokens, *changes)
    cluster = catalog.cluster("jean-zay-v100-32g")
    return resolve(load_recipe(recipe, variant, overrides), cluster, False, variant)


def settings(words: Sequence[str]) -> Settings:
    """Options of a command line with their values; raises AssertionError for one given twice."""
    told: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in told, word
            told[word] = []
        else:
            told[list(told)[-1]].append(word)
    return {name: tuple(values) for name, values in told.items()}


def started(spec: RunSpec) -> Settings:
    """The options with which the engine of `spec` starts pretrain_gpt.py."""
    assert engine(spec.engine).unsupported(spec) == []
    program = engine(spec.engine).job(spec, spec.recipe).program
    return settings(program[program.index("pretrain_gpt.py") + 1 :])


def same(one: Settings, other: Settings) -> bool:
    """Whether two sets of options mean the same; numbers are compared as numbers."""
    return _numbers(one) == _numbers(other)


def _numbers(told: Settings) -> dict[str, tuple[object, ...]]:
    return {name: tuple(map(_number, values)) for name, values in told.items()}


def _number(word: str) -> object:
    try:
        return float(word)
    except ValueError:
        return word
