"""Megatron-Bridge: performance recipes by their command line, and the log format.

Each rank starts without Megatron-Bridge's launcher. The recipe decides what has no argument
(learning rate, overlap, CUDA graphs, selective recomputation in a layer). Source of the arguments:
NVIDIA-NeMo/Megatron-Bridge, scripts/performance, README.md and argument_parser.py. Its log has two
lines per step, written by two ranks at the same time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.job import Job
from paceline.core.layout import AXIS_FIELDS
from paceline.core.pipeline import layers_per_stage
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.core.steps import FloatColumn
from paceline.core.units import TERA
from paceline.engines.launch.environments import interpreter
from paceline.engines.launch.programs import launch, unknown_settings
from paceline.engines.log_reading.column import GrowingColumn
from paceline.engines.log_reading.iteration_log import IterationLog
from paceline.engines.log_reading.log_content import LogContent, LogFormat, decimal_step, numbers
from paceline.engines.support import (
    LEARNED_ROUTING,
    NO_CHECKPOINTS,
    WITHOUT_RAMP_UP,
    Support,
    TestedProgram,
    no,
    only,
    refusals,
    unequal_stages,
)
from paceline.files.recipe import load_recipe

OUTSIDE = "NVIDIA's NeMo image, or a checkout of Megatron-Bridge and its dependencies"
FOLDER = "scripts/performance"
ENTRIES = ("bootstrap.py", "run_script.py")
"""Programs for each rank: the first since 26.08, the second in earlier images."""
SETTINGS = ("checkout", "family", "recipe", "library", "variant", "precision", "entry")
RECIPES = {
    (32, 4096, 14336, 1): ("llama", "llama3_8b"),
    (80, 8192, 28672, 1): ("llama", "llama3_70b"),
    (126, 16384, 53248, 1): ("llama", "llama31_405b"),
    (61, 7168, 2048, 256): ("deepseek", "deepseek_v3"),
    (61, 7168, 2048, 384): ("kimi", "kimi_k2"),
}
"""Family and recipe by layers, hidden size, feed-forward (or expert) size and experts."""
COUNTS_ENDS = ("llama31_405b",)
"""Recipes that count embedding and head as one layer each of the pipeline."""
_STAGES_OF_61 = ((1, 1), (4, 1), (8, 1), (4, 2), (16, 1), (8, 2), (4, 4))
STAGES = {"deepseek_v3": _STAGES_OF_61, "kimi_k2": (*_STAGES_OF_61, (2, 8))}
"""(pp, vp) for which Megatron-Bridge has a pipeline layout of these recipes."""
PUBLISHED = {
    "llama31-8b": {"fp8": "bridge-fp8"},
    "llama31-70b": {"bf16": "bridge", "fp8": "bridge-fp8"},
    "llama31-405b": {"bf16": "bridge", "fp8": "bridge-fp8"},
}
"""Variants with layout and batch of the H100 recipes (perf_recipes, 067f987d), by dtype."""
GPUS = ("h100", "b200", "b300", "gb200", "gb300")
PRECISIONS = {
    "bf16": ("bf16",),
    "fp8": ("fp8_cs", "fp8_sc"),
    "mxfp8": ("fp8_mx",),
    "nvfp4": ("nvfp4",),
}
"""Megatron-Bridge's names for each dtype; the first is the default."""


_NO_ARGUMENT = no("a performance recipe has no argument for it")
RECIPE: Support = {
    **NO_CHECKPOINTS,
    **WITHOUT_RAMP_UP,
    "model.kind": only("decoder", reason="a performance recipe pre-trains a decoder"),
    "lora": no("a performance recipe trains all weights"),
    "training.compile": _NO_ARGUMENT,
    "training.routing": only("forced", reason="performance recipes force equal loads on experts"),
    "layout.zero_stage": only(
        1, 3, reason="it has the distributed optimizer (1) and Megatron-FSDP (3)"
    ),
    "layout.recompute": only("none", reason="the recipe decides what it recomputes"),
    "layout.dp_shard": no("states are sharded over all replicas"),
    "layout.schedule": only("1f1b", "interleaved", reason="its pipelines run 1f1b"),
    "data.source": only("synthetic", reason="a performance recipe is measured on mock data"),
    "data.packing": only("packed", reason="a performance recipe is measured on mock data"),
}
"""Limits of a performance recipe with any launcher."""
PERFORMANCE: Support = {**RECIPE, "layout.recompute": only("none", "full")}
SUPPORT = {
    "performance recipes": PERFORMANCE,
    "library recipes": {**PERFORMANCE, **LEARNED_ROUTING},
}
TESTED_PROGRAMS = (TestedProgram("067f987d, b50da4c7", "only the argument parsers"),)


