"""Converters of made assets: each writes files to a folder, from other assets or from nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from paceline.core.assets import LAYOUT, Asset
from paceline.core.errors import UserError, unknown_name
from paceline.core.value import Value
from paceline.files.yaml_file import validate
from paceline.machines.probe.inventory import usable_cores
from paceline.staging.conversions import Progress, ignore_progress, stdlib_corpus
from paceline.staging.conversions.flux import (
    FluxShardSources,
    SyntheticEncodingSizes,
    make_flux_shards,
    make_synthetic_encodings,
)
from paceline.staging.conversions.hub_models import HubFamily, HubModelSize, make_hub_model
from paceline.staging.conversions.image_files import copy_from_image
from paceline.staging.conversions.layouts import make_folder
from paceline.staging.conversions.packed import MaskOf, packed_npy, packed_rows
from paceline.staging.conversions.tokenization import plain_text, tokenization, tokenize

SettingValue = str | int | float | bool
PARTS, ROW_FILES = ("train", "validation"), (".parquet", ".jsonl", ".npy")
"""Name prefixes and suffixes of files with packed rows."""


@dataclass(frozen=True)
class ConversionJob:
    """Arguments of a converter; `inputs` maps each needed asset to its content folder."""

    folder: Path
    inputs: Mapping[str, Path]
    settings: Mapping[str, SettingValue]
    check: Callable[[], None]
    """Raises if staging is stopped; converters call it regularly."""
    progress: Progress = ignore_progress
    """Progress callback, called by slow converters."""
    hub_id: str | None = None
    """Id of the asset in the hub cache."""


Converter = Callable[[ConversionJob], None]


def _from_nothing(make: Callable[[Path, Progress], None], conversion: ConversionJob) -> None:
    """Make an asset from the interpreter's own sources; it needs no other asset."""
    if unexpected := [*conversion.inputs, *conversion.settings]:
        raise UserError("made asset", f"accepts no needs and no settings: {', '.join(unexpected)}")
    make(conversion.folder, lambda done_bytes, total_bytes: conversion.check())


def _refuse_needs(name: str, conversion: ConversionJob) -> None:
    if conversion.inputs:
        raise UserError(f"made asset {name}", f"accepts no needs: {', '.join(conversion.inputs)}")


def _hub_model(family: HubFamily, conversion: ConversionJob) -> None:
    """Make a small model with random weights, of the size in the asset's settings."""
    _refuse_needs(family, conversion)
    size = validate(HubModelSize, dict(conversion.settings), f"made asset {family}: settings")
    make_hub_model(conversion.folder, family, size, conversion.hub_id)


def _synthetic_encodings(conversion: ConversionJob) -> None:
    """Make encodings of random images, of the sizes in the asset's settings."""
    _refuse_needs("synthetic-encodings", conversion)
    where = "made asset synthetic-encodings: settings"
    sizes = validate(SyntheticEncodingSizes, dict(conversion.settings), where)
    make_synthetic_encodings(conversion.folder, sizes, conversion.check)


def _flux_shards(conversion: ConversionJob) -> None:
    """Make shards with energon's metadata from the encodings listed in the asset's settings."""
    where = "made asset flux-shards: settings"
    sources = validate(FluxShardSources, dict(conversion.settings), where)

    def show(done_bytes: int, total_bytes: int) -> None:
        conversion.check()
        conversion.progress(done_bytes, total_bytes)

    make_flux_shards(conversion.folder, sources, conversion.inputs, show, usable_cores())


def _folder(conversion: ConversionJob) -> None:
    """Lay out the files of other assets as the asset's settings state."""
    make_folder(conversion.folder, conversion.inputs, conversion.settings, conversion.check)


class ImageFileSettings(Value):
    """Settings of files that are copied out of a container image."""

    folder: str
    """Folder in the image."""
    files: str = "*"
    """Pattern of the names of the files."""


def _image_files(conversion: ConversionJob) -> None:
    """Copy the files of a folder out of the image that is the only needed asset."""
    where = "made asset image-files"
    if len(conversion.inputs) != 1:
        raise UserError(where, "needs exactly one asset, the container")
    settings = validate(ImageFileSettings, dict(conversion.settings), f"{where}: settings")
    (image_folder,) = conversion.inputs.values()
    copy_from_image(
        conversion.folder, image_folder, settings.folder, settings.files, conversion.check
    )


class TokenizedSettings(Value):
    """Settings of token files that are made from text."""

    text: str
    """Asset with .jsonl, .jsonl.gz or .jsonl.zst files."""
    tokenizer: str
    """Asset with a tokenizer.json."""
    name: str = "{part}_text_document"
    """Name of the .bin and .idx files; `{part}` is the name of the text file without its end."""


