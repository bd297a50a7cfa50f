"""Data files of a recipe, and tokenization of texts before a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.core.training import Data, Evaluation
from paceline.files.documents import open_regular
from paceline.files.home import home_path
from paceline.files.recipe import Recipe
from paceline.machines.probe.inventory import usable_cores
from paceline.staging.conversions.indexed import files_of, prefix_of
from paceline.staging.conversions.tokenization import (
    Tokenization,
    load_tokenizer,
    tokenization,
    tokenize,
    tokenizer_file,
)

TOKENS_FOLDER = "tokens"
"""Folder of tokenized texts next to the runs."""

PathForm = Literal["file", "prefix", "folder"]
PATH_FORMS: dict[str, PathForm] = {"indexed": "prefix", "webdataset": "folder"}
"""Kind of `data.path` for each source; other sources need a file."""
_NO_FORM: dict[PathForm, str] = {
    "file": "is not a file",
    "prefix": "is not the prefix of a .bin and an .idx file",
    "folder": "is not a folder of shards",
}
V = TypeVar("V", Data, Evaluation)
R = TypeVar("R", Recipe, RunSpec)


@dataclass(frozen=True)
class TokenFile:
    """Text and its indexed data set, tokenized once for all runs of a folder."""

    source: Path
    prefix: Path
    how: Tokenization

    @property
    def exists(self) -> bool:
        """True if the text has been tokenized already."""
        return all(path.is_file() for path in files_of(self.prefix))


def make_tokens(files: Iterable[TokenFile], notify: Callable[[str], None]) -> None:
    """Tokenize missing files on all cores; raise UserError for a record without text."""
    for file in files:
        if file.exists:
            continue

        def show(done_bytes: int, total_bytes: int, name: str = file.source.name) -> None:
            notify(f"tokenizing {name}: {done_bytes / max(1, total_bytes):.0%}")

        tokenize([file.source], file.prefix, file.how, workers=usable_cores(), progress=show)


def input_texts(files: Iterable[TokenFile]) -> dict[str, Path]:
    """Return the tokenized texts and their tokenizer by recipe field, for a run's record."""
    texts: dict[str, Path] = {}
    for file, name in zip(files, ("data.text", "training.evaluation.text"), strict=False):
        texts |= {name: file.source, "data.tokenizer": file.how.tokenizer}
    return texts


def with_data_file(recipe: Recipe, base: Path) -> Recipe:
    """Return the recipe with absolute data paths, relative to the current folder or `base`.

    Raises UserError if the source needs a file and there is none.
    """
    data = recipe.data
    if data.source in ("synthetic", "stdlib"):
        return recipe
    if data.path is None and not data.blend:
        raise UserError(
            f"{recipe.name}: data.path",
            f"source {data.source} needs a file",
            remedy="--set data.path=FILE",
        )
    form = PATH_FORMS.get(data.source, "file")
    data_section = _with_files(recipe, "data", data, base, form)
    blend = tuple(
        (_place(recipe, "data.blend", path, base, "prefix"), weight) for path, weight in data.blend
    )
    update: dict[str, Any] = {"data": data_section.model_copy(update={"blend": blend})}
    evaluation = recipe.training.evaluation
    if evaluation is not None:
        evaluation_section = _with_files(recipe, "training.evaluation", evaluation, base, form)
        update["training"] = recipe.training.model_copy(update={"evaluation": evaluation_section})
    return recipe.model_copy(update=update)


def _with_files(recipe: Recipe, where: str, part: V, base: Path, form: PathForm) -> V:
    """Return a section of the recipe with absolute paths of all its files."""
    update = {
        name: _place(recipe, f"{where}.{name}", file, base, form if name == "path" else "file")
        for name in ("path", "loss_mask", "tokenizer")
        if (file := getattr(part, name, None))
    }
    return part.model_copy(update=update)


def _place(recipe: Recipe, field: str, name: str, base: Path, form: PathForm) -> str:
    """Return the absolute path of a file or folder, or the prefix of an indexed data set."""
    for path in (home_path(f"{recipe.name}: {field}", name), base / name):
        if field.endswith(".tokenizer") and path.is_dir():
            path = tokenizer_file(path)
        prefix = prefix_of(path) if form == "prefix" else path
        files = files_of(prefix) if form == "prefix" else (path,)
        if all(file.is_dir() if form == "folder" else file.is_file() for file in files):
            return str(prefix.resolve())
    raise UserError(f"{recipe.name}: {field}", f"{name} {_NO_FORM[form]}")


def with_tokens(recipe: R, runs: Path, name: str) -> tuple[R, tuple[TokenFile, ...]]:
    """Return the recipe or run on tokens instead of text, and the token files, given a tokenizer.

    Errors refer to the recipe as `name`. Raises UserError if the model's vocabulary is smaller than
    the tokenizer's.
    """
    data = recipe.data
    if data.tokenizer is None or data.source not in ("text", "jsonl") or data.path is None:
        return recipe, ()
    if data.source == "text" and data.packing == "padded":
        raise UserError(
            f"{name}: data.packing", "padded samples with a tokenizer need records; use jsonl"
        )
    how = tokenization(Path(data.tokenizer), data.text_key if data.source == "jsonl" else None)
    vocab_size = load_tokenizer(how.tokenizer).get_vocab_size()
    model = recipe.model
    if model.kind == "decoder" and model.vocab_size < vocab_size:
        raise UserError(
            f"{name}: model.vocab_size",
            f"{model.vocab_size} is smaller than the {vocab_size} tokens of {data.tokenizer}",
            remedy=f"--set model.vocab_size={vocab_size}",
        )
    folder = runs.resolve() / TOKENS_FOLDER
    files = [_token_file(Path(data.path), folder, how)]
    token_data = data.model_copy(update={"source": "indexed", "path": str(files[0].prefix)})
    update: dict[str, Any] = {"data": token_data}
    evaluation = recipe.training.evaluation
    if evaluation is not None and evaluation.path is not None:
        files.append(_token_file(Path(evaluation.path), folder, how))
        of_tokens = evaluation.model_copy(update={"path": str(files[1].prefix)})
        update["training"] = recipe.training.model_copy(update={"evaluation": of_tokens})
    return recipe.model_copy(update=update), tuple(files)


def _token_file(source: Path, folder: Path, how: Tokenization) -> TokenFile:
    """Return the token file of a text, named by a hash of its path, size, time and tokenizer."""
    state = source.stat()
    with open_regular(how.tokenizer) as file:
        tokenizer = hashlib.file_digest(file, "sha256").hexdigest()
    facts = [str(source), state.st_size, state.st_mtime_ns, tokenizer, how.text_key, how.end]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    return TokenFile(source, folder / f"{source.stem}-{digest}", how)