def unsupported(spec: RunSpec) -> list[str]:
    """Return what a performance recipe cannot do of `spec`, one sentence each."""
    problems = [*unknown_settings(spec, SETTINGS), *_setting_problems(spec)]
    kind = "library" if spec.engine_settings.get("library") else "performance"
    problems += [*recipe_problems(spec), *refusals(spec, SUPPORT[f"{kind} recipes"])]
    if spec.model.kind == "decoder" and recipe_of(spec) is None:
        names = ", ".join(name for _, name in RECIPES.values())
        problems.append(
            f"{spec.recipe} has no known performance recipe ({names}): set engine_settings.family "
            "and recipe"
        )
    return problems


def recipe_problems(spec: RunSpec) -> Iterator[str]:
    """Yield what no performance recipe supports and the support table cannot express."""
    if gpu_of(spec) is None:
        yield f"device {spec.cluster.device} has no performance recipes; use {', '.join(GPUS)}"
    if spec.layout.sequence_parallel != (spec.layout.tp > 1):
        yield "layout.sequence_parallel must be true with tp > 1 and false otherwise, as in recipes"
    yield from _stage_problems(spec)


def _stage_problems(spec: RunSpec) -> Iterator[str]:
    """Yield why the recipe of a known model cannot split its layers over the pipeline."""
    model, layout = spec.model, spec.layout
    name = isinstance(model, DecoderShape) and RECIPES.get(_sizes(model), ("", ""))[1]
    if name in STAGES:
        if (layout.pp, layout.vp) not in STAGES[name]:
            pairs = ", ".join(f"{pp} x {vp}" for pp, vp in STAGES[name])
            yield (
                f"pp {layout.pp} x vp {layout.vp}: Megatron-Bridge has pipelines of {name} "
                f"for pp x vp of {pairs} only"
            )
    elif name:
        yield from unequal_stages(spec, f"recipe {name}", ends_count=name in COUNTS_ENDS)


def notes(spec: RunSpec) -> list[str]:
    """Return how layout and batch differ from NVIDIA's recipe of today for the same GPUs."""
    variant = PUBLISHED.get(spec.recipe, {}).get(spec.training.dtype)
    if variant is None or gpu_of(spec) != "h100":
        return []
    recipe = load_recipe(spec.recipe, variant)
    sizes = {name: getattr(recipe.layout, name) for name in AXIS_FIELDS}
    theirs = {name: size for name, size in sizes.items() if size != getattr(spec.layout, name)}
    batch = recipe.training.batch(recipe.devices or 1) * spec.world_size // (recipe.devices or 1)
    if spec.training.global_batch != batch:
        theirs["global_batch"] = batch
    if not theirs:
        return []
    settings = ", ".join(f"{name} {value}" for name, value in theirs.items())
    return [
        f"NVIDIA's recipe of today has {settings} on {spec.world_size} H100; use --variant "
        f"{variant} to compare with its speeds"
    ]


def missing(spec: RunSpec) -> str | None:
    """Return a problem if the checkout's program would start on this machine and is missing."""
    entry = Path(checkout_of(spec) or "") / _entry(spec)
    if not spec.cluster.runs_here or entry.is_file():
        return None
    return f"{entry} does not exist; set engine_settings.checkout to the folder of a checkout"


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return the arguments by name."""
    return {"program": _entry(spec), "arguments": _arguments(spec)}


def job(spec: RunSpec, name: str) -> Job:
    """Return the Job with one process per device in the checkout's folder."""
    options = _arguments(spec).items()
    words = [word for name, value in options for word in (f"--{name}", value) if word]
    return launch(
        spec,
        name,
        ["{python}", "-u", _entry(spec), *words],
        python=interpreter(spec),
        # As in its own launcher: a recipe's null tokenizer needs nothing from Hugging Face.
        env={"TRANSFORMERS_OFFLINE": "1"},
        folder=Path(checkout_of(spec) or "/"),
    )


def _entry(spec: RunSpec) -> str:
    return f"{FOLDER}/{spec.engine_settings.get('entry') or ENTRIES[0]}"


