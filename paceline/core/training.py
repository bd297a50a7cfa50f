"""What is trained apart from the model: steps, schedules, data, evaluation, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import (
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
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"]
DEFAULT_FP8_RECIPE: Fp8Recipe = "tensorwise"
USUAL_TOKENS = 1e12
"""Of a whole training, where nobody says how long it is."""
USUAL_TIME_LIMIT_S = 3600.0
"""Of a run whose recipe states none."""
Decay = Literal["constant", "linear", "cosine"]
ScheduleUnit = Literal["steps", "samples"]


class LrSchedule(Value):
    """How the learning rate rises to `training.lr` and falls from there; a step's alone decides.

    With n steps (or samples) behind it a step of b takes lr x min(1, (n + b) / warmup) while
    n < warmup, then min_lr + (lr - min_lr) x f((n - warmup) / (decay - warmup)) with f(x) = 1 - x
    for linear, (1 + cos(pi x)) / 2 for cosine, and min_lr from `decay` on.
    """

    kind: Decay = "constant"
    """What follows the warm-up."""
    warmup: NonNegativeInt = 0
    """Length of the linear warm-up."""
    decay: PositiveInt | None = None
    """Where min_lr is reached, the warm-up included; None is the end of training."""
    min_lr: NonNegativeFloat = 0.0
    unit: ScheduleUnit = "steps"
    """What `warmup` and `decay` count."""

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
    """fp16's dynamic loss scale; an overflow skips its step, and dtypes besides fp16 need none."""

    initial: PositiveFloat = 65536.0
    window: PositiveInt = 2000
    """Good steps in a row after which it doubles."""
    hysteresis: PositiveInt = 1
    """Which overflow since it last grew halves it for the first time; all after it do as well."""


