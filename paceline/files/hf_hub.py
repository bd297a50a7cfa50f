"""The config.json of a model on the Hugging Face Hub: from the local cache, else by a download."""

from __future__ import annotations

import os
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from paceline.core.errors import IncompleteError, UserError, unreadable
from paceline.files.documents import parse_json, read_text, write_text
from paceline.files.hf_config import shape_of_config
from paceline.files.home import cache_folder, home_path
from paceline.files.yaml_file import Document

HUB = "https://huggingface.co"
CONFIG = "config.json"
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
LARGEST_CONFIG = 1 << 22
TIMEOUT_S = 15.0
MAX_DOWNLOAD_S = 120.0
"""Time limit of a download in seconds, for a server that sends a byte at a time."""
LONGEST_WORD = 4096
"""Maximum size in bytes of files with one word: a commit, a token."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class _Answer(Protocol):
    def read1(self, size: int, /) -> bytes: ...


def hub_endpoint() -> str:
    """Return the URL of the Hugging Face Hub, or of the mirror in $HF_ENDPOINT."""
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def is_offline() -> bool:
    """Return whether the environment forbids access to the hub."""
    values = [os.environ.get(name, "").upper() for name in OFFLINE_VARIABLES]
    return any(value in ("1", "TRUE", "YES", "ON") for value in values)


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a model on the hub, ORGANIZATION/MODEL."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith((".yaml", ".yml", ".json"))


def hub_config(name: str) -> Path:
    """Return the path of a hub model's config.json, downloaded if the cache does not have it.

    Raises UserError for a model that does not exist or that is gated, and IncompleteError if the
    hub cannot be reached.
    """
    cached = cached_config(name)
    if cached is not None:
        return cached
    if is_offline():
        raise _not_reached(name, "HF_HUB_OFFLINE forbids the network")
    return _download(name)


def cached_config(name: str) -> Path | None:
    """Return a model's config.json in the local caches of the hub's library or of Paceline."""
    folder = _library_cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = read_text(folder / "refs" / "main", LONGEST_WORD).strip()
    except (OSError, UnicodeDecodeError):
        commit = "*"
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        commit = "*"
    paths = sorted(folder.glob(f"snapshots/{commit}/{CONFIG}"))
    copy = _own_copy(name)
    return paths[-1] if paths else copy if copy.is_file() else None


def model_of_cache(path: Path) -> str | None:
    """Return the hub's name of the model whose config.json is in a cache; None elsewhere."""
    for folder in path.parents:
        if folder.name.startswith("models--"):
            return folder.name.removeprefix("models--").replace("--", "/", 1)
    return None


def _library_cache() -> Path:
    folder = os.environ.get("HF_HUB_CACHE")
    return home_path("HF_HUB_CACHE", folder) if folder else _library_home() / "hub"


def _library_home() -> Path:
    folder = os.environ.get("HF_HOME")
    return home_path("HF_HOME", folder) if folder else cache_folder().parent / "huggingface"


def _token() -> str | None:
    """Return the user's token for the hub, from the environment or from `hf auth login`."""
    if token := os.environ.get("HF_TOKEN"):
        return token
    try:
        return read_text(_library_home() / "token", LONGEST_WORD).strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _own_copy(name: str) -> Path:
    return cache_folder() / "hub" / f"models--{name.replace('/', '--')}" / CONFIG


def _download(name: str) -> Path:
    """Download into Paceline's cache, so that no library of the hub is needed."""
    token = _token()
    headers = {"Authorization": " ".join(("Bearer", token))} if token else {}
    url = f"{hub_endpoint()}/{name}/resolve/main/{CONFIG}"
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            text = _content(answer).decode("utf-8")
    except urllib.error.HTTPError as error:
        _raise_refusal(name, error.code, error)
    except (OSError, ValueError) as error:
        _raise_refusal(name, None, error)
    write_text(_own_copy(name), text)
    return _own_copy(name)


def _content(answer: _Answer) -> bytes:
    """Return a config.json from the hub; raise OSError if it is too large or takes too long."""
    content, end_at = bytearray(), time.monotonic() + MAX_DOWNLOAD_S
    while block := answer.read1(1 << 16):
        content += block
        if len(content) > LARGEST_CONFIG or time.monotonic() > end_at:
            raise OSError("the answer is too large or takes too long")
    return bytes(content)


