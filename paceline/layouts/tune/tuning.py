"""A tuning from the question to its result: candidates, runs of before, the search, the recipe."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.hosts import compress
from paceline.core.layout import Layout
from paceline.core.units import counted, step_seconds
from paceline.estimate.calibrate.lookup import GivenEvidence
from paceline.files.documents import write_text, write_value
from paceline.files.recipe import Recipe, load_recipe, recipe_path, resolve
from paceline.files.staged import with_staged_files
from paceline.layouts.search.space import Space
from paceline.layouts.sweep.trials import SweepObserver
from paceline.layouts.tune.candidates import Candidates, candidates
from paceline.layouts.tune.result import (
    TuneResult,
    effects,
    label,
    prediction,
    rows_of,
    sentences,
    untried,
)
from paceline.layouts.tune.search import Budget, Learner, Search, begin, go_on
from paceline.layouts.tune.trials import LayoutRunner
from paceline.machines.placement import Request, choose_cluster
from paceline.machines.probe.inventory import inventory
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
    where = f"--save-recipe {path}"
    place = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise UserError(where, "is a folder", remedy=f"--save-recipe {path / 'tuned.yaml'}")
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


RESULT_FILE = "tune.json"
SCHEDULES = ("gpipe", "1f1b", "zero-bubble")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class TuneOptions:
    """What the user asked for."""

    request: Request
    budget: Budget
    space: Space
    steps: int | None = None
    """Of a trial; None takes the recipe's."""
    name: str | None = None
    write: Path | None = None
    """Where the best layout goes as a recipe; None is the tuning's folder."""
    oversubscribe: bool = False
    tag: str | None = None

    @property
    def trial_request(self) -> Request:
        """The request of a trial."""
        steps = (f"training.steps={self.steps}",) if self.steps else ()
        return replace(self.request, overrides=(*self.request.overrides, *steps))


@dataclass
class Tuning:
    """A tuning that is ready to try."""

    options: TuneOptions
    name: str
    root: Path
    command: list[str]
    search: Search
    runs: LayoutRunner
    oversubscribed: bool

    @property
    def folder(self) -> Path:
        """Where its result and recipe lie."""
        return self.root / self.name

    def run(self, observer: SweepObserver) -> TuneResult:
        """Try what is worth it, then write the best layout and the result.

        A run that fails is a row. KeyboardInterrupt ends the running one, and then the search as
        far as it came. Raises UserError for wrong input.
        """
        self.runs.observer = observer
        go_on(self.search, self.runs, self.options.budget)
        result = self.result()
        if result.rows:
            result = result.model_copy(update=self._write(result))
            write_value(self.folder / RESULT_FILE, result)
        return result

    def result(self) -> TuneResult:
        """What is known now."""
        search, candidates = self.search, self.search.candidates
        hopeful, spec = search.hopeful, candidates.spec
        never = [row not in search.tried for row in range(len(candidates.layouts))]
        pruned = never & ~candidates.likely_to_fit
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
            n_layouts=len(candidates.layouts),
            n_infeasible=candidates.num_infeasible,
            n_pruned=int(pruned.sum()),
            n_dominated=int((never & search.surely_out).sum()),
            n_hopeful=int(hopeful.sum()),
            stop=search.stop,
            rows=rows_of(search, self.runs),
            effects=effects(search),
            untried=untried(search),
            evidence=candidates.evidence.title,
            go_on=shlex.join(["paceline", *self.command[1:]])
            if search.stop == "interrupted"
            else None,
        )
        lines = [*sentences(result, search.belief.noise_sd)]
        lines += [f"nothing more can run: {self.runs.halted}"] if self.runs.halted else []
        return result.model_copy(update={"sentences": tuple(lines)})

    def _write(self, result: TuneResult) -> dict[str, Any]:
        """The recipe of the best layout; what changes in the result by it."""
        best = result.best
        if best is None:
            return {}
        recipe, left_out = tuned_recipe(self.options.request, self.search.candidates, best.layout)
        path = self.options.write or self.folder / f"{recipe.name}.yaml"
        head = (
            f"{best.label}: {step_seconds(best.step_time_s or 0.0)} s a step on {result.devices} x "
            f"{result.device}, the fastest of {counted(len(result.rows), 'layout')} tried"
        )
        write_recipe(recipe, path, head)
        more = [f"the recipe has no ramp-up: {left_out}"] if left_out else []
        command = run_command(self.options.request, self.search.candidates.spec.cluster, path)
        more += [f"it runs on the same hosts with: {command}"] if command else []
        return {"recipe_file": str(path), "sentences": (*result.sentences, *more)}


def new_tuning(
    options: TuneOptions, given: GivenEvidence | None, root: Path, command: list[str]
) -> Tuning:
    """A tuning with the runs that it has already; nothing is run or written.

    Raises UserError when no layout can run, or when there are more processes than physical cores.
    """
    name = _name(options)
    if options.write:
        check_place(options.write, options.request.recipe)
    oversubscribed = _oversubscribed(options)
    layouts = candidates(options.trial_request, given, options.space)
    runs = LayoutRunner(layouts, name, root, command, options.tag)
    search = begin(layouts, Learner(layouts), runs.recall())
    runs.expect = lambda row: prediction(search, row)
    return Tuning(options, name, root, command, search, runs, oversubscribed)


def headline(tuning: Tuning) -> str:
    """What is known before the first run, in one line."""
    layouts, recipe_row = tuning.search.candidates, tuning.search.candidates.recipe_row
    parts = [
        f"{counted(len(layouts.layouts), 'layout')} can run",
        f"{layouts.num_infeasible:,} cannot",
    ]
    if beyond := int((~layouts.likely_to_fit).sum()):
        parts.append(f"{beyond:,} would run out of memory")
    if before := len(tuning.search.took_s):
        parts.append(f"{counted(before, 'run')} of before")
    if recipe_row is not None:
        name = label(layouts.layouts[recipe_row], layouts.spec.world_size)
        parts.append(f"the recipe's own is {name}")
    return f"tune {tuning.name}: {', '.join(parts)}; budget {tuning.options.budget}"


def _oversubscribed(options: TuneOptions) -> bool:
    """Whether processes share cores; raises UserError where that was not asked for."""
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
            f"is more than {counted(cores, 'physical core')} here can take; "
            "processes would wait for each other",
            remedy="--oversubscribe tunes all the same",
        )
    return True


def _name(options: TuneOptions) -> str:
    """As asked for, else one of the question, so that a longer budget finds the same runs."""
    if options.name is None:
        request = options.trial_request
        where = replace(request.where, allocation=None)
        place = (request.devices, request.device, request.cluster, where)
        content = (request.recipe, request.overrides, place)
        digest = hashlib.sha256(repr(content).encode()).hexdigest()[:4]
        parts = filter(None, (Path(request.recipe).stem, request.variant, "tune", digest))
        return "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.") for part in parts)
    if not _NAME.fullmatch(options.name) or options.name == "last":
        raise UserError(
            f"--name {options.name}",
            "cannot name a tuning",
            allowed="letters, digits, . _ and -, but not `last`",
        )
    return options.name