def _arguments(spec: RunSpec) -> dict[str, str]:
    """Return all arguments by name without dashes."""
    layout, training = spec.layout, spec.training
    family, recipe = recipe_of(spec) or ("", "")
    variant = spec.engine_settings.get("variant")
    return {
        "model_family_name": family,
        "model_recipe_name": recipe,
        **({"use_recipes": ""} if spec.engine_settings.get("library") else {}),
        "task": "pretrain",
        "num_gpus": str(spec.world_size),
        "gpus_per_node": str(spec.cluster.devices_per_node),
        "gpu": gpu_of(spec) or "",
        "compute_dtype": precision_of(spec) or "",
        **({"config_variant": str(variant)} if variant else {}),
        "data": "mock",
        "max_steps": str(training.steps),
        "global_batch_size": str(training.global_batch),
        "micro_batch_size": str(layout.micro_batch),
        "seq_length": str(training.seq_len),
        "tensor_model_parallel_size": str(layout.tp),
        "pipeline_model_parallel_size": str(layout.pp),
        "context_parallel_size": str(layout.cp),
        "virtual_pipeline_model_parallel_size": str(layout.vp) if layout.vp > 1 else "None",
        "expert_model_parallel_size": str(layout.ep),
        "use_megatron_fsdp": str(layout.zero_stage == 3).lower(),
        **_recompute(spec),
    }


def _recompute(spec: RunSpec) -> dict[str, str]:
    """Return the argument to recompute all layers of each virtual stage, if requested."""
    layout, model = spec.layout, spec.model
    if layout.recompute != "full" or not isinstance(model, DecoderShape):
        return {}
    return {"recompute_num_layers": str(max(layers_per_stage(model, layout)))}


def checkout_of(spec: RunSpec) -> str | None:
    """Return the folder that contains scripts/performance, as the nodes see it."""
    checkout = spec.engine_settings.get("checkout")
    return str(checkout) if checkout else None


def recipe_of(spec: RunSpec) -> tuple[str, str] | None:
    """Return family and recipe: as set, else those of the model's shape."""
    settings, model = spec.engine_settings, spec.model
    if settings.get("family") and settings.get("recipe"):
        return str(settings["family"]), str(settings["recipe"])
    if not isinstance(model, DecoderShape):
        return None
    return RECIPES.get(_sizes(model))


def _sizes(model: DecoderShape) -> tuple[int, int, int, int]:
    return model.num_layers, model.hidden_size, model.ffn_size, model.num_experts


def gpu_of(spec: RunSpec) -> str | None:
    """Return the name of the GPU, or None if it has no recipes."""
    name = spec.cluster.device.lower().partition("-")[0]
    return name if name in GPUS else None


def precision_of(spec: RunSpec) -> str | None:
    """Return the name of the precision, or None if the dtype or the set name has no match."""
    names = PRECISIONS.get(spec.training.dtype, ())
    requested_name = spec.engine_settings.get("precision")
    return next((name for name in names if requested_name in (None, name)), None)


def _setting_problems(spec: RunSpec) -> Iterator[str]:
    settings, checkout = spec.engine_settings, checkout_of(spec)
    if checkout is None or not PurePosixPath(checkout).is_absolute():
        yield (
            "engine_settings.checkout must be the absolute path of a checkout of Megatron-Bridge "
            "on the nodes (in NVIDIA's images /opt/Megatron-Bridge)"
        )
    if bool(settings.get("family")) != bool(settings.get("recipe")):
        yield "engine_settings.family and recipe belong together: set both, or neither"
    entry, library = settings.get("entry"), settings.get("library")
    if library not in (None, True, False):
        yield f"engine_settings.library {library} must be true or false"
    elif library and (
        (settings.get("entry") or ENTRIES[0]) != ENTRIES[0] or settings.get("variant")
    ):
        yield f"engine_settings.library needs {ENTRIES[0]} and has no variants"
    elif library and spec.training.dtype != "bf16":
        yield f"training.dtype {spec.training.dtype}: library recipes train in bf16"
    if entry and entry not in ENTRIES:
        yield f"engine_settings.entry {entry} must be {' or '.join(ENTRIES)}"
    if precision_of(spec) is None:
        names = ", ".join(name for names in PRECISIONS.values() for name in names)
        precision = settings.get("precision") or "none"
        yield (
            f"training.dtype {spec.training.dtype} does not match engine_settings.precision "
            f"{precision}; Megatron-Bridge has {names}"
        )


