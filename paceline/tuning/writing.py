"""The best layout as a recipe of its own."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from paceline.core.layout import Layout
from paceline.errors import UserError
from paceline.placement import Request
from paceline.plan import with_data_file
from paceline.recipe import Recipe, load_recipe, recipe_path, resolve
from paceline.rundir import write_text
from paceline.tuning.candidates import Candidates


def tuned(request: Request, candidates: Candidates, layout: Layout) -> tuple[Recipe, str | None]:
    """(the recipe as it was asked for, in that layout and on those devices; what had to be left out).

    A ramp-up whose first batches the layout cannot divide is left out.
    """
    recipe = load_recipe(request.recipe, request.variant, request.overrides)
    recipe = with_data_file(recipe, recipe_path(request.recipe).parent)
    cluster = candidates.spec.cluster
    found = recipe.model_copy(update={
        "name": f"{recipe.name}-tuned", "layout": layout, "variants": {},
        "devices": cluster.devices_per_node if cluster.nodes == 1 else recipe.devices,
    })  # fmt: skip
    try:
        resolve(found, cluster, True, None)
    except UserError as error:
        steady = found.training.model_copy(update={"ramp_up": None})
        return found.model_copy(update={"training": steady}), error.what
    return found, None


def write_recipe(recipe: Recipe, path: Path, head: str) -> None:
    """Write a recipe as YAML below a line of comment; what is as usual is left out."""
    content: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True)
    content["model"] = {"kind": recipe.model.kind, **content["model"]}
    text = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False  # type: ignore[assignment]
    yaml.width = 100
    yaml.dump(content, text)
    write_text(path, f"# {head}\n{text.getvalue()}")
