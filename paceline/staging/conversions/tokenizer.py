"""A tokenizer.json of any kind, and which of its tokens ends a document."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import SystemFaultError, UserError, did_you_mean

if TYPE_CHECKING:
    from tokenizers import Tokenizer

USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[SEP]")
"""Of GPT-2 and its kin, Llama 3, Gemma, OPT and Llama 2, BERT; the first one there is meant."""


def tokenizer_file(path: Path) -> Path:
    """A tokenizer.json, given itself or by its folder; raises UserError when it is not there."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(str(file), "is not a file", remedy="name a tokenizer.json or its folder")
    return file


@cache
def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json that neither cuts nor fills; raises UserError for others.

    Raises SystemFaultError without the library.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise SystemFaultError(
            "tokenizers", "is not installed", remedy="pip install 'paceline[stage]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UserError(str(path), f"is no tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_id(path: Path, token: str | None = None) -> int:
    """The id of the token that ends a document: `token`, or the usual one.

    Raises UserError when there is none.
    """
    tokenizer = load_tokenizer(path)
    for name in USUAL_ENDS if token is None else (token,):
        number = tokenizer.token_to_id(name)
        if number is not None:
            return int(number)
    if token is None:
        raise UserError(
            str(path), f"has none of {', '.join(USUAL_ENDS)}", remedy="name the token of an end"
        )
    near = did_you_mean(token, tokenizer.get_vocab())
    raise UserError(str(path), f"has no token {token!r}", remedy=near or None)