def _raise_refusal(name: str, status: int | None, error: Exception) -> NoReturn:
    """Raise the error for an HTTP status, or for a hub that gives no answer."""
    if status in (401, 403):
        raise UserError(
            name,
            "is gated, private or does not exist on the Hugging Face Hub",
            remedy=f"accept its licence at {hub_endpoint()}/{name} and set HF_TOKEN, "
            "or pass the path of its config.json",
        ) from error
    if status == 404:
        raise UserError(
            name,
            f"has no config.json on {hub_endpoint()}",
            remedy="check the name, or pass the path of a config.json",
        ) from error
    raise _not_reached(name, f"{hub_endpoint()} cannot be reached") from error


def _not_reached(name: str, why: str) -> IncompleteError:
    return IncompleteError(
        name,
        f"is not in the Hugging Face cache, and {why}",
        remedy="pass the path of its config.json, or of a folder with one",
    )


LONGEST_SEQUENCE = 8192
"""Assumed sequence length of models with at least as many positions."""
TOKENS_PER_DEVICE = 32_768
"""Assumed tokens per device and step."""
OF_EVERY_MODEL = frozenset({"training.dtype", "layout"})
"""Fields that `recipe_of_config` assumes, in addition to those of `add_defaults`."""
DEFAULT_STEPS = 50
DEFAULT_POSITIONS = 2048


def read_config(path: Path) -> Document:
    """Return the mapping in a JSON file; raise UserError for anything else."""
    try:
        document = parse_json(read_text(path, 1 << 22), nan=True)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), error) from error
    except ValueError as error:
        raise UserError(str(path), f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UserError(str(path), "is not a mapping", allowed='{"key": value}')
    return cast(Document, document)


def config_name(config: Document, path: Path) -> str:
    """Return the name of the model of a config.json: that on the hub, else that of its folder."""
    hub_name = str(config.get("_name_or_path") or "")
    name = (model_of_cache(path) or hub_name).rstrip("/").rpartition("/")[2]
    return name or (path.resolve().parent.name if path.stem == "config" else path.stem)


def recipe_of_config(config: Document, path: Path) -> Document:
    """Return a recipe with the shape of a config.json, and with notes on what it cannot express."""
    shape = shape_of_config(config, str(path))
    name = config_name(config, path)
    recipe: Document = {
        "title": f"{name} ({config.get('model_type', 'model')})",
        "description": f"Shape from the Hugging Face configuration of {name}.",
        "model": shape.model,
        "training": {"dtype": "bf16"},
        "layout": {"zero_stage": 1},
    }
    return recipe | ({"notes": list(shape.notes)} if shape.notes else {})


def add_defaults(document: Document, name: str) -> frozenset[str]:
    """Add the fields that an estimate needs and that the file does not state; return their names.

    Without a model nothing is added, because the file is not a recipe.
    """
    model = document.get("model")
    if not isinstance(model, dict):
        return frozenset()
    document.setdefault("name", name[:100])
    document.setdefault("title", str(document["name"]))
    if model.get("kind", "decoder") != "decoder":
        return frozenset()
    training = document.setdefault("training", {})
    if not isinstance(training, dict):
        return frozenset()
    fields: set[str] = set()
    for field, value in _training_defaults(cast(Document, model), cast(Document, training)).items():
        if field not in training:
            training[field] = value
            fields.add(f"training.{field}")
    return frozenset(fields)


def _training_defaults(model: Document, training: Document) -> Document:
    """Return default settings of a training, by the positions of the model."""
    positions = model.get("max_positions") or DEFAULT_POSITIONS
    longest = min(LONGEST_SEQUENCE, positions) if isinstance(positions, int) else DEFAULT_POSITIONS
    seq_len: Any = training.get("seq_len", longest)
    has_batch = not {"global_batch", "batch_per_device"}.isdisjoint(training)
    batch = max(1, TOKENS_PER_DEVICE // seq_len) if isinstance(seq_len, int) and seq_len > 0 else 1
    defaults: Document = {"seq_len": longest, "steps": DEFAULT_STEPS}
    return defaults | ({} if has_batch else {"batch_per_device": batch})
