"""Checks that two sets of runs are comparable: which settings must be equal, and which differ."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.layout import Layout
from paceline.core.run import RunSettings
from paceline.core.shape import Shape, has_experts
from paceline.core.value import Value

SettingParts = Mapping[str, object]
"""A setting's parts by name; the name is empty where the setting is one word or number."""

SettingPair = tuple[Sequence[SettingParts | None], Sequence[SettingParts | None]]
"""One setting of every run of the baseline, and of the candidate."""

COMPARED_SETTINGS: dict[str, str] = {
    "model": "shape of the model",
    "lora": "adapters, if any",
    "routing": "choice of experts: forced to an equal load, or learned",
    "device": "kind of device; on a CPU its model as well",
    "num_devices": "number of devices",
    "dtype": "number format of the GEMMs",
    "matmul_precision": "precision of fp32 GEMMs",
    "seq_len": "token positions per sample",
    "global_batch": "samples per step over all devices; per device where the number of devices "
    "may differ",
    "layout": "how the model is sharded over the devices",
    "recompute": "activation checkpointing",
    "data": "kind of data",
    "packing": "whether samples are windows of one token stream or padded records; what their "
    "loss counts; whether attention is limited to documents",
    "profiled": "whether a profiler was attached, which slows a run",
}
"""Settings that must be equal before a verdict, in the order in which differences are reported."""

FIGURE_SETTINGS: dict[str, str] = {"window": "whether a figure comes from the last step only"}
"""Properties that must be equal for the figures themselves, in addition to the runs' settings."""

ASSUMED_EQUAL_IF_UNSTATED = frozenset(
    {"layout", "recompute", "matmul_precision", "routing", "data", "packing", "profiled"}
)
"""Settings assumed to be equal where a published source does not state them."""

STATING_OPTIONS = {
    "model": "--model",
    "device": "--device",
    "num_devices": "--gpus",
    "dtype": "--dtype",
    "seq_len": "--seq-len",
    "global_batch": "--global-batch",
}
"""Options of `paceline compare` that state a setting of a log."""

EQUAL_BATCH = "equal global batch"
"""Rule for comparing batches unless the number of devices may differ."""
MIXED = "mixed"
UNKNOWN = "not known"
MAX_PARTS = 4
"""Maximum number of differing parts of a model or layout to report."""

_PROFILED: SettingParts = {"": "yes"}


class KeyDifference(Value):
    """A setting in which the sides differ, as text for people."""

    key: str
    baseline: str
    candidate: str
    allowed: bool = False


@dataclass(frozen=True)
class ComparabilityReport:
    """Result of comparing the settings of two sides."""

    differences: tuple[KeyDifference, ...]
    unknown: tuple[str, ...]
    """Keys that neither side states."""
    unstated_keys: tuple[str, ...] = ()
    """Keys that a published source does not state."""
    batch_rule: str = EQUAL_BATCH
    """Rule by which the batches were compared."""
    unstated_by_baseline: tuple[str, ...] = ()
    """Keys that only the candidate states."""
    unstated_by_candidate: tuple[str, ...] = ()
    """Keys that only the baseline states."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys in which the sides differ."""
        return tuple(difference.key for difference in self.differences)

    @property
    def unstated_by_one_side(self) -> tuple[str, ...]:
        """Keys that only one side states, which are assumed to be equal."""
        keys = {*self.unstated_by_baseline, *self.unstated_by_candidate}
        return tuple(key for key in COMPARED_SETTINGS if key in keys)


