"""Megatron-DeepSpeed: pretrain_gpt.py of a checkout with DeepSpeed settings, and the log format.

Arguments as in `train/tr3-1B3-baseline/tr3m-1B3-emb-norm-pile.slurm` of
bigscience-workshop/bigscience. Argonne's fork logs the same records in the form
`iteration=1/ 50 | elapsed_time_per_iteration_ms=3420.2`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.launch.accepted_options import accepted_options, rejected_options
from paceline.engines.launch.environments import interpreter, package_version
from paceline.engines.launch.extra_settings import extra_arguments
from paceline.engines.launch.programs import launch, unknown_settings
from paceline.engines.log_reading.iteration_log import IterationLog
from paceline.engines.log_reading.log_content import LogContent, LogFormat, numbers
from paceline.engines.megatron import ENTRY, missing_entry, readable
from paceline.engines.megatron.arguments import (
    REPLACEABLE,
    TRAINING_ONLY,
    Arguments,
    batch_arguments,
    data_prefixes,
    dropout_arguments,
    layout_arguments,
    length_arguments,
    log2_of,
    optimizer_arguments,
    shape_arguments,
    without_unreached_batches,
    words,
)
from paceline.engines.megatron.support import (
    FAMILY,
    NO_ARGUMENT,
    path_problems,
    setting_problems,
)
from paceline.engines.support import DEEPSEEK, TestedProgram, no, only, refusals
from paceline.files.documents import read_text

OUTSIDE = (
    "a checkout of Megatron-DeepSpeed, and an interpreter with pybind11, transformers and "
    "DeepSpeed (BigScience's: DeepSpeed before 0.9, numpy before 1.24 and Apex)"
)
SETTINGS = ("checkout", "spelling", "split", "tokenizer", "vocab_file", "merge_file")
NO_CHECKOUT = (
    "engine_settings.checkout is not set: set it to the folder of a checkout of Megatron-DeepSpeed "
    "on the nodes"
)
CONFIG_FILE = "ds_config.json"
PARSER, TRAINING = "megatron/arguments.py", "megatron/training.py"
GIVEN_TWICE = re.compile(r"^ +config=config,\n +args=args,$", re.MULTILINE)
"""Call of `deepspeed.initialize` in BigScience's fork."""
WORKING_DEEPSPEED, FIRST_STRICT_DEEPSPEED = "deepspeed==0.8.3", (0, 9)
REMEDIES = {
    "--embed-layernorm": "use model.embedding_norm=false, or BigScience's fork",
}
"""Remedies for an option that only some forks have."""
STEPS_PER_PRINT = 2000
"""Steps between DeepSpeed's own lines; large, because they only show a running average."""

SUPPORT = {
    "": {
        **FAMILY,
        **DEEPSEEK,
        "model.num_experts": NO_ARGUMENT,
        "model.num_kv_heads": no("its attention heads are not grouped"),
        "model.norm": only("layernorm"),
        "model.bias": only(True, reason="its linear layers have biases"),
        "model.tied_embeddings": only(True, reason="its embeddings are tied"),
        "model.rope_theta": only(10_000.0, reason="pretrain_gpt.py has no argument for it"),
        "training.dtype": only("fp32", "fp16", "bf16"),
        "layout.cp": NO_ARGUMENT,
        "layout.vp": no("DeepSpeed's pipelines have no virtual stages"),
        "layout.ep": NO_ARGUMENT,
        "layout.zero_stage": only(
            0, 1, reason="it always uses DeepSpeed's pipeline modules, which support no more"
        ),
        "layout.recompute": only("none", "full"),
        "layout.sequence_parallel": NO_ARGUMENT,
        "data.source": only(
            "indexed",
            "tokens",
            reason="it reads indexed data sets",
            remedy="use data.source=indexed and data.path=PREFIX",
        ),
    }
}
TESTED_PROGRAMS = (
    TestedProgram("bigscience-workshop 8387ae1", "DP, TP 2, PP 2, ramp-up, SSH, Slurm"),
    TestedProgram("microsoft f4157be, DeepSpeed 0.18.1", "one process"),
)


def unsupported(spec: RunSpec) -> list[str]:
    """Return what Megatron-DeepSpeed cannot do of `spec`, one sentence each."""
    problems = [*unknown_settings(spec, SETTINGS), *path_problems(spec)]
    if not spec.engine_settings.get("checkout"):
        problems.append(NO_CHECKOUT)
    problems += refusals(spec, SUPPORT[""])
    model, scale = spec.model, spec.training.loss_scale.initial
    if model.kind != "decoder":
        return problems
    problems += setting_problems(spec)
    if spec.training.dtype == "fp16" and log2_of(scale) is None:
        problems.append(
            f"training.loss_scale.initial {scale:g} must be a power of two for DeepSpeed"
        )
    if not problems:
        problems += _checkout_problems(spec)
    if not model.gated_ffn and model.activation != "gelu":
        problems.append(
            f"model.activation {model.activation} is not supported without a gate: use gelu"
        )
    return problems


