"""Repetition of a bundle's run on this machine: its needed, missing and changed inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from paceline.compare.over_time.environment import (
    EnvironmentChange,
    environment_changes,
    environment_items,
)
from paceline.core.assets import Manifest
from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.core.run_inputs import RunInput
from paceline.core.secrets import REDACTED
from paceline.core.value import Value
from paceline.engines import engine
from paceline.files.inputs import INDEXED, find_input
from paceline.files.run_folder import read_record
from paceline.files.staged import CONTENT_FOLDER, asset_state, read_manifest, stage_root
from paceline.machines.node.binding import with_binding
from paceline.machines.probe.inventory import inventory
from paceline.runs.bundles.verification import OpenedBundle, check_opened
from paceline.runs.data_files import TokenFile, with_tokens
from paceline.runs.difference import read_inputs
from paceline.runs.plan import Plan, replan
from paceline.runs.run_environment import recorded_environment

InputState = Literal["here", "staged here", "another", "missing"]


class NeededInput(Value):
    """Input of the run, and its state on this machine."""

    field: str
    was: str
    """Path on the machine of the run."""
    identity: str
    state: InputState
    path: str | None
    """Path on this machine."""


@dataclass(frozen=True)
class Repetition:
    """Plan and inputs that repeat a run on this machine."""

    plan: Plan
    needed: tuple[NeededInput, ...]
    environment: tuple[EnvironmentChange, ...]
    """Differences between the bundle's environment (before) and this machine's (after)."""
    obstacles: tuple[str, ...]
    """Reasons why it cannot start on this machine; empty if it can."""


def repetition(opened: OpenedBundle, path: Path, runs: Path) -> Repetition:
    """Return the plan of a bundle's run for this machine; no code of the bundle is run.

    Raises UserError for a damaged bundle, and for a run that Paceline did not start.
    """
    if check_opened(opened, path).faults:
        raise UserError(str(path), "is damaged", remedy=f"`paceline verify {path}` names the files")
    spec = read_record(opened.folder).spec
    if spec is None:
        raise UserError(str(path), "is of an imported log: nobody knows what was started")
    needed = tuple(_needed(part) for part in read_inputs(opened.folder).values())
    obstacles = [
        f"{part.field}: {part.was} ({part.identity}) is {_OBSTACLE[part.state]}"
        for part in needed
        if part.state in _OBSTACLE and part.field not in _made_of(needed)
    ]
    spec, tokens = _with_inputs(spec, needed, runs)
    if REDACTED in spec.model_dump_json():
        obstacles.append(f"a secret of the command or settings reads {REDACTED}")
    try:
        plan = replan(spec)
    except UserError as error:
        obstacles.append(str(error))
        plan = Plan(spec, with_binding(engine(spec.engine).job(spec, spec.recipe)), inventory())
    then = recorded_environment(opened.folder, {})
    changes = environment_changes([then], [environment_items(plan.inventory, {})])
    plan = replace(plan, token_files=tokens)
    return Repetition(plan, needed, changes, tuple(obstacles))


_OBSTACLE = {
    "another": "another one here",
    "missing": "not here: stage it, or put it there",
}


def _made_of(needed: tuple[NeededInput, ...]) -> Mapping[str, str]:
    """Return the fields whose tokens are made again from a text, with the field of that text."""
    fields = {part.field: part for part in needed}
    pairs = (
        ("data.path", "data.text"),
        ("training.evaluation.path", "training.evaluation.text"),
    )
    return {of: text for of, text in pairs if text in fields}


def _needed(part: RunInput) -> NeededInput:
    """Find an input on this machine, in a staged asset of equal content or at the same path."""
    other: Path | None = None
    for path, state in _places(part):
        there = find_input(part.field, path)
        if there is not None and there.is_alike(part):
            return _needed_input(part, state, path)
        if there is not None and (part.asset is not None or state == "here"):
            other = other or path
    return _needed_input(part, "another" if other else "missing", other)


def _needed_input(part: RunInput, state: InputState, path: Path | None) -> NeededInput:
    return NeededInput(
        field=part.field,
        was=part.path,
        identity=part.identity,
        state=state,
        path=None if path is None else str(path),
    )


def _places(part: RunInput) -> Iterator[tuple[Path, InputState]]:
    """Yield candidate paths of an input with the state that each means; its own asset first."""
    if part.asset is not None:
        for content, _ in _staged(part.asset):
            yield content / part.inside, "staged here"
    yield Path(part.path), "here"
    if part.asset is None and part.sha256 is not None:
        for content, manifest in _staged("*"):
            for name in _called(Path(part.path).name, manifest, part.files > 1):
                yield content / name, "staged here"


def _staged(asset: str) -> Iterator[tuple[Path, Manifest]]:
    """Yield content and manifest of all staged assets of a name, from any recipe."""
    for folder in sorted(stage_root().glob(f"{asset}-*")):
        manifest = read_manifest(folder)
        if manifest is not None and asset_state(folder) == "staged":
            yield folder / CONTENT_FOLDER, manifest


def _called(name: str, manifest: Manifest, or_all: bool) -> Iterator[PurePosixPath]:
    """Yield files, prefixes and folders of that name in an asset, then the asset's root."""
    files = {PurePosixPath(file.path) for file in manifest.files}
    prefixes = {file.with_suffix("") for file in files if file.suffix in INDEXED}
    folders = {folder for file in files for folder in file.parents}
    yield from sorted(path for path in files | prefixes | folders if path.name == name)
    if or_all:
        yield PurePosixPath()


def _with_inputs(
    spec: RunSpec, needed: tuple[NeededInput, ...], runs: Path
) -> tuple[RunSpec, tuple[TokenFile, ...]]:
    """Return the run with the inputs of this machine; a text is tokenized again."""
    places = {part.was: part.path for part in needed if part.path is not None}
    content = cast(dict[str, Any], _placed(spec.model_dump(mode="json"), places))
    cluster: dict[str, Any] = content["cluster"]
    if spec.cluster.runs_here:
        cluster["python"] = None  # That machine's interpreter does not exist here.
    texts = {part.field: part.path for part in needed if part.path is not None}
    text = texts.get("data.text")
    if text is not None:
        kind = "jsonl" if text.endswith((".jsonl", ".json")) else "text"
        content["data"] |= {"source": kind, "path": text}
        if evaluation := texts.get("training.evaluation.text"):
            content["training"]["evaluation"]["path"] = evaluation
    placed = RunSpec.model_validate(content)
    return with_tokens(placed, runs, placed.recipe) if text is not None else (placed, ())


def _placed(value: object, places: Mapping[str, str]) -> object:
    if isinstance(value, dict):
        items = cast(dict[str, object], value).items()
        return {name: _placed(part, places) for name, part in items}
    if isinstance(value, list):
        return [_placed(part, places) for part in cast(list[object], value)]
    return places.get(value, value) if isinstance(value, str) else value


def obstacles_text(repeat: Repetition) -> Iterator[str]:
    """Yield found inputs, obstacles and environment changes, one line each."""
    for part in repeat.needed:
        if part.state in ("here", "staged here"):
            yield f"{part.field}: {part.identity}: {part.state} ({part.path})"
    yield from repeat.obstacles
    for change in repeat.environment:
        yield f"{change.item}: there {change.before}, here {change.after}"
