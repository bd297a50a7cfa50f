"""Which software and which year a published row is of."""

from __future__ import annotations

import pytest

from paceline.estimate.fit.origin import software_of, year_of


@pytest.mark.parametrize(
    ("row", "software", "year"),
    [
        ({"source": "NVIDIA-NeMo/Megatron-Bridge 26.02.01"}, "nemo", 2026),
        ({"source": "NVIDIA/dgxc-benchmarking v24.11.1"}, "nemo", 2024),
        ({"source": "x v24.11.1", "model": "Llama-2-70B (MaxText JAX)"}, "maxtext", 2024),
        ({"source": "arXiv 2104.04473 Megatron-LM"}, "megatron", 2021),
        ({"source": "seed 4 (bigscience experiments/tr3m.md)"}, "megatron-deepspeed", 2021),
        ({"source": "bigscience train/tr11-176B-ml/chronicles.md"}, "megatron-deepspeed", 2022),
        ({"source": "mosaicml/llm-foundry"}, "composer", 2023),
        ({"source": "seed 1 (Lambda 1CC DeepSpeed-Chat)"}, "deepspeed", 2024),
        ({"source": "a paper", "stack": "megatron-bridge"}, "nemo", None),
        ({"source": "a table of mine"}, "any", None),
    ],
)
def test_rows_name_their_software_and_year(
    row: dict[str, str], software: str, year: int | None
) -> None:
    assert (software_of(row), year_of(row)) == (software, year)
