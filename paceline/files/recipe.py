"""Recipes: one YAML file per workload, resolved into a RunSpec."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_origin

from pydantic import PositiveFloat, StringConstraints, field_validator, model_validator

from paceline.core.assets import Asset, graph_problem
from paceline.core.compilation import CompileOption
from paceline.core.errors import UserError, did_you_mean, unknown_name
from paceline.core.flops import validate_convention, without_recompute
from paceline.core.hardware import Cluster, Dtype
from paceline.core.layout import Layout
from paceline.core.layout_checks import layout_problems
from paceline.core.node_groups import ScalingKind
from paceline.core.parallel_run import ParallelRun
from paceline.core.run import EngineSettings, RunSpec
from paceline.core.shape import DecoderShape, LoraSpec, Shape, has_experts, num_parameters
from paceline.core.training import (
    DEFAULT_TIME_LIMIT_S,
    Checkpointing,
    Data,
    MlperfLog,
    Training,
    TrainingBase,
    expert_weights,
    log_problem,
)
from paceline.core.units import LARGEST_INT, count
from paceline.core.value import PositiveInt, Value
from paceline.files.compile_choice import with_compile
from paceline.files.documents import read_text
from paceline.files.hf_config import is_hf_config
from paceline.files.hf_hub import (
    CONFIG,
    OF_EVERY_MODEL,
    add_defaults,
    cached_config,
    config_name,
    hub_config,
    is_hub_id,
    read_config,
    recipe_of_config,
)
from paceline.files.yaml_file import (
    Document,
    line_of,
    models_in,
    parse_value,
    plain,
    read_document,
    read_shipped,
    refuse_secrets,
    validate,
    yaml_text,
)

PerNode = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,8} per node$")]
"""Batch size that grows with the number of nodes: `16 per node`."""
SHIPPED = Path(__file__).parent / "recipes"
"""The folder of the recipes that come with Paceline."""
LONGEST_NAME = 100
_BATCH = re.compile(r"[1-9][0-9]{0,8}( per node)?")


class RecipeTraining(TrainingBase):
    """Training settings of a recipe: the batch per step or per device, the dtype or `auto`."""

    global_batch: PositiveInt | PerNode | None = None
    """Sequences per optimizer step over all devices: a number (strong scaling), or `16 per
    node` (weak scaling)."""
    batch_per_device: PositiveInt | None = None
    """Sequences per optimizer step and device (weak scaling), instead of `global_batch`."""
    dtype: Literal["auto", "fp32", "fp16", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"] = "bf16"
    """Data type of the GEMMs. `auto` is bf16 if the device computes it natively, else fp32."""
    compile: CompileOption = "auto"
    """`blocks` compiles every transformer block with torch.compile, `auto` only if that saves
    time over the run."""

    @field_validator("global_batch", mode="before")
    @classmethod
    def _readable_batch(cls, value: Any) -> Any:
        words = isinstance(value, str) and _BATCH.fullmatch(value)
        number = isinstance(value, int | float) and 1 <= value <= LARGEST_INT and value % 1 == 0
        if words or number or value is None:
            return value
        raise ValueError(f"must be a whole number from 1 to {LARGEST_INT:,}, or like `16 per node`")

    @model_validator(mode="after")
    def _one_batch(self) -> Self:
        if (self.global_batch is None) == (self.batch_per_device is None):
            raise ValueError("exactly one of global_batch and batch_per_device must be given")
        return self

    @property
    def batch_per_node(self) -> int | None:
        """Sequences per node, if the global batch is `N per node`."""
        return int(self.global_batch.split()[0]) if isinstance(self.global_batch, str) else None

    def batch(self, num_devices: int, num_nodes: int = 1) -> int:
        """Return the sequences per optimizer step on this number of devices."""
        if self.batch_per_device is not None:
            return self.batch_per_device * num_devices
        if isinstance(self.global_batch, int):
            return self.global_batch
        return (self.batch_per_node or 1) * num_nodes


class LayoutError(UserError):
    """A layout or a batch that does not fit the devices."""


class Recipe(Value):
    """One workload: model, training, data, layout, and the published rows to compare it with."""

    name: str
    """Name of the recipe."""
    title: str
    """One line for lists."""
    description: str = ""
    """Workload, and source of its settings."""
    engine: str = "native"
    """Engine that trains, one of `paceline recipes engines`."""
    engine_settings: EngineSettings = {}
    """Settings of the chosen engine. Every engine has `arguments` and `environment`: text in
    shell words for its program. An argument that the recipe determines is refused; a variable
    without `=VALUE` comes from your environment."""
    model: Shape
    """Shape of the model."""
    lora: LoraSpec | None = None
    """LoRA adapters. Unset trains all weights."""
    training: RecipeTraining
    """Steps, batch, precision, optimizer and schedule."""
    data: Data = Data()
    """Source of the samples."""
    layout: Layout = Layout()
    """Distribution of the model over the devices."""
    devices: PositiveInt | None = None
    """Number of devices. Unset is all GPUs of the machine, or two processes on a CPU."""
    scaling: ScalingKind | None = None
    """In `paceline scale`, `weak` grows the batch with the devices and `strong` keeps it. Unset
    is strong if `training.global_batch` is a number, else weak."""
    flops_convention: str = "causal"
    """FLOPs convention of MFU and FLOP/s, see the page "Which MFU?"."""
    nominal_parameters: PositiveFloat | None = None
    """Rounded parameter count for the convention `six-n`."""
    time_limit_s: PositiveFloat | None = DEFAULT_TIME_LIMIT_S
    """Time limit in seconds; the run then ends with status `timeout`."""
    hang_limit_s: PositiveFloat = 300.0
    """Seconds without progress after which a rank counts as hung."""
    memory_limit_bytes: PositiveFloat | None = None
    """On a CPU, the memory that each rank may allocate from model construction on."""
    memory_parts: bool = True
    """Track the memory of one early step by part. No figure includes that step."""
    checkpoint: Checkpointing = Checkpointing()
    """Checkpoints to write, and the one from which the run starts."""
    mlperf: MlperfLog | None = None
    """Labels of the MLPerf log that the run writes. Unset writes no MLPerf log."""
    references: tuple[str, ...] = ()
    """Published tables or rows, by id, that the run is compared with."""
    assets: tuple[Asset, ...] = ()
    """Models, data, code and containers that `paceline recipes stage` fetches or builds."""
    variants: dict[str, dict[str, Any]] = {}
    """Named sets of overrides for `--variant`."""
    notes: tuple[str, ...] = ()
    """Differences from the real model, shown with estimates and runs."""

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        """Check the name, which is used in scripts, folder names and terminal output."""
        if not (name.isprintable() and 0 < len(name) <= LONGEST_NAME):
            raise ValueError(f"must be 1 to {LONGEST_NAME} printable characters")
        return name

    @field_validator("assets")
    @classmethod
    def _can_be_ordered(cls, assets: tuple[Asset, ...]) -> tuple[Asset, ...]:
        if problem := graph_problem(assets):
            raise ValueError(problem)
        return assets

    @field_validator("flops_convention")
    @classmethod
    def _known_convention(cls, name: str) -> str:
        """Drop the suffix for recomputation, because hardware FLOP/s follow from the layout."""
        return without_recompute(validate_convention(name))

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if problem := log_problem(self.training, self.mlperf):
            raise ValueError(problem)
        model = self.model
        routing = self.training.routing
        if routing != "learned" and not has_experts(model):
            raise ValueError(f"training.routing {routing} needs a model with experts")
        if isinstance(model, DecoderShape):
            expert_weights(routing, model.num_experts, model.experts_per_token)
        conventions = model.conventions
        if conventions and self.flops_convention not in conventions:
            raise ValueError(
                f"flops_convention must be {' or '.join(conventions)} for this kind of model"
            )
        if model.kind == "mmdit" and self.training.seq_len != model.seq_len:
            raise ValueError(
                f"training.seq_len {self.training.seq_len} must be the sum of the model's text_len "
                f"and image tokens, {model.seq_len}"
            )
        if model.kind == "mmdit" and self.lora is not None:
            raise ValueError("lora is supported for decoders only")
        return self


@cache
def recipe_names() -> list[str]:
    """Return the names of the recipes that come with Paceline."""
    names = (file.name for file in SHIPPED.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


PROGRAM_STARTERS = {".py": "python", ".sh": "bash"}
"""Programs that start a script, by its suffix."""


def recipe_path(name: str) -> Path:
    """Return the file of a recipe: a name or path of a recipe, or of a Hugging Face model.

    A model is named by its config.json, a folder with one, or its name on the hub. Raises UserError
    that suggests the nearest name.
    """
    path = Path(name)
    if path.suffix in (".py", ".sh"):
        raise UserError(
            name,
            "is a program, not a recipe",
            remedy=f"measure it with `paceline run -- {PROGRAM_STARTERS[path.suffix]} {name}`",
        )
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        return path
    if name in recipe_names():
        return SHIPPED / f"{name}.yaml"
    if (path / CONFIG).is_file():
        return path / CONFIG
    if is_hub_id(name):
        return hub_config(name)
    cached = cached_config(name) if name and "/" not in name else None
    if cached is not None:
        return cached
    near = get_close_matches(name.lower(), recipe_names(), n=3, cutoff=0.4)
    raise UserError(
        f"recipe {name!r}",
        "is unknown",
        allowed="a recipe name, a YAML file, a config.json, or ORGANIZATION/MODEL on the hub",
        remedy=(f"did you mean {' or '.join(map(repr, near))}? " if near else "")
        + "`paceline recipes` lists them",
    )


def recipe_yaml(name: str) -> str:
    """Return the YAML of a recipe, or of the recipe for a Hugging Face model."""
    path = recipe_path(name)
    if path.suffix != ".json":
        return read_text(path)
    recipe, _, assumptions = _read(path, path.stat().st_mtime_ns)
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    content["model"] = {"kind": recipe.model.kind, **content["model"]}
    comments = [f"# {count(num_parameters(recipe.model))} parameters"]
    comments += [f"# Assumed: {', '.join(sorted(assumptions))}"] if assumptions else []
    return "\n".join([*comments, yaml_text(content)])


def load_recipe(name: str, variant: str | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """Return a recipe by name or file, with a variant and then `key=value` overrides applied.

    The result is cached, so that a command reads and checks each file once.
    Raises UserError with the file and line, or with the option's text for an override.
    """
    return _recipe_and_assumptions(name, variant, overrides)[0]


def assumed_fields(
    name: str, variant: str | None = None, overrides: Iterable[str] = ()
) -> frozenset[str]:
    """Return the fields that neither the file of a recipe nor its overrides state."""
    return _recipe_and_assumptions(name, variant, overrides)[1]


def _recipe_and_assumptions(
    name: str, variant: str | None, overrides: Iterable[str]
) -> tuple[Recipe, frozenset[str]]:
    path = recipe_path(name)
    changed_ns = path.stat().st_mtime_ns if path.is_file() else 0
    return _load(path, changed_ns, variant, tuple(overrides))


@lru_cache(maxsize=128)
def _load(
    path: Path, changed_ns: int, variant: str | None, overrides: tuple[str, ...]
) -> tuple[Recipe, frozenset[str]]:
    recipe, document, assumptions = _read(path, changed_ns)
    if variant is None and not overrides:
        return _with_assumptions(recipe, assumptions), assumptions
    content = document
    if variant is not None:
        for key, value in _variant(recipe, variant, path).items():
            content = _with(content, key, value)
            validate(Recipe, content, f"variant {variant}: {key}")
            assumptions = frozenset(name for name in assumptions if not _is_set_by(name, key))
    for text in overrides:
        key, value = parse_override(text)
        content = _with(content, key, value)
        assumptions = frozenset(name for name in assumptions if not _is_set_by(name, key))
    where = " ".join(f"--set {text}" for text in overrides) or str(path)
    return _with_assumptions(validate(Recipe, content, where), assumptions), assumptions


@lru_cache(maxsize=128)
def _read(path: Path, _changed_ns: int) -> tuple[Recipe, Document, frozenset[str]]:
    """Return the recipe in a file, its content without line numbers, and the assumed fields.

    Variants of a user's file are checked here; tests check those of the shipped ones.
    """
    if path.parent == SHIPPED:
        document = read_shipped(path)
        return validate(Recipe, document, str(path)), document, frozenset()
    document = read_config(path) if path.suffix == ".json" else read_document(path)
    refuse_secrets(document, str(path))
    name, assumptions = path.stem, frozenset[str]()
    if is_hf_config(document):
        document, name = recipe_of_config(document, path), config_name(document, path)
        assumptions = OF_EVERY_MODEL
    assumptions |= add_defaults(document, name)
    recipe = validate(Recipe, document, str(path))
    _check_variants(recipe, document, path)
    return recipe, cast(Document, plain(document)), assumptions


def _is_set_by(field: str, key: str) -> bool:
    """Return whether an override of `key` replaces an assumed field; both kinds of batch do."""
    rivals = {"training.global_batch", "training.batch_per_device"}
    same = field == key or field.startswith(f"{key}.") or key.startswith(f"{field}.")
    return same or {field, key} == rivals


def _with_assumptions(recipe: Recipe, assumptions: frozenset[str]) -> Recipe:
    """Return the recipe with a note on settings that its file does not state."""
    training = recipe.training
    values = {
        "training.seq_len": f"sequences of {training.seq_len:,} tokens (training.seq_len)",
        "training.batch_per_device": f"{training.batch_per_device} sequences per device and step "
        "(training.global_batch)",
        "training.dtype": f"{training.dtype} (training.dtype)",
        "layout": f"ZeRO stage {recipe.layout.zero_stage} (layout)",
    }
    phrases = [words for name, words in values.items() if name in assumptions]
    if not phrases:
        return recipe
    note = f"assumed, because {recipe.name} does not state it: {', '.join(phrases)}, Adam"
    return recipe.model_copy(update={"notes": (*recipe.notes, note)})


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `key=value` into (dotted key, YAML value); `steps` alone means `training.steps`."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text}", "is not key=value", remedy="for example --set steps=20")
    value = parse_value(raw, f"--set {text}")
    refuse_secrets(value, f"--set {key.strip()}")
    return full_key(key.strip()), value


@cache
def override_keys() -> list[str]:
    """Return every dotted field that `--set` accepts."""
    return sorted({*_dotted_fields(Recipe, "")})


def full_key(key: str) -> str:
    """Return the dotted field for `key`; a last part that is unique, or in training, is enough."""
    keys = override_keys()
    if key in keys or key.rpartition(".")[0] in keys:
        return key
    # An override may replace a group as a whole: `a` and `a.b` of `a.b.c`.
    parts = [field.split(".") for field in keys]
    groups = {".".join(names[:n]) for names in parts for n in range(1, len(names))}
    matching_groups = [group for group in groups if key in (group, group.rpartition(".")[2])]
    if len(matching_groups) == 1:
        return matching_groups[0]
    matches = [field for field in keys if field.rpartition(".")[2] == key]
    if len(matches) == 1:
        return matches[0]
    if f"training.{key}" in matches:
        return f"training.{key}"
    if matches:
        raise UserError(f"--set {key}", "matches several fields", allowed=", ".join(matches))
    leaves = [*keys, *(field.rpartition(".")[2] for field in keys)]
    raise UserError(
        f"--set {key}",
        "is not a field of a recipe",
        remedy=did_you_mean(key, leaves) or "`paceline recipes --fields` lists them",
    )


def resolve(recipe: Recipe, cluster: Cluster, native_bf16: bool, variant: str | None) -> RunSpec:
    """Return the RunSpec of `recipe` on `cluster`; raise LayoutError if the layout cannot run
    there."""
    options = recipe.training
    world_size = cluster.world_size
    where = f"{recipe.name} on {world_size} x {cluster.device}"
    global_batch = options.batch(world_size, cluster.nodes)
    if global_batch > LARGEST_INT:
        raise UserError(
            where, f"has a global batch of {global_batch:,}", allowed=f"at most {LARGEST_INT:,}"
        )
    automatic: Dtype = "bf16" if native_bf16 else "fp32"
    dtype = automatic if options.dtype == "auto" else options.dtype
    fields = options.model_dump(exclude={"batch_per_device", "global_batch", "dtype", "compile"})
    training = Training(**fields, global_batch=global_batch, dtype=dtype)
    problems = _batch_problems(recipe, training, world_size)
    if problems:
        raise LayoutError(
            where,
            "; ".join(problems),
            remedy="change the layout or the batch with --set, or the number of devices",
        )
    shared = (RunSpec.model_fields.keys() & Recipe.model_fields.keys()) - {"training"}
    spec = RunSpec(
        recipe=recipe.name,
        variant=variant,
        training=training,
        cluster=cluster,
        **{name: getattr(recipe, name) for name in shared},
    )
    return with_compile(spec, options.compile)


def _batch_problems(recipe: Recipe, training: Training, world_size: int) -> list[str]:
    """Return why the layout cannot run a step of the full batch, or of a smaller ramp-up batch."""
    run = ParallelRun(
        recipe.layout, recipe.model, world_size, training.global_batch, training.seq_len
    )
    problems = layout_problems(run)
    if problems or training.ramp_up is None:
        return problems
    if problem := training.ramp_up.problem(training.global_batch):
        return [problem]
    for batch in training.batches:
        for problem in layout_problems(replace(run, global_batch=batch)):
            return [f"training.ramp_up: {problem}"]
    return []


def _variant(recipe: Recipe, variant: str, path: Path) -> dict[str, Any]:
    if variant not in recipe.variants:
        raise unknown_name(
            f"{path}: variant {variant!r}",
            "is unknown",
            variant,
            recipe.variants,
            if_none="this recipe has none",
        )
    return {full_key(key): value for key, value in recipe.variants[variant].items()}


def _check_variants(recipe: Recipe, document: Document, path: Path) -> None:
    """Raise UserError with the line of an invalid override in a variant."""
    for variant, changes in recipe.variants.items():
        content = cast(Document, plain(document))
        for variant_key, value in changes.items():
            try:
                key = full_key(variant_key)
                content = _with(content, key, value)
                validate(Recipe, content, key)
            except UserError as error:
                line = line_of(document, ("variants", variant, variant_key))
                what = error.what.removeprefix(f"{variant_key}: ")
                raise UserError(
                    f"{path}:{line}",
                    f"variants.{variant}.{variant_key}: {what}",
                    allowed=error.allowed,
                    remedy=error.remedy,
                ) from error


def _with(content: Document, key: str, value: Any) -> Document:
    """Return a copy of `content` with `key` set to `value`; setting one kind of batch drops the
    other."""
    head, _, inner_key = key.partition(".")
    if inner_key:
        inner = content.get(head)
        value = _with(cast(Document, inner) if isinstance(inner, dict) else {}, inner_key, value)
    result = {**content, head: value}
    rival = {"global_batch": "batch_per_device", "batch_per_device": "global_batch"}.get(head)
    if rival:
        result.pop(rival, None)
    return result


def _dotted_fields(model: type[Value], prefix: str) -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        several = get_origin(annotation) is tuple
        nested = [] if several else [t for t in models_in(annotation) if issubclass(t, Value)]
        keys += [key for kind in nested for key in _dotted_fields(kind, f"{prefix}{name}.")]
        keys += [] if nested else [f"{prefix}{name}"]
    return keys
