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
from paceline.core.assets import Manifest, RunInput
from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.core.secrets import REDACTED
from paceline.core.value import Value
from paceline.engines import engine
from paceline.files.inputs import INDEXED, find_input
from paceline.files.run_folder import read_record
from paceline.files.staged import CONTENT_FOLDER, asset_state, read_manifest, stage_root
from paceline.machines.node.binding import with_binding
from paceline.machines.probe.inventory import inventory
from paceline.runs.bundles.verification import BundleContents, refuse_damage
from paceline.runs.data_files import TokenFile, with_tokens
from paceline.runs.difference import read_inputs
from paceline.runs.plan import Plan, replan
from paceline.runs.run_environment import recorded_environment

InputState = Literal["here", "staged here", "different", "missing"]


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
    inputs: tuple[NeededInput, ...]
    environment: tuple[EnvironmentChange, ...]
    """Differences between the bundle's environment (before) and this machine's (after)."""
    obstacles: tuple[str, ...]
    """Reasons why it cannot start on this machine; empty if it can."""


def repetition(contents: BundleContents, path: Path, runs: Path) -> Repetition:
    """Return the plan of a bundle's run for this machine; no code of the bundle is run.

    Raises UserError for a damaged bundle, and for a run that Paceline did not start.
    """
    refuse_damage(contents, path)
    spec = read_record(contents.folder).spec
    if spec is None:
        raise UserError(str(path), "contains an imported log, so its command is unknown")
    inputs = tuple(_locate_input(part) for part in read_inputs(contents.folder).values())
    obstacles = [
        f"{part.field}: {part.was} ({part.identity}) is {_OBSTACLE[part.state]}"
        for part in inputs
        if part.state in _OBSTACLE and part.field not in _text_fields(inputs)
    ]
    spec, tokens = _with_inputs(spec, inputs, runs)
    if REDACTED in spec.model_dump_json():
        obstacles.append(f"a secret in the command or settings was replaced by {REDACTED}")
    try:
        plan = replan(spec)
    except UserError as error:
        obstacles.append(str(error))
        plan = Plan(spec, with_binding(engine(spec.engine).job(spec, spec.recipe)), inventory())
    before = recorded_environment(contents.folder)
    changes = environment_changes([before], [environment_items(plan.inventory, {})])
    plan = replace(plan, token_files=tokens)
    return Repetition(plan, inputs, changes, tuple(obstacles))


_OBSTACLE = {
    "different": "different on this machine",
    "missing": "missing on this machine: stage it or copy it there",
}


def _text_fields(inputs: tuple[NeededInput, ...]) -> Mapping[str, str]:
    """Return the fields whose tokens are made again from a text, with the field of that text."""
    fields = {part.field: part for part in inputs}
    pairs = (
        ("data.path", "data.text"),
        ("training.evaluation.path", "training.evaluation.text"),
    )
    return {of: text for of, text in pairs if text in fields}


def _locate_input(part: RunInput) -> NeededInput:
    """Find an input on this machine, in a staged asset of equal content or at the same path."""
    other: Path | None = None
    for path, state in _places(part):
        local_input = find_input(part.field, path)
        if local_input is not None and local_input.is_alike(part):
            return _needed_input(part, state, path)
        if local_input is not None and (part.asset is not None or state == "here"):
            other = other or path
    return _needed_input(part, "different" if other else "missing", other)


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
        for content, _ in _staged_assets(part.asset):
            yield content / part.inside, "staged here"
    yield Path(part.path), "here"
    if part.asset is None and part.sha256 is not None:
        for content, manifest in _staged_assets("*"):
            for name in _paths_of_name(Path(part.path).name, manifest, part.files > 1):
                yield content / name, "staged here"


def _staged_assets(asset: str) -> Iterator[tuple[Path, Manifest]]:
    """Yield content and manifest of all staged assets of a name, from any recipe."""
    for folder in sorted(stage_root().glob(f"{asset}-*")):
        manifest = read_manifest(folder)
        if manifest is not None and asset_state(folder) == "staged":
            yield folder / CONTENT_FOLDER, manifest


def _paths_of_name(name: str, manifest: Manifest, or_all: bool) -> Iterator[PurePosixPath]:
    """Yield files, prefixes and folders of that name in an asset, then the asset's root."""
    files = {PurePosixPath(file.path) for file in manifest.files}
    prefixes = {file.with_suffix("") for file in files if file.suffix in INDEXED}
    folders = {folder for file in files for folder in file.parents}
    yield from sorted(path for path in files | prefixes | folders if path.name == name)
    if or_all:
        yield PurePosixPath()


def _with_inputs(
    spec: RunSpec, inputs: tuple[NeededInput, ...], runs: Path
) -> tuple[RunSpec, tuple[TokenFile, ...]]:
    """Return the run with the inputs of this machine; a text is tokenized again."""
    places = {part.was: part.path for part in inputs if part.path is not None}
    content = cast(dict[str, Any], _with_paths(spec.model_dump(mode="json"), places))
    cluster: dict[str, Any] = content["cluster"]
    if spec.cluster.runs_here:
        cluster["python"] = None  # That machine's interpreter does not exist here.
    texts = {part.field: part.path for part in inputs if part.path is not None}
    text = texts.get("data.text")
    if text is not None:
        kind = "jsonl" if text.endswith((".jsonl", ".json")) else "text"
        content["data"] |= {"source": kind, "path": text}
        if evaluation := texts.get("training.evaluation.text"):
            content["training"]["evaluation"]["path"] = evaluation
    local_spec = RunSpec.model_validate(content)
    return (
        with_tokens(local_spec, runs, local_spec.recipe) if text is not None else (local_spec, ())
    )


def _with_paths(value: object, places: Mapping[str, str]) -> object:
    if isinstance(value, dict):
        items = cast(dict[str, object], value).items()
        return {name: _with_paths(part, places) for name, part in items}
    if isinstance(value, list):
        return [_with_paths(part, places) for part in cast(list[object], value)]
    return places.get(value, value) if isinstance(value, str) else value


def obstacles_text(repeat: Repetition) -> Iterator[str]:
    """Yield found inputs, obstacles and environment changes, one line each."""
    for part in repeat.inputs:
        if part.state in ("here", "staged here"):
            yield f"{part.field}: {part.identity}: {part.state} ({part.path})"
    yield from repeat.obstacles
    for change in repeat.environment:
        yield f"{change.item}: {change.before} in the bundle, {change.after} here"
