"""What is made on the spot: each maker writes files into a folder, from other assets or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from paceline.core.assets import Asset
from paceline.core.errors import UserError, did_you_mean
from paceline.core.value import Value
from paceline.files.yaml_file import validate
from paceline.machines.probe.inventory import usable_cores
from paceline.staging import conversions
from paceline.staging.conversions.drawn_encodings import DrawnEncodingSizes, make_drawn_encodings
from paceline.staging.conversions.flux import FluxShardSources, make_flux_shards
from paceline.staging.conversions.hub_models import HubFamily, HubModelSize, make_hub_model
from paceline.staging.conversions.packed import packed_npy, packed_rows
from paceline.staging.conversions.packed_npy import MaskOf
from paceline.staging.conversions.progress import Progress, unwatched

Setting = str | int | float | bool
PARTS, ROW_FILES = ("train", "validation"), (".parquet", ".jsonl", ".npy")
"""Of packed rows: how their files' names begin, and end."""


@dataclass(frozen=True)
class Making:
    """What a maker works with; `inputs` are the contents of the assets that it needs, by name."""

    folder: Path
    inputs: Mapping[str, Path]
    settings: Mapping[str, Setting]
    check: Callable[[], None]
    """Raises when the staging ends; to be called now and then."""
    progress: Progress = unwatched
    """Told how far it is, by makers that take long."""


Maker = Callable[[Making], None]


def _from_nothing(make: Callable[[Path, Progress], None], making: Making) -> None:
    """What needs no other asset: the interpreter's own sources are its input."""
    if ignored := [*making.inputs, *making.settings]:
        raise UserError("made asset", f"takes neither needs nor settings, not {', '.join(ignored)}")
    make(making.folder, lambda done_bytes, total_bytes: making.check())


def _hub_model(family: HubFamily, making: Making) -> None:
    """A small model with random weights, of the size that the asset's settings say."""
    if making.inputs:
        raise UserError(f"made asset {family}", f"takes no needs, not {', '.join(making.inputs)}")
    size = validate(HubModelSize, dict(making.settings), f"made asset {family}: settings")
    make_hub_model(making.folder, family, size)


def _drawn_encodings(making: Making) -> None:
    """Encoded drawings, of the sizes that the asset's settings say."""
    if making.inputs:
        raise UserError(
            "made asset drawn-encodings", f"takes no needs, not {', '.join(making.inputs)}"
        )
    where = "made asset drawn-encodings: settings"
    sizes = validate(DrawnEncodingSizes, dict(making.settings), where)
    make_drawn_encodings(making.folder, sizes, making.check)


def _flux_shards(making: Making) -> None:
    """Shards with energon's metadata, of the encodings that the asset's settings name."""
    where = "made asset flux-shards: settings"
    sources = validate(FluxShardSources, dict(making.settings), where)

    def show(done_bytes: int, total_bytes: int) -> None:
        making.check()
        making.progress(done_bytes, total_bytes)

    make_flux_shards(making.folder, sources, making.inputs, show, usable_cores())


class PackedSettings(Value):
    """What is told of packed rows; `settings` of an asset that is made of them."""

    mask: MaskOf = "tokens"
    """Of a .npy: what an entry of `loss_mask` is about, the token at its place or the next one."""
    across: bool = False
    """Take rows of several documents for the native trainer, whose attention spans a row."""


def _packed(form: Literal["rows", "npy"], making: Making) -> None:
    """The parts `train` and `validation` of one asset's parquet, jsonl or .npy files."""
    where = f"made asset packed-{form}"
    if len(making.inputs) != 1:
        raise UserError(where, "needs one asset, whose rows it takes")
    settings = validate(PackedSettings, dict(making.settings), f"{where}: settings")
    (folder,) = making.inputs.values()

    def watch(*_: int) -> None:
        making.check()

    parts = 0
    for part in PARTS:
        paths = [path for path in sorted(folder.rglob(f"{part}*")) if path.suffix in ROW_FILES]
        if not paths:
            continue
        parts += 1
        if form == "npy":
            packed_npy(paths, making.folder / f"{part}.npy", watch, settings.mask)
        else:
            packed_rows(paths, making.folder / part, watch, settings.mask, settings.across)
    if not parts:
        raise UserError(
            f"{where}: {folder}",
            f"has no {' or '.join(f'{part}*' for part in PARTS)}",
            allowed=", ".join(ROW_FILES),
        )


MAKERS: dict[str, Maker] = {
    **{name: partial(_from_nothing, make) for name, make in conversions.MAKERS.items()},
    "opt": partial(_hub_model, "opt"),
    "llama": partial(_hub_model, "llama"),
    "drawn-encodings": _drawn_encodings,
    "flux-shards": _flux_shards,
    "packed-rows": partial(_packed, "rows"),
    "packed-npy": partial(_packed, "npy"),
}
"""By the `source` of a made asset."""
RESUMING = frozenset({"flux-shards"})
"""Makers that keep the whole files that an earlier call has left in their folder."""


def is_resumed(asset: Asset) -> bool:
    """Whether an asset is made by one of those."""
    return asset.kind == "made" and asset.source in RESUMING


def make(name: str, making: Making) -> None:
    """Let the maker called `name` fill a folder; raises UserError for an unknown one.

    Raises UserError as well where a library is missing that the maker needs.
    """
    if name not in MAKERS:
        raise UserError(
            f"made asset: source {name!r}",
            "is unknown",
            allowed=", ".join(MAKERS),
            remedy=did_you_mean(name, MAKERS) or None,
        )
    try:
        MAKERS[name](making)
    except ModuleNotFoundError as error:
        raise UserError(
            f"made asset {name}",
            f"takes {error.name}, which is not installed",
            remedy="pip install 'paceline[stage]'",
        ) from error
