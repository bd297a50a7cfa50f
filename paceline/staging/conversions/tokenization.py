"""Text and jsonl files as tokens of a tokenizer.json, in Megatron's indexed format.

Files are cut at line ends into chunks; processes of their own turn chunks into tokens, and what
they bring is written in the order of the text, so that the number of workers changes no byte.
A jsonl record is a document of one sequence; a text file is one document.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import SystemFaultError, UserError, did_you_mean
from paceline.staging.conversions import Progress, unwatched
from paceline.staging.conversions.indexed import IndexedWriter, token_dtype

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


CHUNK_BYTES = 1 << 20
AHEAD = 3
"""Chunks in work or waiting to be written, for each worker."""


@dataclass(frozen=True)
class Tokenization:
    """What becomes of a text: by which tokenizer, and what of a record is read."""

    tokenizer: Path
    text_key: str | None = "text"
    """Field of a jsonl record; None reads plain text, a file a document."""
    end: int | None = None
    """The id behind each document; None puts none."""
    special_tokens: bool = False
    """Whether the tokenizer's own first and last tokens (as Llama 3's) are put around a text."""


@dataclass(frozen=True)
class Chunk:
    """Bytes of a file, from the beginning of a line to the end of one."""

    path: Path
    start: int
    end: int


@dataclass(frozen=True)
class Encoded:
    """What a worker makes of a chunk."""

    tokens: bytes
    lengths: NDArray[np.int32]
    """(documents,) in tokens."""
    problem: tuple[str, str] | None = None
    """(where, what) is wrong with the text, which ends the conversion."""


def tokenization(
    tokenizer: Path, text_key: str | None = "text", end: str | None = None, append_end: bool = True
) -> Tokenization:
    """How to read text by a tokenizer.json or its folder; each document ends in `end`.

    Raises UserError where the tokenizer has no such token.
    """
    file = tokenizer_file(tokenizer)
    return Tokenization(file, text_key, end_id(file, end) if append_end else None)


def tokenize(
    sources: Sequence[Path],
    prefix: Path,
    how: Tokenization,
    *,
    workers: int = 1,
    progress: Progress = unwatched,
) -> int:
    """Write PREFIX.bin and PREFIX.idx of all `sources`; the number of tokens in them.

    The files are those that Megatron's tools/preprocess_data.py writes with `--append-eod`.
    Raises UserError for a record without text, SystemFaultError when a worker dies.
    """
    vocab_size = load_tokenizer(how.tokenizer).get_vocab_size()
    total_bytes, done_bytes = sum(path.stat().st_size for path in sources), 0
    with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
        chunks = [chunk for path in sources for chunk in chunks_of(path, CHUNK_BYTES)]
        if how.text_key is None:
            for path in sources:
                _add_text(writer, [c for c in chunks if c.path == path], how, workers)
                done_bytes += path.stat().st_size
                progress(done_bytes, total_bytes)
            return writer.num_tokens
        for chunk, encoded in zip(chunks, _encoded(chunks, how, workers), strict=True):
            writer.add(encoded.tokens, encoded.lengths)
            done_bytes += chunk.end - chunk.start
            progress(done_bytes, total_bytes)
        return writer.num_tokens


def chunks_of(path: Path, size_bytes: int) -> Iterator[Chunk]:
    """A file cut at line ends into pieces of about `size_bytes`."""
    with path.open("rb") as file:
        end, whole = 0, os.fstat(file.fileno()).st_size
        while end < whole:
            start = end
            file.seek(start + size_bytes)
            file.readline()
            end = min(file.tell(), whole)
            yield Chunk(path, start, end)


def encode(chunk: Chunk, how: Tokenization) -> Encoded:
    """The tokens of a chunk: a document for each record, or one of all its text."""
    with chunk.path.open("rb") as file:
        file.seek(chunk.start)
        content = file.read(chunk.end - chunk.start)
    texts: list[str] = []
    try:
        if how.text_key is None:
            texts.append(content.decode())
        else:
            place = chunk.start
            for line in content.splitlines(keepends=True):
                if line.strip():
                    texts.append(_text_of(line, how.text_key, f"{chunk.path}: byte {place}"))
                place += len(line)
    except UserError as error:
        return Encoded(b"", np.zeros(0, np.int32), (error.where, error.what))
    except UnicodeDecodeError as error:
        return Encoded(b"", np.zeros(0, np.int32), (str(chunk.path), f"is no UTF-8: {error}"))
    return _encode_texts(texts, how)


def _encode_texts(texts: list[str], how: Tokenization) -> Encoded:
    tokenizer = load_tokenizer(how.tokenizer)
    dtype = token_dtype(tokenizer.get_vocab_size())
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=how.special_tokens)
    ends = [] if how.end is None or how.text_key is None else [how.end]
    documents = [ids + ends if ids else ids for ids in (found.ids for found in encodings)]
    tokens = np.fromiter(chain.from_iterable(documents), dtype)
    return Encoded(tokens.tobytes(), np.array([len(ids) for ids in documents], np.int32))


def _text_of(line: bytes, key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(where, f"no JSON: {error}") from None
    text = record.get(key) if isinstance(record, dict) else None  # pyright: ignore
    if not isinstance(text, str):
        raise UserError(where, f"the record has no text under {key!r}")
    return text


def _add_text(writer: IndexedWriter, chunks: list[Chunk], how: Tokenization, workers: int) -> None:
    """One document of all chunks of a file."""
    pieces = [encoded.tokens for encoded in _encoded(chunks, how, workers)]
    end = b"" if how.end is None else np.array([how.end], writer.dtype).tobytes()
    tokens = b"".join([*pieces, end])
    writer.add(tokens, np.array([len(tokens) // writer.dtype.itemsize], np.int32))


def _encoded(chunks: list[Chunk], how: Tokenization, workers: int) -> Iterator[Encoded]:
    """What becomes of each chunk, in their order; raises the problem of the first that has one."""
    results = (
        (encode(chunk, how) for chunk in chunks)
        if workers == 1 or len(chunks) == 1
        else _by_workers(chunks, how, min(workers, len(chunks)))
    )
    for encoded in results:
        if encoded.problem is not None:
            raise UserError(*encoded.problem)
        yield encoded


def _by_workers(chunks: list[Chunk], how: Tokenization, workers: int) -> Iterator[Encoded]:
    """Each chunk by the next free of several processes, not many chunks ahead of the reader."""
    waiting: deque[Future[Encoded]] = deque()
    left = iter(chunks)
    # A fork of a process with threads may hang, so workers are started afresh.
    context: Any = get_context("spawn")
    with ProcessPoolExecutor(workers, context, _alone) as pool:
        try:
            for chunk in left:
                waiting.append(pool.submit(encode, chunk, how))
                if len(waiting) >= AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise SystemFaultError(
                "tokenizing", "a worker was killed", remedy="it may have had too little memory"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


def _alone() -> None:
    """A worker has a core to itself: the tokenizer is to start no threads."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
