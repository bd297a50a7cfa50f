"""Where a recipe's data lies, and the tokens that a text is turned into before a run."""

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
"""Beside the runs: what texts became by a tokenizer."""

PathForm = Literal["file", "prefix", "folder"]
PATH_FORMS: dict[str, PathForm] = {"indexed": "prefix", "webdataset": "folder"}
"""What `data.path` names, by its source; else a file."""
_NO_FORM: dict[PathForm, str] = {
    "file": "is not a file",
    "prefix": "is no prefix of a .bin and an .idx",
    "folder": "is no folder of shards",
}
V = TypeVar("V", Data, Evaluation)
R = TypeVar("R", Recipe, RunSpec)


@dataclass(frozen=True)
class TokenFile:
    """An indexed data set that a text becomes before the run, once for all runs beside it."""

    source: Path
    prefix: Path
    how: Tokenization

    @property
    def is_there(self) -> bool:
        """Whether it was made before."""
        return all(path.is_file() for path in files_of(self.prefix))


def make_tokens(files: Iterable[TokenFile], tell: Callable[[str], None]) -> None:
    """Tokenize what was not before, on all cores; raises UserError for a record without text."""
    for file in files:
        if file.is_there:
            continue

        def show(done_bytes: int, total_bytes: int, name: str = file.source.name) -> None:
            tell(f"tokenizing {name}: {done_bytes / max(1, total_bytes):.0%}")

        tokenize([file.source], file.prefix, file.how, workers=usable_cores(), progress=show)


def texts_of(files: Iterable[TokenFile]) -> dict[str, Path]:
    """What tokens are made of: the texts and their tokenizer, by names for a run's record."""
    texts: dict[str, Path] = {}
    for file, name in zip(files, ("data.text", "training.evaluation.text"), strict=False):
        texts |= {name: file.source, "data.tokenizer": file.how.tokenizer}
    return texts


def with_data_file(recipe: Recipe, beside: Path) -> Recipe:
    """The recipe with absolute paths of its data, sought from the current folder, then `beside`.

    Raises UserError when the source needs a file and there is none.
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
    changed = _with_files(recipe, "data", data, beside, form)
    blend = tuple(
        (_place(recipe, "data.blend", path, beside, "prefix"), weight)
        for path, weight in data.blend
    )
    update: dict[str, Any] = {"data": changed.model_copy(update={"blend": blend})}
    evaluation = recipe.training.evaluation
    if evaluation is not None:
        located = _with_files(recipe, "training.evaluation", evaluation, beside, form)
        update["training"] = recipe.training.model_copy(update={"evaluation": located})
    return recipe.model_copy(update=update)


def _with_files(recipe: Recipe, where: str, part: V, beside: Path, form: PathForm) -> V:
    """A part of the recipe with absolute paths of all files that it names."""
    update = {
        name: _place(recipe, f"{where}.{name}", file, beside, form if name == "path" else "file")
        for name in ("path", "loss_mask", "tokenizer")
        if (file := getattr(part, name, None))
    }
    return part.model_copy(update=update)


def _place(recipe: Recipe, field: str, name: str, beside: Path, form: PathForm) -> str:
    """The absolute path of a file or folder, or the prefix of an indexed data set."""
    for path in (home_path(f"{recipe.name}: {field}", name), beside / name):
        if field.endswith(".tokenizer") and path.is_dir():
            path = tokenizer_file(path)
        prefix = prefix_of(path) if form == "prefix" else path
        files = files_of(prefix) if form == "prefix" else (path,)
        if all(file.is_dir() if form == "folder" else file.is_file() for file in files):
            return str(prefix.resolve())
    raise UserError(f"{recipe.name}: {field}", f"{name} {_NO_FORM[form]}")


def with_tokens(recipe: R, runs: Path, name: str) -> tuple[R, tuple[TokenFile, ...]]:
    """The recipe or run on tokens in place of text, if it has a tokenizer, and what they are of.

    `name` is what errors call it.

    Raises UserError for a tokenizer that the model's vocabulary has no room for.
    """
    data = recipe.data
    if data.tokenizer is None or data.source not in ("text", "jsonl") or data.path is None:
        return recipe, ()
    if data.source == "text" and data.packing == "padded":
        raise UserError(
            f"{name}: data.packing", "padded samples of a tokenizer are records; use jsonl"
        )
    how = tokenization(Path(data.tokenizer), data.text_key if data.source == "jsonl" else None)
    vocab_size = load_tokenizer(how.tokenizer).get_vocab_size()
    model = recipe.model
    if model.kind == "decoder" and model.vocab_size < vocab_size:
        raise UserError(
            f"{name}: model.vocab_size",
            f"{model.vocab_size} has no room for the {vocab_size} tokens of {data.tokenizer}",
            remedy=f"--set model.vocab_size={vocab_size}",
        )
    folder = runs.resolve() / TOKENS_FOLDER
    files = [_token_file(Path(data.path), folder, how)]
    located = data.model_copy(update={"source": "indexed", "path": str(files[0].prefix)})
    update: dict[str, Any] = {"data": located}
    evaluation = recipe.training.evaluation
    if evaluation is not None and evaluation.path is not None:
        files.append(_token_file(Path(evaluation.path), folder, how))
        of_tokens = evaluation.model_copy(update={"path": str(files[1].prefix)})
        update["training"] = recipe.training.model_copy(update={"evaluation": of_tokens})
    return recipe.model_copy(update=update), tuple(files)


def _token_file(source: Path, folder: Path, how: Tokenization) -> TokenFile:
    """Named by the text's place, size and time, and by what reads it."""
    state = source.stat()
    tokenizer = hashlib.sha256(how.tokenizer.read_bytes()).hexdigest()
    facts = [str(source), state.st_size, state.st_mtime_ns, tokenizer, how.text_key, how.end]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    return TokenFile(source, folder / f"{source.stem}-{digest}", how)
