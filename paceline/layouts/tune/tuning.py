"""Run a layout search: find candidates, recall earlier runs, search, write the best recipe."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.hosts import compress
from paceline.core.layout import Layout
from paceline.core.units import pluralize, step_seconds
from paceline.estimate.calibrate.lookup import FileEvidence
from paceline.files.documents import write_output, write_text, write_value
from paceline.files.recipe import Recipe, load_recipe, recipe_path, resolve
from paceline.files.staged import with_staged_files
from paceline.files.yaml_file import yaml_text
from paceline.layouts.search.space import SearchSpace
from paceline.layouts.sweep.plan import group_name
from paceline.layouts.sweep.trials import SweepObserver
from paceline.layouts.tune.candidates import Candidates, find_candidates
from paceline.layouts.tune.result import (
    TuneResult,
    effects,
    label,
    prediction,
    sentences,
    tune_rows,
    untried_layouts,
)
from paceline.layouts.tune.search import Budget, Learner, Search, resume_search, start_search
from paceline.layouts.tune.trials import LayoutRunner
from paceline.machines.placement import Request, choose_cluster
from paceline.machines.probe.inventory import inventory
from paceline.runs.data_files import with_data_file


def tuned_recipe(
    request: Request, find_candidates: Candidates, layout: Layout
) -> tuple[Recipe, str | None]:
    """Return the recipe in a layout, and the reason if its batch ramp-up was removed.

    A ramp-up is removed if the layout does not divide its first batches.
    """
    recipe = load_recipe(request.recipe, request.variant, request.overrides)
    recipe = with_data_file(with_staged_files(recipe), recipe_path(request.recipe).parent)
    cluster = find_candidates.spec.cluster
    changed_recipe = recipe.model_copy(
        update={
            "name": f"{recipe.name}-tuned",
            "layout": layout,
            "variants": {},
            "devices": cluster.devices_per_node if cluster.nodes == 1 else recipe.devices,
        }
    )
    try:
        resolve(changed_recipe, cluster, True, None)
    except UserError as error:
        steady = changed_recipe.training.model_copy(update={"ramp_up": None})
        return changed_recipe.model_copy(update={"training": steady}), error.what
    return changed_recipe, None


def check_recipe_path(path: Path, recipe: str) -> None:
    """Raise UserError if no recipe can be written to `path`, or it would overwrite its source."""
    where = f"--save-recipe {path}"
    place = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise UserError(where, "is a folder", remedy=f"--save-recipe {path / 'tuned.yaml'}")
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise UserError(where, f"{place} is not a writable folder")
    if path.resolve() == recipe_path(recipe).resolve():
        raise UserError(where, "is the recipe itself", remedy="another file")


def rerun_command(request: Request, cluster: Cluster, path: Path) -> str | None:
    """Return the command that runs a recipe on the hosts of its trials; None on this machine."""
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
        "ray-address": where.ray_address,
        "devices": None if request.cluster else cluster.devices_per_node,
        "device": None if request.device == "auto" else request.device,
    }
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return shlex.join(["paceline", "run", str(path), *words])


def write_recipe(recipe: Recipe, path: Path, head: str, *, follow: bool = False) -> None:
    """Write a recipe as YAML below one comment line; defaults are omitted.

    `follow` keeps a link at `path`, for a path that the user names.
    """
    content: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True)
    content["model"] = {"kind": recipe.model.kind, **content["model"]}
    write = write_output if follow else write_text
    write(path, f"# {head}\n{yaml_text(content)}")


RESULT_FILE = "tune.json"
SCHEDULES = ("gpipe", "1f1b", "zero-bubble")


@dataclass(frozen=True)
class TuneOptions:
    """Options of a layout search."""

    request: Request
    budget: Budget
    space: SearchSpace
    steps: int | None = None
    """Steps per trial; None takes the recipe's."""
    name: str | None = None
    write: Path | None = None
    """File for the recipe of the best layout; None writes it to the result folder."""
    oversubscribe: bool = False
    tag: str | None = None

    @property
    def trial_request(self) -> Request:
        """Request of a trial."""
        steps = (f"training.steps={self.steps}",) if self.steps else ()
        return replace(self.request, overrides=(*self.request.overrides, *steps))


