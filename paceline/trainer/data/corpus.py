"""Samples of a run, from text tokens or at random.

`samples` defines what a sample is. This module opens the source of a run, no more of it than the
steps can use, and excludes the samples held out for evaluations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from paceline.trainer.config import ConfigError, DataConfig, TrainerConfig
from paceline.trainer.data.indexed_corpus import load_indexed, load_validation_indexed
from paceline.trainer.data.latents import load_latents, load_validation_latents
from paceline.trainer.data.samples import (
    Corpus,
    PaddedCorpus,
    PartCorpus,
    SyntheticCorpus,
    TokenCorpus,
    require_samples,
    select_part,
    train_part,
)
from paceline.trainer.data.texts import (
    BYTE_VOCAB,
    END,
    MAX_TEXT_TOKENS,
    WHOLE_SOURCE,
    Extent,
    document_ends,
    documents,
    map_mask,
    map_tokens,
    pack,
    records,
    tokens_of,
)
from paceline.trainer.data.validation_split import (
    ValidationSize,
    nothing_left_error,
    split_off,
    validation_size,
)
from paceline.trainer.model_config import FluxConfig
from paceline.trainer.schedule import BatchSizes


def data_record(data: DataConfig, corpus: Corpus) -> dict[str, Any]:
    """Return the start line's record of the data."""
    samples = range(corpus.num_windows or 1)
    return {
        "source": data.source,
        "path": data.path,
        "tokens": corpus.num_tokens,
        "windows": corpus.num_windows,
        "packing": data.packing,
        "loss_on": data.loss_on,
        "loss_mask": data.loss_mask,
        **({"document_mask": True} if data.document_mask else {}),
        **({"split": data.split, "split_part": data.split_part} if data.split else {}),
        "real_tokens_per_sample": corpus.real_tokens(samples) / max(1, len(samples)),
    }


def load_corpus(config: TrainerConfig) -> Corpus:
    """Return the training samples of a run, no more of its source than the steps can use.

    Samples held out for evaluation are excluded. Raises ConfigError when the vocabulary is too
    small for bytes or a file is invalid.
    """
    data, training = config.data, config.training
    if isinstance(config.model, FluxConfig):
        return load_latents(config, config.model)
    vocab = config.model.vocab_size
    if data.source == "synthetic":
        return SyntheticCorpus(training.seq_len, vocab, training.seed)
    if data.source == "indexed":
        return load_indexed(config, vocab)
    if data.split is not None:
        return train_part(config, select_part(whole_source(config, data), data))
    samples = BatchSizes(training.ramp_up, training.global_batch).samples_before(training.steps)
    usable = samples * training.seq_len + 1
    held_out = held_out_size(config)
    if data.source == "tokens":
        tokens, mask = map_tokens(data, None if held_out else usable), read_mask(data)
        if held_out:
            remaining = tokens.numel() - held_out.amount
            if remaining <= 0:
                raise nothing_left_error(str(data.path))
            tokens = tokens[: min(remaining, usable)]
        return TokenCorpus(
            tokens, training.seq_len, vocab, None if mask is None else mask[: len(tokens)]
        )
    extent = split_off(data, held_out)[0] if held_out else WHOLE_SOURCE
    return text_corpus(config, data, training.seed, samples, extent)


def load_validation(config: TrainerConfig) -> Corpus:
    """Return the samples of the evaluations, in order; they are the same for every seed.

    Raises ConfigError when there are too few.
    """
    evaluation, data, training = config.training.evaluation, config.data, config.training
    assert evaluation is not None, "there is nothing to evaluate"
    if isinstance(config.model, FluxConfig):
        return load_validation_latents(config, config.model, evaluation)
    vocab = config.model.vocab_size
    if data.source == "synthetic":
        return SyntheticCorpus(training.seq_len, vocab, 0, backwards=True)
    if data.source == "indexed":
        return load_validation_indexed(config, vocab)
    held_out, need = held_out_size(config), validation_size(config)
    loss_mask = evaluation.loss_mask or (None if evaluation.path else data.loss_mask)
    data = replace(data, path=evaluation.path or data.path, loss_mask=loss_mask)
    if data.split is not None:
        part = select_part(whole_source(config, data), data)
        selection = slice(-evaluation.samples, None) if held_out else slice(evaluation.samples)
        corpus: Corpus = PartCorpus(part.whole, part.indices[selection])
    elif data.source == "tokens":
        tokens, mask = map_tokens(data, None), read_mask(data)
        part = slice(-need.amount, None) if held_out else slice(need.amount)
        corpus = TokenCorpus(
            tokens[part], training.seq_len, vocab, None if mask is None else mask[part]
        )
    else:
        extent = split_off(data, held_out)[1] if held_out else WHOLE_SOURCE
        corpus = text_corpus(config, data, 0, evaluation.samples, extent)
    return require_samples(corpus, evaluation.samples, data.path or data.source)


def whole_source(config: TrainerConfig, data: DataConfig) -> TokenCorpus | PaddedCorpus:
    """Return all samples of a source; raises ConfigError if the source is invalid."""
    if data.source != "tokens":
        return text_corpus(config, data, 0, MAX_TEXT_TOKENS, WHOLE_SOURCE)
    vocab = config.model.vocab_size  # type: ignore[union-attr]
    return TokenCorpus(map_tokens(data, None), config.training.seq_len, vocab, read_mask(data))


def read_mask(data: DataConfig) -> Tensor | None:
    """Return the loss mask of a file's tokens, None for all; raises ConfigError as `map_mask`."""
    return None if data.loss_mask is None else map_mask(data.loss_mask, data)


def held_out_size(config: TrainerConfig) -> ValidationSize | None:
    """Return the amount that evaluation holds out from the training data."""
    evaluation = config.training.evaluation
    return validation_size(config) if evaluation is not None and evaluation.path is None else None


def text_corpus(
    config: TrainerConfig, data: DataConfig, seed: int, samples: int, extent: Extent
) -> TokenCorpus | PaddedCorpus:
    """Return up to `samples` samples of a text source, or of a part of it."""
    seq_len, vocab = config.training.seq_len, config.model.vocab_size  # type: ignore[union-attr]
    if vocab < BYTE_VOCAB:
        raise ConfigError(
            f"model.vocab_size {vocab}: text needs at least {BYTE_VOCAB}, one id per byte and one "
            "that ends a document"
        )
    if data.packing == "padded":
        texts = islice(records(data, seed, MAX_TEXT_TOKENS, extent), samples)
        return pad(texts, seq_len, MAX_TEXT_TOKENS, data.loss_on == "text")
    usable = samples * seq_len + 1
    tokens = pack(documents(data, seed, usable, extent), min(usable, MAX_TEXT_TOKENS))
    ends = document_ends(tokens) if data.document_mask else None
    return TokenCorpus(tokens, seq_len, vocab, ends=ends)


def pad(texts: Iterable[bytes], seq_len: int, limit: int, masked: bool) -> PaddedCorpus:
    """Make every non-empty text a record, truncated to the length of a sample.

    Records beyond `limit` tokens in total are omitted.
    """
    pieces, ends = [END], [0]
    for text in texts:
        piece = tokens_of(text[: seq_len + 1])[: seq_len + 1]
        if ends[-1] + len(piece) > limit:
            break
        if text:
            pieces.append(piece)
            ends.append(ends[-1] + len(piece))
    return PaddedCorpus(torch.cat(pieces)[len(END) :], torch.tensor(ends), seq_len, masked)
