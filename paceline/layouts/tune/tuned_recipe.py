"""The best layout as a recipe of its own."""

from __future__ import annotations

import os
import shlex
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.hosts import compress
from paceline.core.layout import Layout
from paceline.files.documents import write_text
from paceline.files.recipe import Recipe, load_recipe, recipe_path, resolve
from paceline.files.staged import with_staged_files
from paceline.layouts.tune.candidates import Candidates
from paceline.machines.placement import Request
from paceline.runs.data_files import with_data_file


def tuned_recipe(
    request: Request, candidates: Candidates, layout: Layout
) -> tuple[Recipe, str | None]:
    """(the recipe as it was asked for, in that layout on those devices; what was left out).

    A ramp-up whose first batches the layout cannot divide is left out.
    """
    recipe = load_recipe(request.recipe, request.variant, request.overrides)
    recipe = with_data_file(with_staged_files(recipe), recipe_path(request.recipe).parent)
    cluster = candidates.spec.cluster
    tuned = recipe.model_copy(
        update={
            "name": f"{recipe.name}-tuned",
            "layout": layout,
            "variants": {},
            "devices": cluster.devices_per_node if cluster.nodes == 1 else recipe.devices,
        }
    )
    try:
        resolve(tuned, cluster, True, None)
    except UserError as error:
        steady = tuned.training.model_copy(update={"ramp_up": None})
        return tuned.model_copy(update={"training": steady}), error.what
    return tuned, None


def check_place(path: Path, recipe: str) -> None:
    """Raise UserError where no recipe can be written, or the tuning's own would be lost."""
    where = f"--write {path}"
    place = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise UserError(where, "is a folder", remedy=f"--write {path / 'tuned.yaml'}")
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise UserError(where, f"{place} is no folder that can be written to")
    if path.absolute() == recipe_path(recipe).absolute():
        raise UserError(where, "is the recipe itself", remedy="another file")


def run_command(request: Request, cluster: Cluster, path: Path) -> str | None:
    """The command that runs a recipe where its trials ran; None on this machine."""
    if cluster.runs_here:
        return None
    where = request.where
    options: dict[str, object] = {
        "cluster": request.cluster,
        "hosts": compress([host.name for host in where.hosts]) or None,
        "nodes": where.nodes,
        "launcher": where.launcher,
        "allocation": where.allocation,
        "interface": where.interface,
        "bind": where.bind,
        "ssh-config": where.ssh_config,
        "devices": None if request.cluster else cluster.devices_per_node,
        "device": None if request.device == "auto" else request.device,
    }
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return shlex.join(["paceline", "run", str(path), *words])


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
