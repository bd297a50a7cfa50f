"""What the options of the time model ask, whichever verb has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import model_options as model
from paceline.core.errors import UserError
from paceline.estimate.calibrate.lookup import FileEvidence
from paceline.layouts.rampup.timing import ramp_context
from tests.layouts.sweep.test_prediction import calibrated


def given(flops_per_s: float = 5e10, **changes: object) -> FileEvidence:
    """The file of a processor's calibration in fp32."""
    own = calibrated(2, 1, flops_per_s).model_copy(update=changes)
    return FileEvidence(Path("own.json"), own.labelled_evidence(), own)


def test_every_question_has_the_rates_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A ramp-up too, where nothing else says how fast this processor is."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for rate in (5e10, 1e10):
        file = given(rate)
        fp32 = ("dtype=fp32",)
        asked = model.question("tiny-llama", "cpu", 2, "any", overrides=fp32, evidence=file)
        setting = ramp_context(asked, model.chosen_evidence(file, asked))
        assert setting.machine.peak_wide("fp32") == rate
        assert setting.evidence == file.evidence


def test_a_file_of_another_device_or_dtype_is_refused_before_anything_is_estimated():
    for device, dtype, words in (
        ("H100", "bf16", "--calibration own.json: was measured on cpu and does not apply to H100"),
        (
            "cpu",
            "bf16",
            "was measured in fp32, but the training run uses bf16; allowed: a calibration in bf16",
        ),
    ):
        overrides = (f"dtype={dtype}",)
        asked = model.question("tiny-llama", device, 2, "any", overrides=overrides)
        with pytest.raises(UserError, match=words):
            model.chosen_evidence(given(), asked)