class RampUp(Value):
    """A batch that grows from `start` by `increment` over the first `samples`, as Megatron's
    `--rampup-batch-size` lets it."""

    start: PositiveInt
    increment: PositiveInt
    samples: PositiveInt

    def sizes(self, global_batch: int) -> list[tuple[int, int]]:
        """(until, batch) pairs: the batch while fewer than `until` samples are behind.

        start + increment x int(consumed x n / samples) with n = (global_batch - start) / increment
        (update of RampupBatchSizeNumMicroBatches in Megatron-DeepSpeed's microbatches.py).
        """
        n = (global_batch - self.start) // self.increment
        return [
            (-(-(k + 1) * self.samples // n), self.start + k * self.increment) for k in range(n)
        ]

    def problem(self, global_batch: int) -> str | None:
        """Why the batch cannot grow to `global_batch` so, None when it can."""
        rest = global_batch - self.start
        if rest > 0 and rest % self.increment == 0:
            return None
        return (
            f"training.ramp_up: from {self.start} in steps of {self.increment} the batch never "
            f"becomes global_batch {global_batch}; it must be above start by a multiple of "
            "increment"
        )


Label = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\r\n]+$")]


class Evaluation(Value):
    """When training stops for a look at samples that it never trains on, and when for good."""

    every_samples: PositiveInt
    """Samples between two evaluations, rounded up to whole batches."""
    skip_first: NonNegativeInt = 0
    """Evaluations at the start that are left out."""
    samples: PositiveInt
    """Held-out samples of one evaluation."""
    target: PositiveFloat | None = None
    """Training ends when the held-out loss is not above it; None only evaluates."""
    path: str | None = None
    """A file of held-out samples; None keeps the last ones of the training's data apart."""
    loss_mask: str | None = None
    """A file with a byte for each token held out: where it is 0 the loss does not count it."""
    mean: Literal["targets", "samples"] = "targets"
    """What counts the same: every target, or every sample with the mean loss of its targets."""


class MlperfLog(Value):
    """What an MLPerf log states about a run besides what the run itself knows."""

    benchmark: Annotated[str, StringConstraints(pattern=r"^\w{1,60}$")]
    """The rules' name of it."""
    org: Label
    """Who would submit."""
    platform: Label
    division: Literal["closed", "open"] = "closed"
    status: Label = "Research, Development, or Internal (RDI)"
    """Availability of the system, in the rules' words."""
    warmup_steps: Annotated[int, Field(ge=0, le=1000)] = 2
    """Steps on random samples before the clock starts, which leave nothing behind."""
    cache_cleared: bool | None = None
    """Whether file caches were dropped before this run; None when nobody says."""


class TrainingBase(Value):
    """What is trained, apart from the model's shape, the batch and the dtype."""

    seq_len: PositiveInt
    steps: PositiveInt
    matmul_precision: MatmulPrecision = "high"
    """torch.set_float32_matmul_precision for fp32 matrix products."""
    fp8_recipe: Fp8Recipe = DEFAULT_FP8_RECIPE
    """What shares a scale when dtype is fp8, by torchao's names."""
    lr: PositiveFloat = 3e-4
    """The highest learning rate."""
    lr_schedule: LrSchedule = LrSchedule()
    loss_scale: LossScale = LossScale()
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    grad_clip: NonNegativeFloat = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    seed: NonNegativeInt = 1234
    total_tokens: PositiveFloat | None = USUAL_TOKENS
    """Length of the whole training for which days are computed."""
    ramp_up: RampUp | None = None
    """A smaller batch at first; None trains all steps with the whole one."""
    evaluation: Evaluation | None = None
    """None trains all steps and looks at nothing else."""
    initial_weights: str | None = None
    """A checkpoint, or a run (its latest one is meant), of which only the weights are taken."""

    @property
    def to_target(self) -> bool:
        """Whether a quality ends the training, as a benchmark's."""
        return self.evaluation is not None and self.evaluation.target is not None

    @property
    def whole_tokens(self) -> float | None:
        """Length of the whole training; None where a target ends it and no length was stated."""
        usual = self.to_target and self.total_tokens == USUAL_TOKENS
        return None if usual else self.total_tokens

    @field_validator("fp8_recipe", mode="before")
    @classmethod
    def _of_fp8(cls, value: object) -> object:
        if value in NARROW:
            recipes = ", ".join(get_args(Fp8Recipe))
            raise ValueError(
                f"{value} is a number format of its own: set training.dtype={value}, or use one "
                f"of fp8's: {recipes}"
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
    """TrainingBase with everything resolved."""

    global_batch: PositiveInt
    """Sequences per optimizer step over all devices, once a ramp-up is over."""
    dtype: Dtype
    compile: Compile = "none"
    """`blocks`: torch.compile for every transformer block."""

    @property
    def batches(self) -> list[int]:
        """Every global batch that a step may have, the smallest first."""
        grown = self.ramp_up.sizes(self.global_batch) if self.ramp_up else []
        return [*(batch for _, batch in grown), self.global_batch]


class Data(Value):
    """Where tokens come from."""

    source: DataSource = "synthetic"
    path: str | None = None
    """File for `text`, `jsonl` and `tokens`; for `indexed` PREFIX of a .bin and an .idx.

    The index of `latents`; for `webdataset` the folder of its shards.
    """
    blend: tuple[tuple[str, PositiveFloat], ...] = ()
    """(prefix, weight) of several indexed data sets, in place of `path`."""
    tokenizer: str | None = None
    """A tokenizer.json by which `text` and `jsonl` become an indexed data set; None: bytes."""
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    text_key: str = "text"
    """Field of a jsonl record that holds the text."""
    real_tokens_per_sample: PositiveFloat | None = None
    """Mean unpadded tokens of what synthetic samples stand for; counted where the data is real."""
    packing: Literal["packed", "padded"] = "packed"
    """`packed`: windows of one line of tokens; `padded`: a record a sample, cut or filled up."""
    document_mask: bool = False
    """Tokens of a packed window attend to their own document alone, at positions from its start."""
    loss_on: Literal["all", "text"] = "all"
    """What the loss of padded samples is taken over: every position, or no padding."""
    loss_mask: str | None = None
    """A file with a byte for each token of `path`: where it is 0 the loss does not count it."""
    split: tuple[NonNegativeFloat, ...] | None = None
    """Sizes of parts in proportion to each other, as DeepSpeed-Chat's `--data_split 2,4,4`."""
    split_part: NonNegativeInt = 0
    """The part that is trained on and evaluated by, the first one 0."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.blend and (self.source != "indexed" or self.path is not None):
            raise ValueError("blend takes the place of path, for source indexed")
        if self.tokenizer is not None and self.source not in ("text", "jsonl", "indexed"):
            raise ValueError(f"tokenizer is for text and jsonl, and source is {self.source}")
        return self

    @model_validator(mode="after")
    def _part_is_there(self) -> Self:
        if self.split is None or sum(self.split[self.split_part : self.split_part + 1]) > 0:
            return self
        raise ValueError(
            f"split_part {self.split_part} of split {[*self.split]} holds nothing: parts are "
            "counted from 0"
        )


class Checkpointing(Value):
    """When the native trainer saves its state, and which state it begins with."""

    every: PositiveInt | None = None
    """Steps between two checkpoints; None saves none."""
    resume: str | None = None
    """A checkpoint, or a run whose latest one is meant, to go on from in any layout."""
    asynchronous: bool = True
    """Write in the background while training goes on."""


def log_problem(training: TrainingBase, mlperf: MlperfLog | None) -> str | None:
    """Why a training cannot write the log that it is asked for; None when it can."""
    if mlperf is not None and training.evaluation is None:
        return (
            "mlperf needs training.evaluation: a benchmark ends when an evaluation is good enough"
        )
    return None
