"""Settings of a logged run. The user's come first, then the log's, then the recipe's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from paceline.core.errors import UserError, unknown_name
from paceline.core.flops import CONVENTIONS, FRAMEWORK_CONVENTIONS, convention_of, without_recompute
from paceline.core.hardware import Dtype
from paceline.core.layout import Layout
from paceline.core.run import RunSettings
from paceline.core.shape import Shape, num_parameters
from paceline.core.units import LARGEST_INT, count
from paceline.core.window import check_rule
from paceline.engines import log_format
from paceline.engines.log_reading.generic import column_choice
from paceline.engines.log_reading.log_content import LAYOUT_FACTS, Fact, LogContent
from paceline.engines.log_reading.table_format import is_table_path
from paceline.files import catalog
from paceline.files.recipe import Recipe, load_recipe
from paceline.logs.path_facts import NO_PATH, PathFacts

DTYPE_NAMES = {
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "float32": "fp32",
    "torch.float32": "fp32",
    "float": "fp32",
}
SIZES = ("global_batch", "seq_len")
SAME_SIZE = 0.03
"""Relative tolerance of parameter counts: printed counts are rounded to three digits, and may
exclude embeddings or include adapters."""

COMPARED = ("dtype", "num_devices", "device")


@dataclass(frozen=True)
class UserSettings:
    """Settings that the user adds to a log; None = not given."""

    engine: str | None = None
    recipe: str | None = None
    """Recipe whose settings are used where neither the user nor the log states any."""
    model: str | None = None
    """Recipe of which only the model is used."""
    device: str | None = None
    num_devices: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    dtype: str | None = None
    convention: str | None = None
    total_tokens: float | None = None
    window: str | None = None
    facts: RunSettings | None = None
    """All settings at once, as recorded with an imported run."""
    planned: bool = False
    """True if `facts` are the plan of a run: what its steps report about themselves precedes."""

    @property
    def engine_name(self) -> str | None:
        """Name of the requested log format, the path of its file, or the generic reader.

        Raises UserError for an unknown format.
        """
        if self.engine is None:
            return None
        log_format(self.engine)
        if is_table_path(self.engine) or column_choice(self.engine) is not None:
            return self.engine
        return self.engine.lower().replace("-", "_")

    @property
    def sizes(self) -> dict[str, int | None]:
        """Global batch and sequence length by name, which override the log's; None if not given."""
        if self.planned:
            return dict.fromkeys(SIZES)
        word = self.facts or self
        return {name: getattr(word, name) for name in SIZES}

    def check(self) -> None:
        """Raise UserError for unknown values, before a long log is read."""
        all_facts(self, self.engine_name, LogContent())
        try:
            check_rule(self.window or "auto")
        except ValueError as error:
            raise UserError(
                f"--window {self.window}", str(error), allowed="auto, last, FIRST:LAST, skip:N"
            ) from error


def all_facts(
    user: UserSettings, engine: str | None, log: LogContent, place: PathFacts = NO_PATH
) -> tuple[RunSettings, list[str]]:
    """Return every setting from its best source, and notes on contradictions and unknown names.

    The order of precedence is: the user, the log, the log's path (`place`), the recipe. Raises
    UserError for an unknown model, recipe, device, dtype or convention.
    """
    from_log, notes = _log_facts(log.facts)
    if user.facts is not None:
        from_user = user.facts.model_dump(include=set(COMPARED), exclude_none=True)
        return user.facts, [*notes, *_contradictions(from_user, from_log, COMPARED)]
    from_user, open_points = _user_facts(user)
    notes += [*open_points, *_contradictions(from_user, from_log, (*COMPARED, *SIZES))]
    notes += place.notes(from_log, from_user)
    known_settings = {**place.values, **from_log, **from_user}
    base = _recipe_facts(user.recipe, known_settings.get("num_devices"))
    merged = {"flops_convention": "causal", **base, **known_settings}
    if model := merged.get("model"):
        # The nominal size of the given model takes precedence over the rounded one in a path.
        merged["nominal_parameters"] = {**base, **from_user}.get("nominal_parameters")
        notes += place.another_model(model)
    notes += _another_model(model, log.facts.get("num_parameters"))
    layout = _layout(base.get("layout"), log.facts)
    world_size = merged.get("num_devices")
    if layout and world_size and world_size % layout.model_devices:
        notes.append(
            f"the layout is ignored: it has {layout.model_devices} devices per replica, which does "
            f"not divide {world_size} devices"
        )
        layout = None
    facts = RunSettings.model_validate(
        {**merged, "layout": layout, "engine": engine, "origin": "imported"}
    )
    return facts, notes


def path_sources(
    user: UserSettings, facts: RunSettings, log: LogContent, place: PathFacts
) -> dict[str, str]:
    """Return `path` for each of `facts` that only the log's path states."""
    if user.facts is not None:
        return {}
    from_log, from_user = _log_facts(log.facts)[0], _user_facts(user)[0]
    of_path = place.values.keys() - from_log.keys() - from_user.keys()
    return {
        name: "path"
        for name in place.values
        if name in of_path and getattr(facts, name) is not None
    }


def _another_model(model: Shape | None, printed: Fact | None) -> Iterator[str]:
    """Yield a warning if the log's model differs in size from the given one.

    Adapters add few parameters, so they stay within the tolerance.
    """
    if model is None or not isinstance(printed, int | float) or printed <= 0:
        return
    num_given = num_parameters(model)
    if abs(printed / num_given - 1) > SAME_SIZE:
        yield (
            f"the log's model has {count(printed)} parameters, the given model has "
            f"{count(num_given)}: FLOP/s and MFU do not apply to it"
        )


