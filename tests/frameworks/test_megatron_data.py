"""Indexed data sets against Megatron-Core: its writer's bytes, its reader, its order of samples."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engines.launch.environments import installed
from paceline.staging.conversions import stdlib_corpus
from paceline.staging.conversions.indexed import IndexedWriter, files_of
from paceline.staging.conversions.tokenization import tokenization, tokenize
from paceline.trainer.config import parse_config
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.parallel.mesh import ALONE
from tests.trainer.example import settings

ENVIRONMENT = installed("megatron")
PROGRAM = Path(__file__).with_name("megatron_data_program.py")
SEQ_LEN, BATCH = 32, 4
BLEND = {"a": 0.3, "b": 0.6, "c": 0.1}
CASES: list[tuple[int, tuple[float, ...] | None, dict[str, float] | None]] = [
    (2, None, None),  # a part of an epoch
    (60, None, None),
    (63, None, None),
    (66, None, None),  # of these three one takes little of its last epoch, one most of it
    (30, (7, 2, 1), None),
    (50, None, BLEND),
    (50, (8, 1, 1), BLEND),  # Megatron waits for ever where a part has no documents
]
"""Steps, split, blend."""
pytestmark = pytest.mark.skipif(
    ENVIRONMENT is None, reason="`paceline recipes engines install megatron` has not been run"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets a, b and c of documents of very different lengths, and records with a tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    for name, documents in (("a", 40), ("b", 90), ("c", 9)):
        with IndexedWriter(folder / name, np.dtype("uint16")) as writer:
            writer.add_documents(
                [draw.randrange(1, 300) for _ in range(draw.choice([1, 5, 33, 200]))]
                for _ in range(documents)
            )
    stdlib_corpus.make_tokenizer(folder)
    texts = ["def f(x):\n    return x\n", "", "héllo <|endoftext|> 世界", *map(str, range(50))]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> list[Any]:
    """What Megatron-Core makes of it in an interpreter of its own: a data set, each case's samples.

    One process for all, since its imports take longer than its work.
    """
    assert ENVIRONMENT is not None
    cases = [
        {
            "blend": [[*(blend or {"a": 1})], [*blend.values()] if blend else None],
            "samples": steps * BATCH,
            "seq_len": SEQ_LEN,
            "seed": 1234,
            "split": ",".join(map(str, split or (1, 0, 0))),
        }
        for steps, split, blend in CASES
    ]
    write = {"write": "theirs", "text": "text.jsonl", "tokenizer": "tokenizer.json"}
    done = subprocess.run(
        [str(ENVIRONMENT.python), "-W", "ignore", str(PROGRAM), json.dumps([write, *cases])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])[1:]


def test_its_writer_writes_the_same_bytes(folder: Path, theirs: list[Any]) -> None:
    tokenize([folder / "text.jsonl"], folder / "ours", tokenization(folder))

    for ours, other in zip(files_of(folder / "ours"), files_of(folder / "theirs"), strict=True):
        assert ours.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("number", range(len(CASES)))
def test_samples_are_its_samples(folder: Path, theirs: list[Any], number: int) -> None:
    steps, split, blend = CASES[number]
    where: dict[str, Any] = (
        {"blend": [(str(folder / name), weight) for name, weight in blend.items()], "path": None}
        if blend
        else {"path": str(folder / "a")}
    )
    corpus = load_corpus(
        parse_config(settings(steps=steps, source="indexed", split=split, **where))
    )

    inputs, targets = corpus.collate([*range(steps * BATCH)], ALONE)

    ours = torch.cat([inputs, targets[:, -1:]], 1)
    assert torch.equal(ours, torch.tensor(theirs[number]))