def _checkout_problems(spec: RunSpec) -> Iterator[str]:
    """Yield the options that the checkout, if readable here, does not have."""
    checkout = str(spec.engine_settings.get("checkout"))
    argv = [*words(arguments(spec, CONFIG_FILE)), *extra_arguments(spec)]
    for option in rejected_options(argv, [Path(checkout, PARSER)]):
        remedy = REMEDIES.get(option, "use bigscience-workshop/Megatron-DeepSpeed")
        yield f"engine_settings.checkout {checkout} does not accept {option}; {remedy}"


def missing(spec: RunSpec) -> str | None:
    """Return a problem if the checkout's program would start on this machine and is missing."""
    checkout = str(spec.engine_settings.get("checkout"))
    return (
        missing_entry(spec, checkout)
        or _missing_vocabulary(spec)
        or _wrong_deepspeed(spec, Path(checkout, TRAINING))
    )


def _missing_vocabulary(spec: RunSpec) -> str | None:
    others = ("--vocab-file", "--merge-file", "--tokenizer-type")
    if not spec.cluster.runs_here or any(word.startswith(others) for word in extra_arguments(spec)):
        return None
    files = [str(words[0]) for name, words in _tokenizer(spec).items() if name.endswith("-file")]
    absent = [file for file in files if not Path(file).exists()]
    if not absent:
        return None
    return (
        f"{absent[0]} does not exist; set engine_settings.tokenizer to the folder of a Hugging "
        "Face tokenizer, or engine_settings.vocab_file and merge_file"
    )


def _wrong_deepspeed(spec: RunSpec, training: Path) -> str | None:
    """Return a problem if DeepSpeed rejects the settings that the checkout gives it twice."""
    try:
        text = read_text(training)
    except (OSError, ValueError):
        return None
    if not spec.cluster.runs_here or not GIVEN_TWICE.search(text):
        return None
    python = interpreter(spec)
    version = package_version(Path(python), "deepspeed")
    if version is None or version < FIRST_STRICT_DEEPSPEED:
        return None
    return (
        f"DeepSpeed {'.'.join(map(str, version))} rejects the settings that this checkout passes "
        f"as `config` and `--deepspeed_config`; install {WORKING_DEEPSPEED} for {python}"
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return the arguments by name, and DeepSpeed's settings."""
    return {
        "arguments": readable(arguments(spec, CONFIG_FILE)),
        CONFIG_FILE: json.loads(deepspeed_config(spec)),
    }


def job(spec: RunSpec, name: str) -> Job:
    """Return the Job: a process per device in the checkout, settings in the run folder."""
    checkout = str(spec.engine_settings.get("checkout"))
    argv = words(arguments(spec, f"{{output}}/{CONFIG_FILE}"))
    return launch(
        spec,
        name,
        ["{python}", "-u", ENTRY, *argv],
        python=interpreter(spec),
        files={CONFIG_FILE: deepspeed_config(spec)},
        folder=Path(checkout),
        replaceable=REPLACEABLE,
    )


def arguments(spec: RunSpec, config_file: str) -> Arguments:
    """Return all arguments after `pretrain_gpt.py`; `config_file` has DeepSpeed's settings."""
    spec = without_unreached_batches(spec)
    model = spec.model
    assert isinstance(model, DecoderShape)
    training, settings = spec.training, spec.engine_settings
    return {
        **layout_arguments(spec),
        "distributed-backend": ["gloo" if spec.cluster.device == "cpu" else "nccl"],
        **_shape(model, training.seq_len),
        **dropout_arguments(model),
        **batch_arguments(training, stepwise=settings.get("spelling") == "new"),
        **length_arguments(training),
        **_precision(spec),
        **optimizer_arguments(training),
        **({"checkpoint-activations": []} if spec.layout.recompute == "full" else {}),
        **_tokenizer(spec),
        "data-path": data_prefixes(spec) or [""],
        "data-impl": ["mmap"],
        "split": [settings.get("split") or TRAINING_ONLY],
        "log-interval": [1],
        "eval-iters": [0],
        "eval-interval": [1000],
        "deepspeed": [],
        "deepspeed_config": [config_file],
        "zero-stage": [spec.layout.zero_stage],
        **({"deepspeed-activation-checkpointing": []} if spec.layout.recompute == "full" else {}),
    }


def deepspeed_config(spec: RunSpec) -> str:
    """Return DeepSpeed's JSON settings; accumulation steps follow from the batch size ramp-up."""
    training = without_unreached_batches(spec).training
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.layout.micro_batch,
        "train_batch_size": training.global_batch,
        "gradient_clipping": training.grad_clip,
        "zero_optimization": {"stage": spec.layout.zero_stage},
        "steps_per_print": STEPS_PER_PRINT,
        "wall_clock_breakdown": False,
    }
    if training.dtype == "fp16":
        scale = training.loss_scale
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": scale.window,
            "hysteresis": scale.hysteresis,
            "min_loss_scale": 1,
            "initial_scale_power": log2_of(scale.initial),
        }
    elif training.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return json.dumps(config, indent=2) + "\n"


