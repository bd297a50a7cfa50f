"""Table of layouts of models with experts: what is proved here, and what is refused and why.

`python -m tests.numerics.expert_layouts` writes docs/dev/expert-layouts.md. A layout is proved if
the numerics suite trains it in fp64 and its losses, gradients and weights equal one process's.
"""

from __future__ import annotations

from pathlib import Path

from paceline.core.layout import Layout
from paceline.core.layout_checks import native_problems, violated_rules
from paceline.core.parallel_run import ParallelRun
from paceline.core.shape import DecoderShape
from tests.numerics.cases import EXCHANGES, Case, table
from tests.numerics.models import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "dev" / "expert-layouts.md"
EXPERT_MODELS = tuple(
    name
    for name, model in MODELS.items()
    if isinstance(model.shape, DecoderShape) and model.shape.num_experts > 1
)
WORDS = {
    "dp": "data parallelism, ZeRO-0",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "hybrid": "hybrid sharding (`dp_shard`)",
    "sync-last": "ZeRO-3, `gradient_sync: last`",
    "tp": "tensor parallelism",
    "tp+sp": "tensor and sequence parallelism",
    "gpipe": "pipeline, gpipe",
    "1f1b": "pipeline, 1f1b",
    "interleaved": "pipeline, interleaved",
    "zero-bubble": "pipeline, zero-bubble",
    "all-gather": "context parallelism, all-gather",
    "all-to-all": "context parallelism, all-to-all",
    "ring": "context parallelism, ring",
    "selective": "recomputation of attention",
    "full": "recomputation of blocks",
    "budget": "recomputation by budget",
    "compile": "compiled blocks",
}
"""Features of a layout, in the order of the table."""
HEAD = """# Layouts of models with experts
Each cell says whether the numerics suite proves a layout: it trains the model in fp64, and losses,
gradient norms, gradients and weights equal those of one process to 1e-9. In parentheses is the
number of proved layouts with this feature. Refused layouts never start. `as mixtral` means that the
model has no layout of its own with the feature. The others differ from mixtral in their routers,
norms and widths, gpt-oss also in its biases, activation and attention, and deepseek-v3 in its
attention, which exchanges nothing of its own.

<!-- generated: python -m tests.numerics.expert_layouts -->
"""
Proofs = dict[tuple[str, bool, str], int]


def of_case(case: Case) -> set[str]:
    """The features of a case's layout, as WORDS names them."""
    # The test of coverage imports this module's names in turn.
    from tests.numerics.test_coverage import present

    layout = case.layout
    found = set(present(layout, case.ranks, case.compiled))
    if layout.cp > 1:
        found.add(layout.cp_exchange)
    if layout.zero_stage == 3 and layout.gradient_sync == "last":
        found.add("sync-last")
    if layout.pp > 1:
        found.add(layout.effective_schedule)
    if layout.zero_stage:
        found.discard("dp")
    if "tp+sp" in found:
        found.discard("tp")
    return found


def proofs() -> Proofs:
    """Number of proved layouts by model, whether ep is above 1, and feature."""
    counts: Proofs = {}
    for case in table(everything=False):
        if case.model in EXPERT_MODELS:
            for feature in of_case(case) & WORDS.keys():
                key = case.model, case.layout.ep > 1, feature
                counts[key] = counts.get(key, 0) + 1
    return counts


def refusal(model: str, feature: str, ep: bool) -> str | None:
    """Why no layout of a model has this feature; None where rules allow it."""
    has = {feature, *(("ep",) if ep else ())} | ({"zero2"} if feature == "hybrid" else set())
    rules = violated_rules(frozenset(has))
    if not rules and feature in EXCHANGES:
        run = ParallelRun(Layout(cp=2, cp_exchange=feature), MODELS[model].shape, 2)
        return next(iter(native_problems(run)), None)
    return rules[0].reason if rules else None


def cell(found: Proofs, model: str, ep: bool, feature: str) -> str:
    """What a cell says."""
    if reason := refusal(model, feature, ep):
        return f"refused: {reason}"
    if number := found.get((model, ep, feature)):
        return f"proved ({number})"
    others = [name for name in EXPERT_MODELS if found.get((name, ep, feature))]
    return f"as {others[0]}" if others else "not proved"


def page() -> str:
    """The page."""
    found = proofs()
    columns = [(model, ep) for model in EXPERT_MODELS for ep in (False, True)]
    titles = ["layout", *(f"{model}, ep {'> 1' if ep else '1'}" for model, ep in columns)]
    rows = [titles, ["---"] * len(titles)]
    rows += [
        [title, *(cell(found, model, ep, feature) for model, ep in columns)]
        for feature, title in WORDS.items()
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return HEAD + "\n".join(lines) + "\n<!-- end -->\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
