"""Options for settings that a log does not state, the same on every verb that reads logs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

import typer

from paceline.cli import quantities
from paceline.cli.options import Panel
from paceline.core.errors import UserError
from paceline.engines.log_reading.generic import NAME as GENERIC
from paceline.engines.log_reading.generic import ColumnChoice, chosen_format
from paceline.logs.facts import UserSettings


def _fact(name: str, *aliases: str, **settings: Any) -> Any:
    """Return an option for a setting that a log does not state."""
    return typer.Option(name, *aliases, rich_help_panel=Panel.log, **settings)


EngineName = Annotated[
    str | None,
    _fact(
        "--engine",
        "--log-format",
        help="Log format, e.g. megatron, or a YAML file that declares one; default: detected.",
        show_default=False,
    ),
]
StepColumn = Annotated[
    str | None,
    _fact(
        "--step-column",
        metavar="NAME",
        help="Column of step numbers, for a log of no known format.",
    ),
]
TimeColumn = Annotated[
    str | None, _fact("--time-column", metavar="NAME", help="Column of step times.")
]
RateColumn = Annotated[
    str | None, _fact("--rate-column", metavar="NAME", help="Column of steps per second.")
]
RecipeName = Annotated[
    str | None,
    _fact("--recipe", help="Recipe that supplies the settings that the log does not state."),
]
ModelName = Annotated[
    str | None,
    _fact(
        "--model",
        help="Model of the run: recipe (llama31-8b), or config.json or name of a Hugging Face "
        "model.",
    ),
]
DeviceName = Annotated[
    str | None, _fact("--device", "--gpu", help="GPU of the catalog, e.g. H100 or B200.")
]
NumDevices = Annotated[
    int | None,
    _fact(
        "--gpus",
        "--devices",
        parser=quantities.whole_number,
        metavar="N",
        help="Total number of GPUs of the run.",
    ),
]
GlobalBatch = Annotated[
    int | None,
    _fact(
        "--global-batch",
        "--gbs",
        parser=quantities.whole_number,
        metavar="N",
        help="Global batch size, in sequences.",
    ),
]
SeqLen = Annotated[
    int | None,
    _fact(
        "--seq-len",
        parser=quantities.sequence_length,
        metavar="TOKENS",
        help="Sequence length in tokens, e.g. 8k.",
    ),
]
DtypeName = Annotated[
    str | None, _fact("--dtype", help="Data type: fp32, fp16, bf16, fp8, mxfp8, mxfp4 or nvfp4.")
]
ConventionName = Annotated[
    str | None,
    _fact(
        "--convention",
        help="FLOPs convention, or framework that uses it (default: causal).",
        show_default=False,
    ),
]
TotalTokens = Annotated[
    float | None,
    _fact(
        "--tokens",
        parser=quantities.tokens,
        metavar="N",
        help="Tokens of the whole training, e.g. 15T, for its duration.",
    ),
]
WindowRule = Annotated[
    str | None,
    _fact(
        "--window",
        metavar="RULE",
        show_default=False,
        help="Steps to evaluate: auto (steady state), last, 35:44 (step numbers as printed) "
        "or skip:5; default: auto, or the framework's own reporting rule.",
    ),
]


@dataclass(frozen=True)
class LogOptions:
    """Settings that a log does not state."""

    panel: ClassVar[Panel] = Panel.log
    engine: EngineName = None
    recipe: RecipeName = None
    model: ModelName = None
    device: DeviceName = None
    gpus: NumDevices = None
    global_batch: GlobalBatch = None
    seq_len: SeqLen = None
    dtype: DtypeName = None
    convention: ConventionName = None
    tokens: TotalTokens = None
    window: WindowRule = None
    step_column: StepColumn = None
    time_column: TimeColumn = None
    rate_column: RateColumn = None

    @property
    def log_format(self) -> str | None:
        """The requested log format: the generic one if columns are named."""
        choice = ColumnChoice(self.step_column, self.time_column, self.rate_column)
        if choice == ColumnChoice():
            return self.engine
        if self.engine and self.engine.lower() != GENERIC:
            raise UserError(
                f"--engine {self.engine}",
                "takes no names of columns",
                remedy="leave out --engine, or the columns",
            )
        return chosen_format(choice)

    def settings(self) -> UserSettings:
        """Return the given settings; raise UserError for unknown values."""
        settings = UserSettings(
            engine=self.log_format,
            recipe=self.recipe,
            model=self.model,
            device=self.device,
            num_devices=self.gpus,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            dtype=self.dtype,
            convention=self.convention,
            total_tokens=self.tokens,
            window=self.window,
        )
        settings.check()
        return settings


LOG_OPTIONS = frozenset(field.name for field in fields(LogOptions))
"""Names of the parameters."""
