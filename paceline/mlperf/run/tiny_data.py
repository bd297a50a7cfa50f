"""Training data of the tiny variants: texts, images, and the base model for adapters.

All of it is stored in the user's cache under a name derived from its content, and is created on
first use.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.mmdit import MMDiTShape
from paceline.core.result import Status
from paceline.files.documents import read_text
from paceline.files.recipe import load_recipe
from paceline.files.run_folder import read_record, run_folders
from paceline.files.temporary import replaced_file, temporary_folder
from paceline.machines.placement import HostPlacement, Request
from paceline.mlperf.rules import TRIAL_VARIANT, Benchmark
from paceline.runs import flow
from paceline.runs.checkpoints import CHECKPOINTS_FOLDER, LATEST_CHECKPOINT
from paceline.runs.plan import Plan, make_plan
from paceline.staging.conversions.random_data import Encoder, bfloat16_bits, pictures

NUM_IMAGES = 1152
BASE_STEPS = 240
BASE_SEED = 1
ShowProgress = Callable[[Plan], AbstractContextManager[flow.Watcher]]
"""Context manager that displays the progress of a run."""


@dataclass(frozen=True)
class TrialData:
    """Data of a trial, as overrides of its recipe."""

    overrides: tuple[str, ...]
    digest: str | None
    """Digest of the data; runs on different data are not comparable."""


def cache_folder() -> Path:
    """Return the data folder, below $XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "paceline" / "mlperf-tiny"


def prepare_data(benchmark: Benchmark, device: str, show: ShowProgress) -> TrialData:
    """Return the data of a tiny variant, created on first use; `show` displays base training.

    Raises SystemFaultError if the data cannot be created on this machine.
    """
    recipe = load_recipe(benchmark.recipe, TRIAL_VARIANT)
    if isinstance(recipe.model, MMDiTShape):
        return _images(recipe.model)
    if recipe.lora is None:
        return _text("code")
    prose, code = _text("prose"), _text("code")
    base = _base(benchmark, code, device, show)
    weights = f"training.initial_weights={base}"
    return TrialData((*prose.overrides, weights), f"{prose.digest}-{code.digest}")


def refuse_training(plan: Plan) -> NoReturn:
    """Raise UserError: a dry run does not train the base model."""
    raise UserError("the base model", "does not exist yet", remedy="run once without --dry-run")


def _text(domain: Domain) -> TrialData:
    content = training_text(domain)
    digest = hashlib.sha256(content).hexdigest()[:8]
    path = cache_folder() / f"{domain}-{digest}.txt"
    if not path.is_file():
        with replaced_file(path) as file:
            file.write(content)
    return TrialData(("data.source=text", f"data.path={path}"), digest)


def _images(shape: MMDiTShape) -> TrialData:
    cache_folder().mkdir(parents=True, exist_ok=True)
    with temporary_folder(cache_folder()) as folder:
        write_images(folder, shape, NUM_IMAGES)
        digest = _digest(folder)
        target = cache_folder() / f"images-{digest}"
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return TrialData(("data.source=latents", f"data.path={target / 'index.json'}"), digest)


def _base(benchmark: Benchmark, code: TrialData, device: str, show: ShowProgress) -> Path:
    """Return the checkpoint of the model without adapters, trained on `code`."""
    changes = (
        "lora=null",
        "training.evaluation=null",
        "mlperf=null",
        f"steps={BASE_STEPS}",
        f"seed={BASE_SEED}",
        "lr=3e-3",
        "training.lr_schedule.warmup=10",
        "grad_clip=1.0",
        f"checkpoint.every={BASE_STEPS}",
        "layout.zero_stage=0",
        *code.overrides,
    )
    local = HostPlacement(launcher="local")
    request = Request(benchmark.recipe, TRIAL_VARIANT, changes, 1, device, where=local)
    plan = make_plan(request)
    root = cache_folder() / "bases"
    existing = _checkpoint(root, plan.spec.key)
    if existing is not None:
        return existing
    try:
        with show(plan) as watch:
            report = flow.run(plan, root, flow.command_line(), watch, probe=False)
    except flow.CancelledRunError:
        raise KeyboardInterrupt from None
    checkpoint = _checkpoint(root, plan.spec.key)
    if checkpoint is None:
        status: Status = report.result.status
        raise SystemFaultError(
            "the base model",
            f"was not trained: {status} {report.result.reason or ''}".strip(),
            remedy=f"see its run in {root}",
        )
    return checkpoint


def _checkpoint(root: Path, key: str) -> Path | None:
    for folder in run_folders(root):
        record = read_record(folder)
        latest = folder / CHECKPOINTS_FOLDER / LATEST_CHECKPOINT
        if record.key == key and record.status == "ok" and latest.is_file():
            return latest.parent / read_text(latest).strip()
    return None


def _digest(folder: Path) -> str:
    """Return a digest of the names and contents of a folder's files."""
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        total.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:8]


def write_images(folder: Path, shape: MMDiTShape, count: int) -> Path:
    """Encode `count` pictures into `folder`; return the path of the index."""
    encoder = Encoder.of(shape)
    samples = [encoder.sample(picture) for picture in pictures(count)]
    names = {name: f"{name}.bf16" for name in samples[0]}
    for name, file in names.items():
        (folder / file).write_bytes(bfloat16_bits(np.stack([s[name] for s in samples])).tobytes())
    empty = {"text": (shape.text_len, shape.text_width), "pooled": (shape.pooled_width,)}
    for name, size in empty.items():
        (folder / f"empty-{name}.bf16").write_bytes(bytes(2 * prod(size)))
    index = {
        "schema": 1,
        "parts": [{"samples": count, **names}],
        "empty": {name: f"empty-{name}.bf16" for name in empty},
    }
    path = folder / "index.json"
    path.write_text(json.dumps(index, indent=2) + "\n")
    return path


Domain = Literal["code", "prose"]
PIECE_BYTES = 2048
"""Size of the pieces that texts are split into and shuffled, so that all parts are alike."""
MAX_BYTES = 2_000_000
EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "pydoc_data",
}
"""Folders to skip: third-party packages, optional modules, and pydoc_data, which is the prose."""
ORDER_SEED = 20_25
"""Seed of the shuffling, the same for every training seed."""


def training_text(domain: Domain) -> bytes:
    """Return up to MAX_BYTES of one domain in shuffled pieces; constant per installation."""
    texts = _sources() if domain == "code" else _reference()
    pieces = [
        text[at : at + PIECE_BYTES] for text in texts for at in range(0, len(text), PIECE_BYTES)
    ]
    random.Random(ORDER_SEED).shuffle(pieces)
    return b"".join(_limit_bytes(pieces, MAX_BYTES))


def _sources() -> Iterator[bytes]:
    """Yield the standard library's modules, ordered by name."""
    root = sysconfig.get_path("stdlib")
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - EXCLUDED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name).read_bytes()


def _reference() -> list[bytes]:
    """Return the chapters of the language reference that `help()` shows.

    Raises SystemFaultError if they are not installed.
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise SystemFaultError(
            "pydoc_data",
            "is missing from this Python, which has no texts for help()",
            remedy="install Python's documentation data (Debian: libpython3-stdlib)",
        ) from error
    return [topics[name].encode() for name in sorted(topics)]


def _limit_bytes(pieces: Iterable[bytes], limit: int) -> Iterator[bytes]:
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > limit:
            return
        yield piece
