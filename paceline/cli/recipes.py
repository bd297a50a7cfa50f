"""`paceline recipes`: list the recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from paceline.cli.options import Json
from paceline.cli.output import (
    TableForm,
    TableFormat,
    WhereOption,
    emit_json,
    emit_table,
    refuse_where,
    select_rows,
)
from paceline.cli.terminal import echo
from paceline.core.shape import num_parameters
from paceline.core.units import count
from paceline.files.field_docs import field_docs
from paceline.files.recipe import Recipe, load_recipe, recipe_names, recipe_path
from paceline.report.document import Column


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Recipe name or file whose YAML is printed.")
    ] = None,
    fields: Annotated[
        bool, typer.Option("--fields", help="List all fields that --set takes, with their meaning.")
    ] = False,
    where: WhereOption = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """List the recipes, or print one as a starting point for your own.

    Examples:

      paceline recipes

      paceline recipes tiny-llama > mine.yaml && paceline run mine.yaml
    """
    form = TableFormat.json if as_json else form
    if fields:
        _print_fields(where, form)
    elif name is not None:
        refuse_where(where, name)
        _print_one(name, form)
    else:
        emit_table(select_rows(_rows(), where), _columns(), form)


def _rows() -> list[dict[str, Any]]:
    return [_summary(load_recipe(name)) for name in recipe_names()]


def _summary(recipe: Recipe) -> dict[str, Any]:
    training = recipe.training
    return {
        "recipe": recipe.name,
        "parameters": num_parameters(recipe.model),
        "seq_len": training.seq_len,
        "batch": training.global_batch or f"{training.batch_per_device}/device",
        "dtype": training.dtype,
        "devices": recipe.devices,
        "variants": " ".join(recipe.variants) or None,
        "title": recipe.title,
    }


def _columns() -> list[Column]:
    return [
        Column("recipe", "recipe"),
        Column("parameters", "parameters", count, "right"),
        Column("seq_len", "seq", str, "right"),
        Column("batch", "batch", str, "right"),
        Column("dtype", "dtype"),
        Column("devices", "devices", str, "right"),
        Column("variants", "variants"),
        Column("title", "title"),
    ]


def _print_one(name: str, form: TableFormat) -> None:
    recipe = load_recipe(name).model_dump(mode="json")
    if form is TableFormat.text:
        echo(recipe_path(name).read_text(encoding="utf-8"), nl=False)
    elif form is TableFormat.json:
        emit_json(recipe)
    else:
        rows = [{"field": field, "value": value} for field, value in _flat(recipe)]
        emit_table(rows, [Column("field", "field"), Column("value", "value")], form)


def _flat(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every field by its dotted name, as for --set, with its value; lists as JSON."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            plain = json.dumps(value) if isinstance(value, dict | list | bool) else value
            yield f"{above}{name}", plain


def _print_fields(where: list[str] | None, form: TableFormat) -> None:
    docs = [asdict(doc) for doc in field_docs(Recipe)]
    rows = select_rows(sorted(docs, key=lambda row: row["field"]), where)
    columns = [
        Column(name, name, wraps=name == "meaning")
        for name in ("field", "type", "default", "meaning")
    ]
    emit_table(rows, columns, form)
