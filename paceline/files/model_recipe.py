"""Recipes from Hugging Face models, and the settings that a file with only a shape leaves open."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from paceline.core.errors import UserError, unreadable
from paceline.files.documents import parse_json, read_text
from paceline.files.hf_config import shape_of_config
from paceline.files.hf_hub import model_of_cache
from paceline.files.yaml_file import Document

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