def compare_settings(
    baseline: Sequence[RunSettings],
    candidate: Sequence[RunSettings],
    *,
    allowed: Collection[str] = (),
    published: bool = False,
) -> ComparabilityReport:
    """Compare the settings of all runs of both sides.

    Only contradicting settings count as differences, except with a `published` baseline: the
    settings that define the work must be known on both sides. Other settings that its source does
    not state are not compared. If `num_devices` is in `allowed`, batches count as equal when either
    the global batch or the batch per device is equal.
    """
    batches, rule = _batches(baseline, candidate, "num_devices" in allowed)
    differences: list[KeyDifference] = []
    unknown: list[str] = []
    unstated_keys: list[str] = []
    unstated_by_side: tuple[list[str], list[str]] = ([], [])
    for key in COMPARED_SETTINGS:
        ours, theirs = batches if key == "global_batch" else _both(baseline, candidate, key)
        if published and key in ("model", "layout", "recompute"):
            ours, theirs = _stated_parts(baseline, ours, theirs, key)
        known_settings = [setting for setting in (*ours, *theirs) if setting]
        profiler_slows = key == "profiled" and _PROFILED in known_settings
        must_be_known = published and key not in ASSUMED_EQUAL_IF_UNSTATED
        if published and key in ASSUMED_EQUAL_IF_UNSTATED and not any(ours) and not profiler_slows:
            unstated_keys.append(key)
        elif not known_settings:
            # A model that is not known is reported as such.
            unknown += [] if key == "routing" else [key]
        elif (
            profiler_slows
            or len(_distinct((*ours, *theirs) if must_be_known else known_settings)) > 1
        ):
            differences.append(_difference(key, ours, theirs, key in allowed))
        else:
            for keys, settings in zip(unstated_by_side, (ours, theirs), strict=True):
                keys += [] if all(settings) else [key]
    return ComparabilityReport(
        tuple(differences),
        tuple(unknown),
        tuple(unstated_keys),
        rule,
        *map(tuple, unstated_by_side),
    )


def window_difference(
    baseline: Sequence[str | None], candidate: Sequence[str | None], allowed: Collection[str]
) -> tuple[KeyDifference, ...]:
    """Return the difference in the steps that the figures cover, if every run states them."""
    ours, theirs = (
        [None if word is None else _one_part(word) for word in side]
        for side in (baseline, candidate)
    )
    if None in (*ours, *theirs) or len(_distinct((*ours, *theirs))) < 2:
        return ()
    return (_difference("window", ours, theirs, "window" in allowed),)


def fair_metric(differing: Iterable[str]) -> tuple[str, str | None]:
    """Return the metric that stays meaningful when these keys differ, and the reason for it."""
    keys = set(differing)
    if keys & {"model", "lora", "seq_len"}:
        names = ", ".join(
            key for key in COMPARED_SETTINGS if key in keys & {"model", "lora", "seq_len"}
        )
        return (
            "model_flops_per_s_per_device",
            f"{names} differ, so steps and tokens are not equal work: model FLOP/s per device are "
            "compared",
        )
    if keys & {"global_batch", "num_devices"}:
        names = ", ".join(
            key for key in COMPARED_SETTINGS if key in keys & {"global_batch", "num_devices"}
        )
        return (
            "tokens_per_s_per_device",
            f"{names} differ, so steps are not equal work: tokens/s per device are compared",
        )
    return "step_time_s", None


def _both(
    baseline: Sequence[RunSettings], candidate: Sequence[RunSettings], key: str
) -> SettingPair:
    return [_setting(f, key) for f in baseline], [_setting(f, key) for f in candidate]


def _batches(
    baseline: Sequence[RunSettings], candidate: Sequence[RunSettings], devices_may_differ: bool
) -> tuple[SettingPair, str]:
    """Return both sides' batches, global or per device, and the rule by which they are compared."""
    whole = _both(baseline, candidate, "global_batch")
    if not devices_may_differ or len({f.num_devices for f in (*baseline, *candidate)}) < 2:
        return whole, EQUAL_BATCH
    each = [_a_device(f) for f in baseline], [_a_device(f) for f in candidate]
    if not all((*whole[0], *whole[1])):
        return whole, EQUAL_BATCH
    if len(_distinct([*whole[0], *whole[1]])) == 1:
        return whole, "equal global batch on another number of devices (strong scaling)"
    if len(_distinct([*each[0], *each[1]])) == 1:
        return each, "equal batch per device on another number of devices (weak scaling)"
    return whole, "neither the global batch nor the batch per device is equal"


def _stated_parts(
    published: Sequence[RunSettings],
    ours: Sequence[SettingParts | None],
    theirs: Sequence[SettingParts | None],
    key: str,
) -> SettingPair:
    """Return both sides' settings, limited to the parts that the published rows state."""
    values = [f.model if key == "model" else f.layout for f in published]
    stated_fields = {name for value in values if value for name in value.model_fields_set}
    stated_fields |= {""} if key in stated_fields else set()

    def limited_to_stated(setting: SettingParts | None) -> SettingParts | None:
        return setting and {name: value for name, value in setting.items() if name in stated_fields}

    return [limited_to_stated(s) for s in ours], [limited_to_stated(s) for s in theirs]