def _contradictions(
    from_user: dict[str, Any], from_log: dict[str, Any], names: tuple[str, ...]
) -> Iterator[str]:
    """Yield a sentence for each setting in which the user and the log differ."""
    for name in names:
        if name in from_user and name in from_log and from_user[name] != from_log[name]:
            words = name.replace("_", " ")
            yield f"{words} {from_user[name]} was given, but the log reports {from_log[name]}"


def _user_facts(user: UserSettings) -> tuple[dict[str, Any], list[str]]:
    """Return the user's settings, and notes on an ambiguous device name."""
    device = _device(user.device) if user.device else None
    facts: dict[str, Any] = {
        "num_devices": user.num_devices,
        "global_batch": user.global_batch,
        "seq_len": user.seq_len,
        "total_tokens": user.total_tokens,
        "dtype": _dtype(user.dtype, "--dtype") if user.dtype else None,
        "device": device.device.name if device else user.device and "cpu",
        "flops_convention": _convention(user.convention) if user.convention else None,
    }
    if user.model is not None:
        recipe = load_recipe(user.model)
        facts |= {
            "recipe": recipe.name,
            "model": recipe.model,
            "lora": recipe.lora,
            "nominal_parameters": recipe.nominal_parameters,
        }
        convention = facts["flops_convention"] or recipe.flops_convention
        conventions = recipe.model.conventions
        if conventions and convention not in conventions:
            raise UserError(
                f"--convention {convention}",
                f"does not apply to {recipe.name}",
                allowed=", ".join(conventions),
            )
        facts["flops_convention"] = convention
    given_settings = {name: value for name, value in facts.items() if value is not None}
    return given_settings, [device.note] if device and device.note else []


def _recipe_facts(name: str | None, num_devices: int | None) -> dict[str, Any]:
    """Return the recipe's settings for a run on `num_devices`."""
    if name is None:
        return {}
    recipe = load_recipe(name)
    training = recipe.training
    facts: dict[str, Any] = {
        "recipe": recipe.name,
        "model": recipe.model,
        "lora": recipe.lora,
        "dtype": None if training.dtype == "auto" else training.dtype,
        "seq_len": training.seq_len,
        "global_batch": _batch(recipe, num_devices),
        "layout": recipe.layout,
        "real_tokens_per_sample": recipe.data.real_tokens_per_sample,
        "flops_convention": recipe.flops_convention,
        "nominal_parameters": recipe.nominal_parameters,
        "total_tokens": training.training_tokens,
        **recipe.data.model_dump(include={"packing", "loss_on"}, exclude_unset=True),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _batch(recipe: Recipe, num_devices: int | None) -> int | None:
    batch, per_device = recipe.training.global_batch, recipe.training.batch_per_device
    if per_device and num_devices:
        return per_device * num_devices
    return batch if isinstance(batch, int) else None


def _log_facts(facts: dict[str, Fact]) -> tuple[dict[str, Any], list[str]]:
    """Return the log's settings in Paceline's terms, and notes on names not understood."""
    settings: dict[str, Any] = {
        name: int(facts[name])
        for name in ("seq_len", "global_batch", "num_devices")
        if isinstance(facts.get(name), int | float) and 0 < int(facts[name]) <= LARGEST_INT
    }
    notes: list[str] = []
    if facts.get("loss_on") == "text":
        settings["loss_on"] = "text"
    if facts.get("routing") in ("forced", "learned from scratch"):
        settings["routing"] = facts["routing"]
    if facts.get("profiled"):
        settings["profiled"] = True
    if "dtype" in facts:
        name = str(facts["dtype"]).lower()
        dtype = DTYPE_NAMES.get(name, name)
        if dtype in get_args(Dtype):
            settings["dtype"] = dtype
    if "device" in facts:
        try:
            match = _device(str(facts["device"]))
            settings["device"] = match.device.name if match else "cpu"
            notes += [match.note] if match and match.note else []
        except UserError:
            notes.append(f"the log's device {str(facts['device'])[:60]!r} is not in the catalog")
    return settings, notes


def _layout(base: Layout | None, facts: dict[str, Fact]) -> Layout | None:
    """Return the recipe's layout updated with the log's values; None if neither states any."""
    log_sizes = {name: facts[name] for name in LAYOUT_FACTS if isinstance(facts.get(name), int)}
    sound = {
        name: value
        for name, value in log_sizes.items()
        if (name == "zero_stage" and value in (0, 1, 2, 3)) or (name != "zero_stage" and value > 0)  # type: ignore[operator]
    }
    if base is None and not sound.keys() & {"tp", "pp", "zero_stage"}:
        return None
    return Layout.model_validate({**(base.model_dump() if base else {}), **sound})


def _device(name: str) -> catalog.DeviceMatch | None:
    """Return the catalog's match for a device, None for a CPU."""
    return None if name.lower() == "cpu" else catalog.find_device(name)


def _dtype(name: str, where: str) -> str:
    dtypes = get_args(Dtype)
    dtype = DTYPE_NAMES.get(name.lower(), name.lower())
    if dtype not in dtypes:
        raise unknown_name(f"{where} {name}", "is unknown", dtype, dtypes)
    return dtype


def _convention(name: str) -> str:
    """Return the convention without recompute.

    Hardware FLOP/s add the recompute of the layout in any case. Raises UserError if it is unknown.
    """
    convention = without_recompute(convention_of(name)[0])
    if convention not in CONVENTIONS:
        names = [*CONVENTIONS, *FRAMEWORK_CONVENTIONS]
        raise unknown_name(f"--convention {name}", "is unknown", name, names)
    return convention
