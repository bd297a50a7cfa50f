"""Made models are models of the hub: transformers loads them, and their sizes are checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.staging.converters import ConversionJob, convert

SIZES: dict[str, dict[str, str | int | float | bool]] = {
    "opt": {"layers": 1, "hidden": 32, "embedding": 16, "post_norm": True},
    "llama": {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48},
}


@pytest.mark.parametrize(("family", "size"), SIZES.items())
def test_transformers_loads_it_without_a_tensor_too_many_or_missing(
    tmp_path: Path, family: str, size: dict[str, str | int | float | bool]
):
    transformers = pytest.importorskip("transformers")
    convert(family, ConversionJob(tmp_path, {}, size, lambda: None))

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )

    assert not any(report.values()), report
    assert model.config.hidden_size == 32 and model.config.vocab_size == 2048


def test_a_size_that_no_model_has_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="layers"):
        convert("opt", ConversionJob(tmp_path, {}, {"layers": 0}, lambda: None))
    with pytest.raises(UserError, match="depth"):
        convert("llama", ConversionJob(tmp_path, {}, {"depth": 3}, lambda: None))
