"""Training settings apart from the model: steps, data, evaluation, checkpoints and profiling."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    StringConstraints,
    field_validator,
    model_validator,
)

from paceline.core.compilation import Compile
from paceline.core.hardware import NARROW, Dtype
from paceline.core.value import (
    NonNegativeInt,
    PositiveInt,
    Value,
)

DataSource = Literal[
    "synthetic", "stdlib", "text", "jsonl", "tokens", "indexed", "latents", "webdataset"
]
Beta = Annotated[float, Field(ge=0, lt=1)]
MatmulPrecision = Literal["highest", "high", "medium"]
ROUTING_MODES = ("learned", "forced")
ROUTING_PATTERN = "pattern:"
MAX_ROUTING_WEIGHT = 999
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"]
DEFAULT_FP8_RECIPE: Fp8Recipe = "tensorwise"
DEFAULT_TOTAL_TOKENS = 1e12
"""Tokens of a full training run if no length is set."""
DEFAULT_TIME_LIMIT_S = 3600.0
"""Time limit of a run if its recipe sets none."""
Decay = Literal["constant", "linear", "cosine"]
ScheduleUnit = Literal["steps", "samples"]


def routing_weights(routing: str) -> tuple[int, ...]:
    """Return the weights of `pattern:W0,W1,...`; empty for another routing.

    Raises ValueError for weights that are not whole numbers from 0 to MAX_ROUTING_WEIGHT.
    """
    if not routing.startswith(ROUTING_PATTERN):
        return ()
    weights = routing.removeprefix(ROUTING_PATTERN).split(",")
    numbers = [int(w) for w in weights if w.isascii() and w.isdigit() and len(w) <= 3]
    if len(numbers) < len(weights) or not any(numbers):
        raise ValueError(
            f"{routing}: use whole numbers up to {MAX_ROUTING_WEIGHT}, for example pattern:3,1"
        )
    return tuple(numbers)


def expert_weights(routing: str, experts: int, per_token: int) -> tuple[int, ...]:
    """Return the weight of each expert of a pattern; empty for another routing.

    A weight counts for experts / (number of weights) adjacent experts. Raises ValueError if the
    weights do not fit the experts, of which a token takes `per_token` different ones.
    """
    weights = routing_weights(routing)
    if not weights:
        return ()
    if experts % len(weights):
        raise ValueError(
            f"training.routing {routing}: {len(weights)} weights do not divide {experts} experts; "
            "use one per expert, or per group of equal size"
        )
    largest, mean = max(weights), sum(weights) * experts / len(weights) / per_token
    if largest > mean:
        raise ValueError(
            f"training.routing {routing}: weight {largest} of one expert is more than {mean:g}, "
            f"the sum over all {experts} experts divided by the {per_token} experts of a token; "
            "a token takes an expert only once"
        )
    return tuple(weight for weight in weights for _ in range(experts // len(weights)))


def _checked_routing(routing: str) -> str:
    if routing not in ROUTING_MODES and not routing_weights(routing):
        raise ValueError(f"must be {', '.join(ROUTING_MODES)} or {ROUTING_PATTERN}W0,W1,...")
    return routing


class LrSchedule(Value):
    """Schedule of the learning rate: linear warm-up to `training.lr`, then decay.

    The learning rate depends only on the step. After n steps (or samples), a step of b has the
    learning rate lr x min(1, (n + b) / warmup) while n < warmup. After that it is min_lr + (lr -
    min_lr) x f((n - warmup) / (decay - warmup)), where f(x) is 1 - x for linear and (1 + cos(pi x))
    / 2 for cosine. From `decay` on it is min_lr.
    """

    kind: Decay = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup: NonNegativeInt = 0
    """Length of the linear warm-up, in `unit`."""
    decay: PositiveInt | None = None
    """Point at which `min_lr` is reached, from the start of training. Unset is its end."""
    min_lr: NonNegativeFloat = 0.0
    """Lowest learning rate."""
    unit: ScheduleUnit = "steps"
    """Unit of `warmup` and `decay`."""

    @model_validator(mode="after")
    def _falls_after_rising(self) -> Self:
        if self.decay is not None and self.decay <= self.warmup:
            raise ValueError(f"decay {self.decay} must be beyond warmup {self.warmup}")
        if self.kind == "constant" and (self.decay is not None or self.min_lr):
            raise ValueError(
                "a constant rate has neither decay nor min_lr; {kind: constant} alone keeps it so"
            )
        return self


class LossScale(Value):
    """Dynamic loss scale of fp16. An overflow skips its step. Other dtypes use no loss scale."""

    initial: PositiveFloat = 65536.0
    """Initial dynamic loss scale, for fp16 only."""
    window: PositiveInt = 2000
    """Consecutive good steps after which the scale doubles."""
    hysteresis: PositiveInt = 1
    """Overflows since the last growth before the scale is halved."""


class RampUp(Value):
    """Batch ramp-up as with Megatron's `--rampup-batch-size`.

    The batch grows from `start` by `increment` over the first `samples` samples.
    """

    start: PositiveInt
    """Global batch of the first step."""
    increment: PositiveInt
    """Samples by which the batch grows each time."""
    samples: PositiveInt
    """Samples after which the batch has its full size."""

    def sizes(self, global_batch: int) -> list[tuple[int, int]]:
        """Return pairs (until, batch).

        `batch` applies while fewer than `until` samples are consumed. It is start + increment x
        int(consumed x n / samples) with n = (global_batch - start) / increment (update of
        RampupBatchSizeNumMicroBatches in Megatron-DeepSpeed's microbatches.py).
        """
        n = (global_batch - self.start) // self.increment
        return [
            (-(-(k + 1) * self.samples // n), self.start + k * self.increment) for k in range(n)
        ]

    def problem(self, global_batch: int) -> str | None:
        """Return why the batch cannot grow to `global_batch`; None if it can."""
        growth = global_batch - self.start
        if growth > 0 and growth % self.increment == 0:
            return None
        return (
            f"training.ramp_up: from {self.start} in steps of {self.increment} the batch never "
            f"reaches global_batch {global_batch}; it must be above start by a multiple of "
            "increment"
        )


Label = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\r\n]+$")]


class Evaluation(Value):
    """Evaluation on held-out samples during training, and the target that ends the training."""

    every_samples: PositiveInt
    """Training samples between two evaluations, rounded up to whole batches."""
    skip_first: NonNegativeInt = 0
    """Skipped evaluations at the start."""
    samples: PositiveInt
    """Held-out samples per evaluation."""
    target: PositiveFloat | None = None
    """Held-out loss that ends the training. Unset only evaluates."""
    path: str | None = None
    """File of held-out samples. Unset holds out the last samples of the training data."""
    loss_mask: str | None = None
    """Loss mask of the held-out tokens, in the format of `data.loss_mask`."""
    mean: Literal["targets", "samples"] = "targets"
    """Mean loss in which every target, or every sample, has equal weight."""


class MlperfLog(Value):
    """Labels of an MLPerf log that a run cannot determine itself."""

    benchmark: Annotated[str, StringConstraints(pattern=r"^\w{1,60}$")]
    """Benchmark, as in the MLPerf rules."""
    org: Label
    """Name of the submitting organization."""
    platform: Label
    """Name of the system."""
    division: Literal["closed", "open"] = "closed"
    """MLPerf division."""
    status: Label = "Research, Development, or Internal (RDI)"
    """Availability of the system, in the words of the rules."""
    warmup_steps: Annotated[int, Field(ge=0, le=1000)] = 2
    """Steps on random samples before the clock starts, with their effect undone."""
    cache_cleared: bool | None = None
    """True if the file caches were dropped before the run. Unset logs nothing."""


class TrainingBase(Value):
    """Settings of the training, apart from the model's shape, the batch and the dtype."""

    seq_len: PositiveInt
    """Tokens per sample."""
    steps: PositiveInt
    """Number of optimizer steps."""
    matmul_precision: MatmulPrecision = "high"
    """Precision of fp32 GEMMs, as in torch.set_float32_matmul_precision."""
    fp8_recipe: Fp8Recipe = DEFAULT_FP8_RECIPE
    """Scaling of fp8 GEMMs, by torchao's names."""
    lr: PositiveFloat = 3e-4
    """Highest learning rate."""
    lr_schedule: LrSchedule = LrSchedule()
    """Warm-up and decay of the learning rate."""
    loss_scale: LossScale = LossScale()
    """Dynamic loss scale of fp16."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Beta 1 and beta 2 of Adam."""
    eps: PositiveFloat = 1e-8
    """Epsilon of Adam."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest gradient norm. 0 disables clipping."""
    routing: Annotated[str, AfterValidator(_checked_routing)] = "learned"
    """Choice of experts: `learned` by the router, or for measurements of speed only `forced` to an
    equal load, or `pattern:3,1` to loads in these ratios: a weight per expert, or per group."""
    router_aux_loss: NonNegativeFloat = 0.0
    """Factor of the loss that balances experts (arXiv:2101.03961, equation 4)."""
    router_z_loss: NonNegativeFloat = 0.0
    """Factor of the loss that keeps the router's logits small (arXiv:2202.08906, equation 5)."""
    router_bias_update_rate: NonNegativeFloat = 1e-3
    """Step of the bias that `model.router_choice_bias` adds (arXiv:2408.15664)."""
    mtp_loss_weight: NonNegativeFloat = 0.3
    """Weight of the loss of `model.mtp_layers`."""
    seed: NonNegativeInt = 1234
    """Seed of the initial weights and of the data order."""
    total_tokens: PositiveFloat | None = DEFAULT_TOTAL_TOKENS
    """Tokens of the full training, for the days to train."""
    ramp_up: RampUp | None = None
    """Batch ramp-up. Unset trains all steps with the full batch."""
    evaluation: Evaluation | None = None
    """Evaluation on held-out samples. Unset never evaluates."""
    initial_weights: str | None = None
    """Source of the weights: checkpoint, run (its latest checkpoint) or Hugging Face folder."""

    @property
    def to_target(self) -> bool:
        """True if a target quality ends the training, as in a benchmark."""
        return self.evaluation is not None and self.evaluation.target is not None

    @property
    def training_tokens(self) -> float | None:
        """Number of tokens of the full training; None if a target ends it and no length is set."""
        usual = self.to_target and self.total_tokens == DEFAULT_TOTAL_TOKENS
        return None if usual else self.total_tokens

    @field_validator("fp8_recipe", mode="before")
    @classmethod
    def _of_fp8(cls, value: object) -> object:
        if value in NARROW:
            recipes = ", ".join(get_args(Fp8Recipe))
            raise ValueError(
                f"{value} is a dtype, not an fp8 recipe: set training.dtype={value}, or use one "
                f"of {recipes}"
            )
        return value

    @model_validator(mode="after")
    def _rate_can_fall(self) -> Self:
        if self.lr_schedule.min_lr > self.lr:
            raise ValueError(
                f"lr_schedule.min_lr {self.lr_schedule.min_lr:g} is above lr {self.lr:g}"
            )
        return self


class Training(TrainingBase):
    """Fully resolved training settings."""

    global_batch: PositiveInt
    """Sequences per optimizer step over all devices, after the ramp-up."""
    dtype: Dtype
    compile: Compile = "none"
    """`blocks` compiles every transformer block with torch.compile."""

    @property
    def batches(self) -> list[int]:
        """All global batches that a step can have, in ascending order."""
        ramp_batches = self.ramp_up.sizes(self.global_batch) if self.ramp_up else []
        return [*(batch for _, batch in ramp_batches), self.global_batch]


class Data(Value):
    """Source and format of the training data."""

    source: DataSource = "synthetic"
    """Kind of data. `stdlib` is the text of Python's standard library, and `indexed` is Megatron's
    .bin and .idx format."""
    path: str | None = None
    """File of `text`, `jsonl` and `tokens`; prefix of the .bin and .idx of `indexed`; index of
    `latents`; folder of the shards of `webdataset`."""
    blend: tuple[tuple[str, PositiveFloat], ...] = ()
    """Indexed data sets with weights, instead of `path`: `[[pile-0, 0.7], [pile-1, 0.3]]`."""
    tokenizer: str | None = None
    """A tokenizer.json, or its folder, for `text` and `jsonl`. Unset reads bytes."""
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """Element type of a token file."""
    text_key: str = "text"
    """Field of a jsonl record that holds the text."""
    real_tokens_per_sample: PositiveFloat | None = None
    """Mean number of unpadded tokens that a synthetic sample represents."""
    packing: Literal["packed", "padded"] = "packed"
    """`packed` cuts one stream of tokens into windows, `padded` pads or truncates one record per
    sample."""
    document_mask: bool = False
    """Restrict attention to the document of each token, and restart positions in each."""
    loss_on: Literal["all", "text"] = "all"
    """Positions of padded samples that count in the loss; `text` excludes padding."""
    loss_mask: str | None = None
    """File with one byte per token of `path`; tokens with byte 0 do not count in the loss."""
    split: tuple[NonNegativeFloat, ...] | None = None
    """Relative sizes of parts, as in DeepSpeed-Chat's `--data_split 2,4,4`. Unset uses all
    samples."""
    split_part: NonNegativeInt = 0
    """Index of the part that is used, counted from 0."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.blend and (self.source != "indexed" or self.path is not None):
            raise ValueError("blend replaces path and needs source indexed")
        if self.tokenizer is not None and self.source not in ("text", "jsonl", "indexed"):
            raise ValueError(f"tokenizer needs source text, jsonl or indexed, not {self.source}")
        return self

    @model_validator(mode="after")
    def _part_is_there(self) -> Self:
        if self.split is None or sum(self.split[self.split_part : self.split_part + 1]) > 0:
            return self
        raise ValueError(
            f"split_part {self.split_part} of split {[*self.split]} is empty: parts are "
            "counted from 0"
        )


class Checkpointing(Value):
    """Checkpointing of the native trainer, and the checkpoint from which it starts."""

    every: PositiveInt | None = None
    """Steps between two checkpoints. Unset saves none."""
    resume: str | None = None
    """Checkpoint, or run (its latest one), to resume from. The layout may differ."""
    asynchronous: bool = True
    """Write checkpoints in the background while training continues."""


def log_problem(training: TrainingBase, mlperf: MlperfLog | None) -> str | None:
    """Return why a training cannot write the requested log; None if it can."""
    if mlperf is not None and training.evaluation is None:
        return (
            "mlperf needs training.evaluation: a benchmark ends when an evaluation is good enough"
        )
    return None


ToolName = Literal["torch", "nsys", "nccl", "memory"]
PROFILES_FOLDER = "profiles"
"""Subfolder of the run folder for the output of the tools, one or more files per rank."""


class Profiling(Value):
    """One profiling tool, attached to some ranks for some steps."""

    tool: ToolName
    ranks: tuple[NonNegativeInt, ...] = Field(min_length=1)
    first_step: PositiveInt = 20
    last_step: PositiveInt = 30
    """Last profiled step (inclusive)."""
    gpu_metrics: bool = False
    """Sample GPU performance counters with nsys."""
    cpu_samples: bool = False
    """Sample CPU activity with nsys."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.last_step < self.first_step:
            raise ValueError(f"last_step {self.last_step} is before first_step {self.first_step}")
        return self

    @property
    def num_steps(self) -> int:
        """Number of profiled steps."""
        return self.last_step - self.first_step + 1
