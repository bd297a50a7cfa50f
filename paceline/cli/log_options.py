"""What a user can add to a log, shared by `parse` and `import`."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def _fact(name: str, *aliases: str, **settings: Any) -> Any:
    """An option that fills in what a log does not say."""
    return typer.Option(name, *aliases, rich_help_panel="What the log does not say", **settings)


EngineName = Annotated[
    str | None,
    _fact(
        "--engine",
        help="The log's format, for example megatron or nemo1; default: recognized.",
        show_default=False,
    ),
]
RecipeName = Annotated[
    str | None, _fact("--recipe", help="A recipe whose settings fill in what the log does not say.")
]
ModelName = Annotated[
    str | None, _fact("--model", help="A recipe of which only the model counts, e.g. llama31-8b.")
]
DeviceName = Annotated[
    str | None, _fact("--device", help="A device of the catalog, e.g. H100 or b200.")
]
NumDevices = Annotated[int | None, _fact("--gpus", "--devices", min=1, help="Devices of the run.")]
GlobalBatch = Annotated[
    int | None, _fact("--global-batch", min=1, help="Sequences a step over all devices.")
]
SeqLen = Annotated[int | None, _fact("--seq-len", min=1, help="Tokens a sequence.")]
DtypeName = Annotated[
    str | None, _fact("--dtype", help="fp32, fp16, bf16, fp8, mxfp8, mxfp4 or nvfp4.")
]
ConventionName = Annotated[
    str | None,
    _fact(
        "--convention",
        help="How FLOPs are counted; default the model's, else causal.",
        show_default=False,
    ),
]
TotalTokens = Annotated[
    float | None,
    _fact("--tokens", min=1, help="Tokens of the whole training, for days (e.g. 1e12)."),
]
WindowRule = Annotated[
    str | None,
    _fact(
        "--window",
        metavar="RULE",
        show_default=False,
        help="auto (steady steps), last, 35:44 (step numbers as printed) or skip:5; default auto, "
        "or the log's one figure where the framework reports by that.",
    ),
]