def _shape(model: DecoderShape, seq_len: int) -> Arguments:
    shape = shape_arguments(model, seq_len)
    if model.positions == "rope":
        shape.pop("max-position-embeddings")
        shape["position-embedding-type"] = ["rotary"]
    shape["layernorm-epsilon"] = [model.norm_eps]
    if model.embedding_norm:
        shape["embed-layernorm"] = []
    if model.gated_ffn:
        unit = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}[model.activation]
        shape |= {"glu-activation": [unit], "no-bias-gelu-fusion": []}
    return shape


def _precision(spec: RunSpec) -> Arguments:
    dtype, scale = spec.training.dtype, spec.training.loss_scale
    if dtype == "fp16":
        # As in BigScience's scripts; DeepSpeed scales the loss, starting at 2 to this power.
        return {"fp16": [], "loss-scale": [log2_of(scale.initial)]}
    return {"bf16": []} if dtype == "bf16" else {}


def _tokenizer(spec: RunSpec) -> Arguments:
    """Return the arguments of the tokenizer. Microsoft's fork has names of its own."""
    settings = spec.engine_settings
    if tokenizer := settings.get("tokenizer"):
        options = accepted_options([Path(str(settings.get("checkout")), PARSER)])
        if options and "--tokenizer-name-or-path" not in options:
            return {"tokenizer-type": ["HFTokenizer"], "tokenizer-model": [tokenizer]}
        return {"tokenizer-type": ["PretrainedFromHF"], "tokenizer-name-or-path": [tokenizer]}
    data = f"{settings.get('checkout')}/data"
    return {
        "vocab-file": [settings.get("vocab_file") or f"{data}/gpt2-vocab.json"],
        "merge-file": [settings.get("merge_file") or f"{data}/gpt2-merges.txt"],
    }


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps with times in seconds (before 2022 in ms), `TFLOPs` per device, samples of all.

    For some weeks of 2021, `samples per second` was divided by milliseconds; it is kept as printed.
    DeepSpeed's own timer may also print a running average, which is not the time of a step.
    """
    for batch in IterationLog(log).batches(_with_colons(blocks)):
        log.add_steps(batch.index, **batch.columns)
        if b"RunningAvgSamplesPerSec=" in batch.text:
            _keep_running_average(batch.text, log)


_TIME_KEY = b"elapsed_time_per_iteration_ms="
_NAMES = {
    b"iteration=": b"iteration ",
    _TIME_KEY: b"elapsed time per iteration (ms): ",
    b"consumed_samples=": b"consumed samples: ",
    b"consumed_tokens=": b"consumed tokens: ",
    b"global_batch_size=": b"global batch size: ",
    b"grad_norm=": b"grad norm: ",
    b"actual_seqlen=": b"actual seqlen: ",
    b"number_of_skipped_iterations=": b"number of skipped iterations: ",
    b"number_of_nan_iterations=": b"number of nan iterations: ",
    b"samples_per_second=": b"samples per second: ",
    b"tokens_per_gpu_per_second_tgs=": b"tokens per gpu per second (tgs): ",
    b"[DS]TFLOPs=": b"TFLOPs: ",
    b"[DS]-TFLOPs=": b"TFLOPs: ",
    b"[LM]TFLOPs=": b"Megatron-LM FLOPs: ",
    b"[LM]-TFLOPs=": b"Megatron-LM FLOPs: ",
}
"""Field names of forks, and their usual names."""

_OTHER_NAME = re.compile(rb"(?<=\| )([A-Za-z][\w ]{0,60})=(?=[ 0-9+-])")
_RUNNING = re.compile(rb"RunningAvgSamplesPerSec=([0-9.]{1,24})")


def _with_colons(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the blocks with `name: value` instead of a fork's `name=value`."""
    has_keys = False
    for block in blocks:
        has_keys = has_keys or _TIME_KEY in block
        if has_keys:
            for name, usual in _NAMES.items():
                block = block.replace(name, usual)
            block = _OTHER_NAME.sub(rb"\1: ", block)
        yield block


def _keep_running_average(text: bytes, log: LogContent) -> None:
    values = numbers(_RUNNING.findall(text)[-1:])
    if len(values) and 0 < values[0] < float("inf"):
        log.figures["running_samples_per_s"] = float(values[0])


_STEP_LINE = re.compile(
    rb"\| (?:consumed tokens: {1,24}+\d{1,18} \||elapsed time per iteration \(s\): |lm-loss: "
    rb"|samples per second: {0,8}+[0-9.]{1,18} \|"
    rb"|elapsed_time_per_iteration_ms= {0,8}+[0-9.]{1,18} \|)"
)

LOG_FORMAT = LogFormat(
    title="Megatron-DeepSpeed",
    marks=(b"elapsed time per iteration (", b" | consumed samples: ", _TIME_KEY),
    step_line=_STEP_LINE,
    read=read,
    example="Megatron's line with `samples per second`, or `elapsed_time_per_iteration_ms=3420.2`",
    numbering="from 1",
    end_marker="[after training is done]",
    precedence=3,
    convention="megatron-deepspeed+recompute",
)
