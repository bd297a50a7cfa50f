"""Small assets made from the interpreter's own sources, for the training of tiny variants.

They are a byte-level BPE tokenizer trained on the sources, the sources as jsonl and as Megatron's
indexed data sets, and a small model with random weights in the hub's format.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from paceline.staging.conversions import Progress, ignore_progress
from paceline.staging.conversions.tokenization import tokenization, tokenize

VOCABULARY = 2048
END = "<|endoftext|>"
MAX_BYTES = 1_500_000
"""Maximum size of the text: tens of thousands of samples of a small model."""
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
"""Excluded folders: third-party packages, and packages that some installations lack."""
HIDDEN, LAYERS, HEADS, POSITIONS = 64, 2, 4, 256


def sources() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of standard library modules in order, up to MAX_BYTES in total."""
    root = Path(sysconfig.get_path("stdlib"))
    taken_bytes = 0
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - EXCLUDED_FOLDERS)
        for name in sorted(names):
            if not name.endswith(".py"):
                continue
            path = Path(folder, name)
            text = path.read_text(encoding="utf-8", errors="replace")
            taken_bytes += len(text.encode())
            if taken_bytes > MAX_BYTES:
                return
            yield str(path.relative_to(root)), text


def make_jsonl(folder: Path, progress: Progress = ignore_progress) -> None:
    """Write `code.jsonl` with one record {"name", "text"} per module."""
    with (folder / "code.jsonl").open("w", encoding="utf-8") as file:
        num_chars = 0
        for name, text in sources():
            file.write(json.dumps({"name": name, "text": text}) + "\n")
            num_chars += len(text)
            progress(min(num_chars, MAX_BYTES), MAX_BYTES)


PREFERENCES_FOLDER = "Dahoas/rm-static"
"""DeepSpeed-Chat chooses the reader of a data set by this part of its path."""


def make_preferences(folder: Path, progress: Progress = ignore_progress) -> None:
    """Write train.jsonl and test.jsonl with records of prompt, chosen and rejected answer.

    They are in `PREFERENCES_FOLDER` and have the columns of that data set. Every tenth paragraph of
    the sources is test data.
    """
    target = folder / PREFERENCES_FOLDER
    target.mkdir(parents=True)
    records: list[list[str]] = [[], []]
    paragraphs = (text for _, source in sources() for text in source.split("\n\n"))
    for number, text in enumerate(paragraphs):
        start, answer = text[:40], text[40:400]
        record = {
            "prompt": f"\n\nHuman: Complete {start!r}.\n\nAssistant:",
            "chosen": f" {answer}",
            "rejected": f" {answer[::-1]}",
        }
        records[number % 10 == 0].append(json.dumps(record) + "\n")
    for name, lines in zip(("train", "test"), records, strict=True):
        (target / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    progress(MAX_BYTES, MAX_BYTES)


def make_tokenizer(
    folder: Path, progress: Progress = ignore_progress, vocab_size: int = VOCABULARY
) -> None:
    """Write `tokenizer.json`, a byte-level BPE of `vocab_size` tokens trained on the sources."""
    (folder / "tokenizer.json").write_text(_trained_tokenizer(vocab_size), encoding="utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    progress(MAX_BYTES, MAX_BYTES)


@cache
def _trained_tokenizer(vocab_size: int) -> str:
    """Return the text of tokenizer.json, trained once per process for all assets."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in sources()), trainer)
    return tokenizer.to_str(pretty=True)


def make_indexed(folder: Path, progress: Progress = ignore_progress) -> None:
    """Write two indexed data sets, `code-0` and `code-1`, as large corpora have several.

    Each is a .bin and an .idx file. The folder also holds tokenizer.json and the jsonl of each half
    of the sources.
    """
    make_tokenizer(folder)
    halves: list[list[str]] = [[], []]
    for number, (name, text) in enumerate(sources()):
        halves[number % 2].append(json.dumps({"name": name, "text": text}) + "\n")
    options = tokenization(folder / "tokenizer.json")
    for number, lines in enumerate(halves):
        part = folder / f"code-{number}.jsonl"
        part.write_text("".join(lines), encoding="utf-8")
        tokenize([part], folder / f"code-{number}", options, progress=progress)


def make_gpt2(folder: Path, progress: Progress = ignore_progress) -> None:
    """Write a model folder in the hub's format: config.json, model.safetensors, tokenizer files.

    The model is a GPT-2 of 2 layers and width 64 with random weights, N(0, 0.02).
    """
    from safetensors.numpy import save_file

    make_tokenizer(folder)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_positions": POSITIONS,
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_inner": 4 * HIDDEN,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(_gpt2_weights(), folder / "model.safetensors", {"format": "pt"})
    progress(1, 1)


def _gpt2_weights() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (VOCABULARY, HIDDEN),
        "wpe.weight": (POSITIONS, HIDDEN),
        "ln_f.weight": (HIDDEN,),
        "ln_f.bias": (HIDDEN,),
    }
    inner = {
        "ln_1": (HIDDEN,),
        "ln_2": (HIDDEN,),
        "attn.c_attn": (HIDDEN, 3 * HIDDEN),
        "attn.c_proj": (HIDDEN, HIDDEN),
        "mlp.c_fc": (HIDDEN, 4 * HIDDEN),
        "mlp.c_proj": (4 * HIDDEN, HIDDEN),
    }
    for layer in range(LAYERS):
        for name, shape in inner.items():
            shapes[f"h.{layer}.{name}.weight"] = shape
            shapes[f"h.{layer}.{name}.bias"] = shape[-1:]
    random = np.random.default_rng(1234)
    weights: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        values = random.normal(0.0, 0.02, shape).astype(np.float32)
        norm = ".ln_" in f".{name}"
        constant = np.ones if norm and name.endswith("weight") else np.zeros
        plain = norm or name.endswith("bias")
        full_name = f"transformer.{name}"
        weights[full_name] = constant(shape, np.float32) if plain else values
    return weights