@dataclass
class Tuning:
    """A layout search that is ready to run."""

    options: TuneOptions
    name: str
    root: Path
    command: list[str]
    search: Search
    runs: LayoutRunner
    oversubscribed: bool

    @property
    def folder(self) -> Path:
        """Folder of the result and the recipe."""
        return self.root / self.name

    def run(self, observer: SweepObserver) -> TuneResult:
        """Run trials, then write the best layout and the result.

        A failed run becomes a row. KeyboardInterrupt ends the current run and the search, and the
        result so far is written. Raises UserError for invalid input.
        """
        self.runs.observer = observer
        resume_search(self.search, self.runs, self.options.budget)
        result = self.result()
        if result.rows:
            result = result.model_copy(update=self._write(result))
            write_value(self.folder / RESULT_FILE, result)
        return result

    def result(self) -> TuneResult:
        """Return the current result."""
        search, find_candidates = self.search, self.search.candidates
        is_promising, spec = search.is_promising, find_candidates.spec
        is_untried = [
            row not in search.tried_layouts for row in range(len(find_candidates.layouts))
        ]
        is_pruned = is_untried & ~find_candidates.likely_to_fit
        result = TuneResult(
            name=self.name,
            recipe=spec.recipe,
            variant=spec.variant,
            device=spec.cluster.device_label or spec.cluster.device,
            devices=spec.world_size,
            oversubscribed=self.oversubscribed,
            budget=str(self.options.budget),
            num_runs=len(search.took_s),
            took_s=sum(search.took_s),
            n_layouts=len(find_candidates.layouts),
            n_infeasible=find_candidates.num_infeasible,
            n_pruned=int(is_pruned.sum()),
            n_dominated=int((is_untried & search.surely_out).sum()),
            n_hopeful=int(is_promising.sum()),
            stop=search.stop,
            rows=tune_rows(search, self.runs),
            effects=effects(search),
            untried_layouts=untried_layouts(search),
            evidence=find_candidates.evidence.title,
            resume_command=shlex.join(["paceline", *self.command[1:]])
            if search.stop == "interrupted"
            else None,
        )
        lines = [*sentences(result, search.belief.noise_sd)]
        lines += (
            [f"no further run is possible: {self.runs.halt_reason}"]
            if self.runs.halt_reason
            else []
        )
        return result.model_copy(update={"sentences": tuple(lines)})

    def _write(self, result: TuneResult) -> dict[str, Any]:
        """Write the recipe of the best layout; return the fields of the result to update."""
        best = result.best
        if best is None:
            return {}
        recipe, ramp_up_problem = tuned_recipe(
            self.options.request, self.search.candidates, best.layout
        )
        path = self.options.write or self.folder / f"{recipe.name}.yaml"
        seconds = step_seconds(best.step_time_s or 0.0)
        head = (
            f"{best.label}: {seconds} s per step on {result.devices} x {result.device}, "
            f"the fastest of {pluralize(len(result.rows), 'layout')} tried"
        )
        write_recipe(recipe, path, head, follow=self.options.write is not None)
        more = (
            [f"the batch ramp-up was removed from the recipe: {ramp_up_problem}"]
            if ramp_up_problem
            else []
        )
        command = rerun_command(self.options.request, self.search.candidates.spec.cluster, path)
        more += [f"run it on the same hosts with: {command}"] if command else []
        return {"recipe_file": str(path), "sentences": (*result.sentences, *more)}


def new_tuning(
    options: TuneOptions, evidence: FileEvidence | None, root: Path, command: list[str]
) -> Tuning:
    """Return a layout search with its earlier runs, without running or writing anything.

    Raises UserError if no layout can run, or if there are more processes than physical cores.
    """
    request = options.trial_request
    stem = Path(request.recipe).stem
    name = group_name(options.name, "tune", stem, request, request.recipe, request.overrides)
    if options.write:
        check_recipe_path(options.write, options.request.recipe)
    is_oversubscribed = _is_oversubscribed(options)
    layouts = find_candidates(options.trial_request, evidence, options.space)
    runs = LayoutRunner(layouts, name, root, command, options.tag)
    search = start_search(layouts, Learner(layouts), runs.recall())
    runs.expect = lambda row: prediction(search, row)
    return Tuning(
        options=options,
        name=name,
        root=root,
        command=command,
        search=search,
        runs=runs,
        oversubscribed=is_oversubscribed,
    )


def headline(tuning: Tuning) -> str:
    """Return one line on what is known before the first run."""
    layouts, recipe_row = tuning.search.candidates, tuning.search.candidates.recipe_row
    parts = [
        f"{pluralize(len(layouts.layouts), 'layout')} can run",
        f"{layouts.num_infeasible:,} cannot",
    ]
    if beyond := int((~layouts.likely_to_fit).sum()):
        parts.append(f"{beyond:,} would run out of memory")
    if before := len(tuning.search.took_s):
        parts.append(f"{pluralize(before, 'earlier run')}")
    if recipe_row is not None:
        name = label(layouts.layouts[recipe_row], layouts.spec.world_size)
        parts.append(f"the recipe's own is {name}")
    return f"tune {tuning.name}: {', '.join(parts)}; budget {tuning.options.budget}"


def _is_oversubscribed(options: TuneOptions) -> bool:
    """Return whether processes share cores; raise UserError unless --oversubscribe allows it."""
    request, local = options.request, inventory()
    recipe = load_recipe(request.recipe, request.variant, request.overrides)
    cluster, _ = choose_cluster(request, recipe, local)
    if cluster.device != "cpu" or not cluster.runs_here:
        return False
    usable = local["cpu"]["usable_cores"]
    cores = min(local["cpu"]["physical_cores"] or usable, usable)
    if cluster.devices_per_node <= cores:
        return False
    if not options.oversubscribe:
        raise UserError(
            f"--gpus {cluster.devices_per_node}",
            f"exceeds the {pluralize(cores, 'physical core')} of this machine; "
            "processes would wait for each other",
            remedy="--oversubscribe allows it",
        )
    return True
