"""Tokenization of text and jsonl files by a tokenizer.json, into Megatron's indexed format.

Files are split at line ends into chunks, which worker processes tokenize. Results are written in
the order of the text, so the output does not depend on the number of workers. A jsonl record is a
document of one sequence; a text file is one document.
"""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import SystemFaultError, UserError, did_you_mean
from paceline.files.documents import parse_json
from paceline.staging.conversions import Progress, ignore_progress
from paceline.staging.conversions.indexed import IndexedWriter, token_dtype

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[SEP]")
"""End tokens of GPT-2 and its relatives, Llama 3, Gemma, OPT and Llama 2, and BERT.

The first one in the vocabulary is used.
"""


def tokenizer_file(path: Path) -> Path:
    """Return the path of a tokenizer.json, given itself or its folder; raises UserError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(str(file), "is not a file", remedy="give a tokenizer.json or its folder")
    return file


@cache
def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json, without truncation and padding; raises UserError for other files.

    Raises SystemFaultError if the tokenizers library is not installed.
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
        raise UserError(str(path), f"is not a tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_id(path: Path, token: str | None = None) -> int:
    """Return the id of the end-of-document token: `token`, or the default one.

    Raises UserError if the vocabulary does not contain it.
    """
    tokenizer = load_tokenizer(path)
    for name in DEFAULT_END_TOKENS if token is None else (token,):
        number = tokenizer.token_to_id(name)
        if number is not None:
            return int(number)
    if token is None:
        raise UserError(
            str(path),
            f"has none of {', '.join(DEFAULT_END_TOKENS)}",
            remedy="give the end-of-document token",
        )
    near = did_you_mean(token, tokenizer.get_vocab())
    raise UserError(str(path), f"has no token {token!r}", remedy=near or None)


CHUNK_BYTES = 1 << 20
CHUNKS_AHEAD = 3
"""Maximum number of chunks per worker that are processed or wait to be written."""


@dataclass(frozen=True)
class Tokenization:
    """Tokenizer and options for reading text."""

    tokenizer: Path
    text_key: str | None = "text"
    """Text field of a jsonl record; None reads plain text, with one document per file."""
    end: int | None = None
    """Token id appended to each document; None for no token."""
    special_tokens: bool = False
    """Add the tokenizer's own first and last tokens to each text, such as Llama 3's."""


@dataclass(frozen=True)
class Chunk:
    """Byte range of a file, from the start of a line to the end of a line."""

    path: Path
    start: int
    end: int


@dataclass(frozen=True)
class TokenizedChunk:
    """Tokenized chunk."""

    tokens: bytes
    lengths: NDArray[np.int32]
    """Length of each document in tokens (documents,)."""
    problem: tuple[str, str] | None = None
    """Error in the text as (location, message), which stops the conversion."""


def tokenization(
    tokenizer: Path, text_key: str | None = "text", end: str | None = None, append_end: bool = True
) -> Tokenization:
    """Return the options for a tokenizer.json or its folder; each document ends in `end`.

    Raises UserError if the tokenizer has no such token.
    """
    file = tokenizer_file(tokenizer)
    return Tokenization(file, text_key, end_id(file, end) if append_end else None)


def tokenize(
    sources: Sequence[Path],
    prefix: Path,
    options: Tokenization,
    *,
    workers: int = 1,
    progress: Progress = ignore_progress,
) -> int:
    """Write PREFIX.bin and PREFIX.idx from all `sources`; return the number of tokens.

    The files equal those of Megatron's tools/preprocess_data.py with `--append-eod`. Raises
    UserError for a record without text, SystemFaultError if a worker dies.
    """
    vocab_size = load_tokenizer(options.tokenizer).get_vocab_size()
    total_bytes, done_bytes = sum(path.stat().st_size for path in sources), 0
    with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
        chunks = [chunk for path in sources for chunk in chunks_of(path, CHUNK_BYTES)]
        if options.text_key is None:
            for path in sources:
                _add_text(writer, [c for c in chunks if c.path == path], options, workers)
                done_bytes += path.stat().st_size
                progress(done_bytes, total_bytes)
            return writer.num_tokens
        for chunk, tokenized_chunk in zip(
            chunks, _tokenize_chunks(chunks, options, workers), strict=True
        ):
            writer.add(tokenized_chunk.tokens, tokenized_chunk.lengths)
            done_bytes += chunk.end - chunk.start
            progress(done_bytes, total_bytes)
        return writer.num_tokens


@contextmanager
def plain_text(path: Path, folder: Path, check: Callable[[], None]) -> Iterator[Path]:
    """Yield the plain text of a file that may be compressed by gzip or zstd.

    The text is unpacked into `folder` and deleted afterwards. Raises SystemFaultError if the zstd
    program is missing or fails.
    """
    if path.suffix not in (".gz", ".zst"):
        yield path
        return
    text = folder / f".{path.stem}"
    program = {".gz": "gzip", ".zst": "zstd"}[path.suffix]
    try:
        with text.open("wb") as file:
            process = subprocess.Popen([program, "-dc", str(path)], stdout=file)
            try:
                while (code := _end_of(process)) is None:
                    check()
            finally:
                process.kill()
        if code:
            raise SystemFaultError(str(path), f"cannot be unpacked: {program} exited with {code}")
        yield text
    except FileNotFoundError as error:
        raise SystemFaultError(
            program, "is not installed", remedy=f"install {program}, which unpacks {path.name}"
        ) from error
    finally:
        text.unlink(missing_ok=True)


def _end_of(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a program; None if it is still running after a second."""
    try:
        return process.wait(1)
    except subprocess.TimeoutExpired:
        return None