def _make_tokens(conversion: ConversionJob) -> None:
    """Tokenize each text file of one asset into Megatron's indexed format."""
    where = "made asset tokenized: settings"
    settings = validate(TokenizedSettings, dict(conversion.settings), where)
    for name in (settings.text, settings.tokenizer):
        if name not in conversion.inputs:
            raise UserError(f"{where}: {name}", "is not in needs")
    texts = sorted(conversion.inputs[settings.text].rglob("*.jsonl*"))
    if not texts:
        raise UserError(f"{where}: {settings.text}", "has no .jsonl file")
    options = tokenization(conversion.inputs[settings.tokenizer])
    prefixes: dict[Path, Path] = {}
    for text in texts:
        name = settings.name.replace("{part}", text.name.partition(".")[0])
        if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name):
            raise UserError(f"{where}: name {name!r}", "is not the name of a file")
        if other := prefixes.get(conversion.folder / name):
            raise UserError(f"{where}: {text.name}", f"would have the name of {other.name}: {name}")
        prefixes[conversion.folder / name] = text
    for prefix, text in prefixes.items():
        if prefix.with_name(f"{prefix.name}.idx").is_file():
            continue  # An interrupted call has finished this file; the index is written last.
        with plain_text(text, conversion.folder, conversion.check) as plain:

            def show(done_bytes: int, total_bytes: int) -> None:
                conversion.check()
                conversion.progress(done_bytes, total_bytes)

            tokenize([plain], prefix, options, workers=usable_cores(), progress=show)


class PackedSettings(Value):
    """Settings of an asset that is made from packed rows."""

    mask: MaskOf = "tokens"
    """Meaning of a `loss_mask` entry in a .npy file: the token at its position or the next one."""
    across: bool = False
    """Accept rows of several documents for the native trainer, whose attention spans a row."""


def _packed(form: Literal["rows", "npy"], conversion: ConversionJob) -> None:
    """Convert the `train` and `validation` parts of one asset's parquet, jsonl or .npy files."""
    where = f"made asset packed-{form}"
    if len(conversion.inputs) != 1:
        raise UserError(where, "needs exactly one asset, which holds the rows")
    settings = validate(PackedSettings, dict(conversion.settings), f"{where}: settings")
    (folder,) = conversion.inputs.values()

    def watch(*_: int) -> None:
        conversion.check()

    parts = 0
    for part in PARTS:
        paths = [path for path in sorted(folder.rglob(f"{part}*")) if path.suffix in ROW_FILES]
        if not paths:
            continue
        parts += 1
        if form == "npy":
            packed_npy(paths, conversion.folder / f"{part}.npy", watch, settings.mask)
        else:
            packed_rows(paths, conversion.folder / part, watch, settings.mask, settings.across)
    if not parts:
        raise UserError(
            f"{where}: {folder}",
            f"has no {' or '.join(f'{part}*' for part in PARTS)}",
            allowed=", ".join(ROW_FILES),
        )


CONVERTERS: dict[str, Converter] = {
    "tokenizer": partial(_from_nothing, stdlib_corpus.make_tokenizer),
    "jsonl": partial(_from_nothing, stdlib_corpus.make_jsonl),
    "indexed": partial(_from_nothing, stdlib_corpus.make_indexed),
    "preferences": partial(_from_nothing, stdlib_corpus.make_preferences),
    "gpt2": partial(_from_nothing, stdlib_corpus.make_gpt2),
    "opt": partial(_hub_model, "opt"),
    "llama": partial(_hub_model, "llama"),
    "synthetic-encodings": _synthetic_encodings,
    "flux-shards": _flux_shards,
    "packed-rows": partial(_packed, "rows"),
    "packed-npy": partial(_packed, "npy"),
    "tokenized": _make_tokens,
    "image-files": _image_files,
    LAYOUT: _folder,
}
"""Converters by the `source` of a made asset."""
RESUMABLE = frozenset({"flux-shards", "tokenized", LAYOUT})
"""Converters that keep the complete files of an interrupted call."""


def can_resume(asset: Asset) -> bool:
    """Return whether the asset's converter can resume."""
    return asset.kind == "made" and asset.source in RESUMABLE


def convert(name: str, conversion: ConversionJob) -> None:
    """Run the converter `name`; raises UserError if there is none of this name.

    Also raises UserError if a library that the converter needs is not installed.
    """
    if name not in CONVERTERS:
        raise unknown_name(f"made asset: source {name!r}", "is unknown", name, CONVERTERS)
    try:
        CONVERTERS[name](conversion)
    except ModuleNotFoundError as error:
        raise UserError(
            f"made asset {name}",
            f"requires {error.name}, which is not installed",
            remedy="pip install 'paceline[stage]'",
        ) from error
