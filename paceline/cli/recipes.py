"""`paceline recipes`: what can be run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Json
from paceline.cli.output import Column, TableForm, TableFormat, Where, emit_table, select_rows

if TYPE_CHECKING:
    from paceline.recipe import Recipe


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="One recipe by name or file: prints its YAML.")
    ] = None,
    fields: Annotated[
        bool, typer.Option("--fields", help="List every field that --set can override.")
    ] = False,
    where: Where = None,
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
        _print_fields(form)
    elif name is not None:
        _print_one(name, form)
    else:
        emit_table(select_rows(_rows(), where), _columns(), form)


def _rows() -> list[dict[str, Any]]:
    from paceline.recipe import load_recipe, recipe_names

    return [_summary(load_recipe(name)) for name in recipe_names()]


def _summary(recipe: Recipe) -> dict[str, Any]:
    from paceline.core.shape import num_parameters

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
    from paceline.units import count

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
    from paceline.cli.output import emit_json
    from paceline.recipe import load_recipe, recipe_path

    recipe = load_recipe(name)
    if form is TableFormat.json:
        emit_json(recipe.model_dump(mode="json"))
    else:
        typer.echo(recipe_path(name).read_text(encoding="utf-8"), nl=False)


def _print_fields(form: TableFormat) -> None:
    from paceline.recipe import override_keys

    emit_table([{"field": key} for key in override_keys()], [Column("field", "field")], form)
