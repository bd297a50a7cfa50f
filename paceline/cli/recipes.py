"""`paceline recipes`: list the recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
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
from paceline.core.errors import UserError
from paceline.core.shape import num_parameters
from paceline.core.units import count
from paceline.files.documents import write_output
from paceline.files.field_docs import field_docs
from paceline.files.recipe import Recipe, load_recipe, recipe_names, recipe_yaml
from paceline.report.document import Column

NEW = "new"
"""Word in place of a recipe's name that makes a recipe from a Hugging Face model."""


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Recipe or Hugging Face model to print, or `new` with --from."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Hugging Face model of a new recipe: name, folder or config.json.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the YAML to this file instead of printing it."),
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

      paceline recipes new --from meta-llama/Llama-3.1-8B --output mine.yaml
    """
    form = TableFormat.json if as_json else form
    if name == NEW:
        if source is None:
            allowed = "config.json, a folder with one, or a name on the Hugging Face Hub"
            raise UserError("recipes new", "needs --from MODEL", allowed=allowed)
        name = source
    elif source is not None:
        remedy = f"write `paceline recipes new --from {source}`"
        raise UserError("--from", "has an effect only with `new`", remedy=remedy)
    if fields:
        _print_fields(where, form)
    elif name is not None:
        refuse_where(where, name)
        _print_one(name, form, output)
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


def _print_one(name: str, form: TableFormat, output: Path | None) -> None:
    recipe = load_recipe(name).model_dump(mode="json")
    if output is not None:
        if output.exists():
            raise UserError(f"--output {output}", "exists", remedy="choose another name")
        write_output(output, recipe_yaml(name))
        echo(f"wrote {output}; try `paceline estimate {output} --device H100 --gpus 8`", err=True)
    elif form is TableFormat.text:
        echo(recipe_yaml(name), nl=False)
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
