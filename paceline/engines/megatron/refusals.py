"""What no descendant of Megatron-LM can be asked for, one sentence each."""

from __future__ import annotations

from pathlib import PurePosixPath

from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.launch.model_options import native_problems
from paceline.engines.megatron.arguments import by_samples, data_prefix

PATHS = ("checkout", "vocab_file", "merge_file")
SPELLINGS = ("old", "new")


def refused_everywhere(spec: RunSpec) -> list[str]:
    """Of the run whatever its framework's version is; a shape that is no decoder ends the list."""
    if spec.model.kind != "decoder":
        return [f"a model of kind {spec.model.kind} is not for pretrain_gpt.py: it trains decoders"]
    return [
        sentence
        for sentence, applies in (
            *_training_rules(spec),
            *_layout_rules(spec),
            *_shape_rules(spec.model),
        )
        if applies
    ] + native_problems(spec.model)


def refused_data(spec: RunSpec) -> list[str]:
    """Why pretrain_gpt.py cannot read these tokens; synthetic ones are the engine's own matter."""
    data = spec.data
    problems = [
        sentence
        for sentence, applies in (
            (
                "data.packing padded has no arguments: its samples are packed",
                data.packing != "packed",
            ),
            (
                "data.loss_mask has no argument: the loss is over all tokens",
                data.loss_mask is not None,
            ),
            ("data.blend: a blend of data sets is not told yet; use data.path", bool(data.blend)),
            (
                "data.split parts a text; engine_settings.split parts an indexed data set",
                data.split is not None,
            ),
        )
        if applies
    ]
    if data.source == "tokens" and data_prefix(spec) is None:
        problems.append(
            "data.path must be the .bin file of an indexed data set, with its .idx file beside it"
        )
    if data.source not in ("tokens", "indexed", "synthetic"):
        problems.append(
            f"data.source {data.source} is not read by pretrain_gpt.py: it takes indexed, the "
            "prefix of an indexed data set"
        )
    return problems


def _training_rules(spec: RunSpec) -> tuple[tuple[str, bool], ...]:
    training, schedule = spec.training, spec.training.lr_schedule
    varies = schedule.kind != "constant" or schedule.warmup > 0
    return (
        ("lora has no arguments: pretrain_gpt.py trains all weights", spec.lora is not None),
        (
            "training.compile has no argument: use training.compile=none",
            training.compile != "none",
        ),
        (
            "training.evaluation has no arguments that keep its meaning: leave it out",
            training.evaluation is not None,
        ),
        ("training.initial_weights are of another format", training.initial_weights is not None),
        (
            "checkpoint.every and checkpoint.resume are of the native trainer's format: leave them "
            "out, and measure each batch by a run of its own",
            spec.checkpoint.every is not None or spec.checkpoint.resume is not None,
        ),
        ("memory_limit_bytes is for the native trainer", spec.memory_limit_bytes is not None),
        (
            "a ramp-up is counted in samples, and so must the learning rate be: set "
            "training.lr_schedule.unit=samples",
            by_samples(training) and schedule.unit == "steps" and varies,
        ),
    )


def refused_spelling(spec: RunSpec) -> list[str]:
    """That arguments are spelled in none of the two ways."""
    spelling = spec.engine_settings.get("spelling") or SPELLINGS[0]
    if spelling in SPELLINGS:
        return []
    return [f"engine_settings.spelling {spelling} is neither old nor new"]


def refused_paths(spec: RunSpec) -> list[str]:
    """That files are named as only one folder can read them, or a vocabulary without merges."""
    named = {name: spec.engine_settings.get(name) for name in PATHS}
    problems = [
        f"engine_settings.{name} {path} must be a whole path: runs work in folders of their own"
        for name, path in named.items()
        if path is not None and not PurePosixPath(str(path)).is_absolute()
    ]
    if (named["vocab_file"] is None) != (named["merge_file"] is None):
        problems.append(
            "engine_settings.vocab_file and merge_file are of one tokenizer: name both, or none"
        )
    return problems


def _layout_rules(spec: RunSpec) -> tuple[tuple[str, bool], ...]:
    layout = spec.layout
    return (
        (
            f"schedule {layout.schedule} has no argument: its pipelines run 1f1b",
            layout.pp > 1 and layout.schedule in ("gpipe", "zero-bubble"),
        ),
        (
            "dp_shard has no argument: states are sharded over all replicas",
            layout.dp_shard is not None,
        ),
    )


def _shape_rules(shape: DecoderShape) -> tuple[tuple[str, bool], ...]:
    return (
        (
            "model.norm_position post has no argument that keeps its meaning",
            shape.norm_position == "post",
        ),
        ("model.final_norm false has no argument", not shape.final_norm),
        ("model.position_offset has no argument", shape.position_offset > 0),
        ("model.embedding_size has no argument", shape.embed_dim != shape.hidden_size),
    )