def _distinct(settings: Sequence[SettingParts | None]) -> list[SettingParts | None]:
    distinct: list[SettingParts | None] = []
    for setting in settings:
        if setting not in distinct:
            distinct.append(setting)
    return distinct


def _a_device(facts: RunSettings) -> SettingParts | None:
    if facts.global_batch is None or facts.num_devices is None:
        return None
    return {"": f"{facts.global_batch / facts.num_devices:g} a device"}


def _setting(facts: RunSettings, key: str) -> SettingParts | None:
    """Return one setting of a run by its parts, or None if it is unknown."""
    layout = facts.layout
    match key:
        case "model":
            return _shape(facts.model) if facts.model else None
        case "lora":
            # LoRA is reported together with the model, so a known model without LoRA means none.
            lora = facts.lora
            return lora.model_dump() if lora else {"": "none"} if facts.model else None
        case "routing":
            dense = facts.model and not has_experts(facts.model)
            return {"": "no experts"} if dense else _one_part(facts.routing)
        case "layout":
            return _layout(layout) if layout else None
        case "recompute":
            return {"": layout.recompute} if layout else None
        case "matmul_precision":
            # The precision of fp32 GEMMs has no effect on GEMMs in smaller formats.
            small = facts.dtype not in (None, "fp32")
            return {"": "of no effect"} if small else _one_part(facts.matmul_precision)
        case "device":
            label = f" ({facts.device_label})" if facts.device_label else ""
            return _one_part(f"cpu{label}" if facts.device == "cpu" else facts.device)
        case "packing":
            # Packed samples have no padding, so the loss cannot exclude any.
            padded = facts.packing == "padded"
            if padded:
                return {"": "padded", "loss_on": facts.loss_on}
            by_document = {"document_mask": "yes"} if facts.document_mask else {}
            return {"": facts.packing, **by_document} if facts.packing else None
        case "profiled":
            words = {True: "yes", False: "no", None: None}
            return _one_part(words[facts.profiled])
        case _:
            return _one_part(getattr(facts, key))


def _one_part(value: object) -> SettingParts | None:
    return None if value is None else {"": value}


def _shape(shape: Shape) -> SettingParts:
    """Return the parts of a model that determine its work, with defaults filled in."""
    parts = shape.model_dump(exclude={"rope_theta", "norm_eps", "position_offset"})
    if shape.kind == "mmdit":
        return parts
    defaults = {
        "num_kv_heads": shape.kv_heads,
        "head_size": shape.head_dim,
        "embedding_size": shape.embed_dim,
    }
    if shape.positions == "rope":
        parts.pop("max_positions")  # only learned positions have a table
    return parts | defaults


def _layout(layout: Layout) -> SettingParts:
    """Return the parts of a layout that have an effect (a schedule needs a pipeline, for one)."""
    parts = layout.model_dump(exclude={"recompute"})
    if layout.pp == 1:
        parts |= {"schedule": "-", "vp": 1}
    if layout.tp == 1:
        parts["sequence_parallel"] = False
    return parts


def _difference(
    key: str,
    ours: Sequence[SettingParts | None],
    theirs: Sequence[SettingParts | None],
    allowed: bool,
) -> KeyDifference:
    """Return both sides' values as text, limited to the parts that differ."""
    side_settings = [setting for setting in (*ours, *theirs) if setting is not None]
    parts = [
        name
        for name in dict.fromkeys(name for setting in side_settings for name in setting)
        if any(setting.get(name) != side_settings[0].get(name) for setting in side_settings)
    ]
    baseline, candidate = (_side_text(side, parts) for side in (ours, theirs))
    return KeyDifference(key=key, baseline=baseline, candidate=candidate, allowed=allowed)


def _side_text(settings: Sequence[SettingParts | None], parts: Sequence[str]) -> str:
    texts = list(dict.fromkeys(_text(setting, parts) for setting in settings))
    return texts[0] if len(texts) == 1 else f"{MIXED}: {' / '.join(texts)}"


def _text(setting: SettingParts | None, parts: Sequence[str]) -> str:
    if setting is None:
        return UNKNOWN
    names = [name for name in parts if name in setting] or list(setting)
    texts = [f"{name} {setting[name]}".strip() for name in names[:MAX_PARTS]]
    return ", ".join([*texts, "..."] if len(names) > MAX_PARTS else texts)