def chunks_of(path: Path, size_bytes: int) -> Iterator[Chunk]:
    """Split a file at line ends into chunks of about `size_bytes`."""
    with path.open("rb") as file:
        end, num_bytes = 0, os.fstat(file.fileno()).st_size
        while end < num_bytes:
            start = end
            file.seek(start + size_bytes)
            file.readline()
            end = min(file.tell(), num_bytes)
            yield Chunk(path, start, end)


def encode(chunk: Chunk, options: Tokenization) -> TokenizedChunk:
    """Tokenize a chunk: one document per record, or all text as one document."""
    with chunk.path.open("rb") as file:
        file.seek(chunk.start)
        content = file.read(chunk.end - chunk.start)
    texts: list[str] = []
    try:
        if options.text_key is None:
            texts.append(content.decode())
        else:
            place = chunk.start
            for line in content.splitlines(keepends=True):
                if line.strip():
                    texts.append(_text_of(line, options.text_key, f"{chunk.path}: byte {place}"))
                place += len(line)
    except UserError as error:
        return TokenizedChunk(b"", np.zeros(0, np.int32), (error.where, error.what))
    except UnicodeDecodeError as error:
        return TokenizedChunk(
            b"", np.zeros(0, np.int32), (str(chunk.path), f"is not UTF-8: {error}")
        )
    return _encode_texts(texts, options)


def _encode_texts(texts: list[str], options: Tokenization) -> TokenizedChunk:
    tokenizer = load_tokenizer(options.tokenizer)
    dtype = token_dtype(tokenizer.get_vocab_size())
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=options.special_tokens)
    ends = [] if options.end is None or options.text_key is None else [options.end]
    documents = [ids + ends if ids else ids for ids in (encoding.ids for encoding in encodings)]
    tokens = np.fromiter(chain.from_iterable(documents), dtype)
    return TokenizedChunk(tokens.tobytes(), np.array([len(ids) for ids in documents], np.int32))


def _text_of(line: bytes, key: str, where: str) -> str:
    try:
        record = parse_json(line.decode(), nan=True)
    except ValueError as error:
        raise UserError(where, f"invalid JSON: {error}") from None
    text = record.get(key) if isinstance(record, dict) else None  # pyright: ignore
    if not isinstance(text, str):
        raise UserError(where, f"the record has no text in {key!r}")
    return text


def _add_text(
    writer: IndexedWriter, chunks: list[Chunk], options: Tokenization, workers: int
) -> None:
    """Add all chunks of a file as one document."""
    pieces = [
        tokenized_chunk.tokens for tokenized_chunk in _tokenize_chunks(chunks, options, workers)
    ]
    end = b"" if options.end is None else np.array([options.end], writer.dtype).tobytes()
    tokens = b"".join([*pieces, end])
    writer.add(tokens, np.array([len(tokens) // writer.dtype.itemsize], np.int32))


def _tokenize_chunks(
    chunks: list[Chunk], options: Tokenization, workers: int
) -> Iterator[TokenizedChunk]:
    """Yield the tokenized chunks in order; raises UserError for the first with a problem."""
    results = (
        (encode(chunk, options) for chunk in chunks)
        if workers == 1 or len(chunks) == 1
        else _tokenize_in_workers(chunks, options, min(workers, len(chunks)))
    )
    for tokenized_chunk in results:
        if tokenized_chunk.problem is not None:
            raise UserError(*tokenized_chunk.problem)
        yield tokenized_chunk


def _tokenize_in_workers(
    chunks: list[Chunk], options: Tokenization, workers: int
) -> Iterator[TokenizedChunk]:
    """Tokenize chunks in worker processes, at most CHUNKS_AHEAD per worker before the reader."""
    waiting: deque[Future[TokenizedChunk]] = deque()
    remaining = iter(chunks)
    # A fork of a process with threads may hang, so workers are spawned.
    context: Any = get_context("spawn")
    with ProcessPoolExecutor(workers, context, _disable_tokenizer_threads) as pool:
        try:
            for chunk in remaining:
                waiting.append(pool.submit(encode, chunk, options))
                if len(waiting) >= CHUNKS_AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise SystemFaultError(
                "tokenizing", "a worker was killed", remedy="it may have run out of memory"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


def _disable_tokenizer_threads() -> None:
    """Disable the tokenizer's threads, because each worker has one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