STEP_TIME = re.compile(
    rb"Step Time : ([0-9.]{1,24}+)s GPU utilization: "
    rb"([0-9.]{1,24}+|nan|inf) ?(?:MODEL_)?TFLOP/s/GPU"
)
FLOPS = "flops_per_s_per_device"
CLOCK_S, CLOCK_SHARE = 0.002, 0.001
"""Tolerance between two ranks' times of one step, beyond printed digits: seconds, fraction."""
AGREEING = 5
"""Number of consecutive steps that must agree after a lost line."""
LOOK_AHEAD = 32
"""Maximum number of consecutive lost lines or records."""
MAX_GAPS = 2000
CHUNK = 4096


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read the last rank's iteration records with the TFLOP/s that rank 0 prints for each step.

    Both ranks print in step order. A line belongs to a record if their times agree. A wrong match
    therefore has an equal step time, and so equal TFLOP/s.
    """
    lines = _StepTimes()
    for batch in IterationLog(log).batches(blocks):
        lines.read(batch.text)
        log.add_steps(batch.index, **batch.columns)
    lines.add_to(log)


class _StepTimes:
    """Lines of rank 0: seconds and FLOP/s of each step."""

    def __init__(self) -> None:
        self._times, self._flops = GrowingColumn(np.float32), GrowingColumn(np.float32)
        self._decimal_s = 0.0
        self._has_zeros = False

    def read(self, text: bytes) -> None:
        """Read the lines in a piece of the log."""
        if not (matches := STEP_TIME.findall(text)):
            return
        times, flops = zip(*matches, strict=True)
        self._decimal_s = self._decimal_s or decimal_step(times[0])
        values = numbers(flops) * TERA
        # Version 25.11 prints 0.0 for hybrid models, whose FLOPs it cannot count.
        self._has_zeros |= bool((values == 0).any())
        self._times.extend(numbers(times))
        self._flops.extend(np.where(values == 0, np.nan, values))

    def add_to(self, log: LogContent) -> None:
        """Add the FLOP/s to the log's steps; without records, the lines become the steps."""
        times, flops, num_records = self._times.read(), self._flops.read(), len(log)
        if self._has_zeros:
            log.remark("a printed GPU utilization of 0.0 is not a measurement and is ignored")
        if not len(times):
            return
        if not num_records:
            log.add_steps(
                np.arange(1, len(times) + 1),
                step_time_s=np.round(times.astype(np.float64), 6),
                flops_per_s_per_device=flops,
            )
            log.resolution_s = self._decimal_s
            log.remark("Step Time lines have no step numbers: steps are counted from 1")
            return
        lines = _lines_of(log.column("step_time_s"), times, self._decimal_s)
        del times, self._times  # Frees memory, which a log of millions of steps needs.
        printed = log.column(FLOPS)
        log.set_column(
            FLOPS,
            (
                np.where(
                    np.isnan(printed[part]) & (lines[part] >= 0), flops[lines[part]], printed[part]
                )
                for part in (slice(n, n + CHUNK) for n in range(0, num_records, CHUNK))
            ),
        )
        num_paired = int((lines >= 0).sum())
        for count, sentence in (
            (len(flops) - num_paired, "Step Time lines without an iteration line, ignored"),
            (num_records - num_paired, "iteration lines without a Step Time line"),
        ):
            if count:
                log.remark(f"{sentence}: {count:,}")


def _lines_of(
    records_s: FloatColumn, lines_s: FloatColumn, decimal_s: float
) -> npt.NDArray[np.int32]:
    """Return the index of each record's line, -1 for a record without one."""

    def agree(line: int, record: int, length: int) -> npt.NDArray[np.bool_]:
        seconds = lines_s[line : line + length], records_s[record : record + length]
        n = min(map(len, seconds))
        tolerance = decimal_s / 2 + CLOCK_S + CLOCK_SHARE * seconds[1][:n]
        return np.abs(seconds[0][:n] - seconds[1][:n]) <= tolerance

    def gap(line: int, record: int) -> tuple[int, int]:
        """Return the smallest number of lines and records to skip until the times agree."""
        for count in range(1, LOOK_AHEAD):
            for lines, records in ((count, 0), (0, count)):
                if agree(line + lines, record + records, AGREEING).all():
                    return lines, records
        return 1, 1

    places = np.full(len(records_s), -1, dtype=np.int32)
    line = record = num_gaps = 0
    while line < len(lines_s) and record < len(records_s) and num_gaps < MAX_GAPS:
        agreeing = agree(line, record, CHUNK)
        n = len(agreeing) if agreeing.all() else int(np.argmin(agreeing))
        places[record : record + n] = np.arange(line, line + n)
        line, record = line + n, record + n
        if n < len(agreeing):
            lines, records = gap(line, record)
            line, record, num_gaps = line + lines, record + records, num_gaps + 1
    return places


LOG_FORMAT = LogFormat(
    title="Megatron-Bridge",
    marks=(b"Step Time : ",),
    step_line=re.compile(rb"Step Time : [0-9.]{1,24}s GPU utilization: "),
    read=read,
    example="`Step Time : 5.69s GPU utilization: ...`, and Megatron's line",
    numbering="from 1",
    end_marker="[after training is done]",
    precedence=2,
    convention="causal",
)
