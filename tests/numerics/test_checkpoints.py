"""A training that is saved in one layout and resumed in another equals one that never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.shape import DecoderShape, num_parameters
from tests.numerics.cases import Case
from tests.numerics.compare import difference
from tests.numerics.ranks import run_ranks

DRIVER = Path(__file__).with_name("checkpoint_driver.py")
STEPS, SAVED_AFTER = 4, 2
LIMIT_S = 240

# Model, then ranks and layout of both trainings. An ffn of 6 over 4 ranks leaves one without any.
PAIRS = """
llama  1               2  tp2
llama  2  tp2          1
llama  2  tp2 sp       2  zero3
llama  2  zero3        2  tp2 sp
llama  2  zero1        4  tp2 zero3
llama  4  tp2 sp zero3  1
llama  4  pp2 zero3 mb3  4  tp2 zero1
llama  4  zero3        1
llama  2  pp2 mb3      2  zero2
llama  2  pp2 vp2 interleaved mb3  2  tp2
llama  2  tp2 sp       2  pp2 vp2 interleaved mb3
llama  2  zero2        4  zero3 shard2
llama  4  zero3 shard2  4  pp2 zero1 mb3
llama  2  cp2          2  zero1
llama  2  zero2        2  cp2
gpt    2  pp2 mb3      2  zero1
gpt    2  zero1        2  pp2 mb3
gpt    1               4  pp2 zero3 mb3
gpt    4  pp2 zero3 mb3  4  tp4 sp
lora   2  tp2 sp       2  zero3
lora   2  zero3        2  pp2 mb3
sft    2  pp2 mb3      2  tp2
flux   2  tp2          2  zero3
flux   2  zero3        2  cp2
mixtral  1             4  ep2 zero3 mb1
mixtral  2  ep2 mb3    4  ep4 zero3
mixtral  4  ep2 zero3 mb1  1
mixtral  4  ep4 zero3  4  tp2 zero1
mixtral  4  ep2 zero1 mb1  4  ep4 zero2
mixtral  4  ep2 tp2 sp zero3 mb3  4  ep2 zero1 mb1
deepseek-v3  2  pp2 mb3  4  ep2 tp2 sp zero3 mb3
"""


def pairs() -> list[tuple[Case, Case]]:
    """The rows: the layout that saves, and the one that resumes."""
    found: list[tuple[Case, Case]] = []
    for line in PAIRS.strip().splitlines():
        model, *words = line.split()
        second = next(i for i, word in enumerate(words) if i and word.isdigit())
        before, after = words[:second], words[second:]
        found.append(
            (
                Case(int(before[0]), " ".join(before[1:]), model, "fp64"),
                Case(int(after[0]), " ".join(after[1:]), model, "fp64"),
            )
        )
    return found


def task(case: Case, name: str, resume: Path | None) -> dict[str, Any]:
    raw = case.settings()
    raw["training"]["steps"] = STEPS
    if case.model == "llama":
        raw["model"]["ffn_size"] = 8 if case.layout.tp == 4 else 6
        shape = {key: value for key, value in raw["model"].items() if key != "padded_vocab"}
        count = num_parameters(DecoderShape(**shape))
        raw |= {"expected_parameters": count, "expected_trainable": count}
    raw["checkpoint"] = {"every": STEPS, "resume": resume and str(resume), "asynchronous": True}
    return {"name": name, "settings": raw, "saves": resume is None}


def run_tasks(ranks: int, tasks: list[dict[str, Any]], folder: Path) -> None:
    path = folder / f"tasks-{ranks}.json"
    path.write_text(json.dumps(tasks))
    code, output = run_ranks(ranks, DRIVER, str(path), str(folder), folder=folder, limit_s=LIMIT_S)
    assert code == 0, output[-12000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all of it left behind: one start for each world size, the single process's in two."""
    folder = tmp_path_factory.mktemp("layouts")
    rows = pairs()
    sources = dict.fromkeys(before for before, _ in rows)
    whole = [
        Case(1, "", model, "fp64")
        for model in ("llama", "gpt", "lora", "sft", "flux", "mixtral", "deepseek-v3")
    ]
    for ranks in (1, 2, 4):
        saving = [task(case, case.name, None) for case in sources if case.ranks == ranks]
        going_on = [
            task(after, f"{before.name}--{after.name}", folder / before.name)
            for before, after in rows
            if after.ranks == ranks > 1
        ]
        run_tasks(ranks, saving + going_on, folder)
    rest = [
        task(after, f"{before.name}--{after.name}", folder / before.name)
        for before, after in rows
        if after.ranks == 1
    ]
    run_tasks(
        1,
        [{**task(case, f"whole-{case.model}", None), "saves": False} for case in whole] + rest,
        folder,
    )
    return folder


@pytest.mark.parametrize(("before", "after"), pairs(), ids=lambda case: case.name)
def test_a_training_goes_on_in_another_layout_as_if_it_had_never_stopped(
    folder: Path, before: Case, after: Case
) -> None:
    whole = torch.load(folder / f"whole-{after.model}" / "result.pt")
    found = torch.load(folder / f"{before.name}--{after.name}" / "result.pt")

    assert found["done"] == SAVED_AFTER
    assert difference(found["losses"], whole["losses"][SAVED_AFTER:]) < 1e-9
    assert found["weights"].keys() == whole["weights"].keys()
    for name, weight in whole["weights"].items():
        assert difference(found["weights"][name], weight, 1e-3) < 1e-9, name
    assert found["apart"] < 1e-9
