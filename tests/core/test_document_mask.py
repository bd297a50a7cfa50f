"""Document masking as a setting: its key, what refuses it, and how ranks' shares become one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.compare.comparability import compare_settings
from paceline.core.ranks import merge_ranks
from paceline.core.run import RunSettings, RunSpec
from paceline.core.training import Data
from paceline.engines import native
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import estimate
from paceline.runs.plan import Request, make_plan
from tests.core.shapes import FLUX
from tests.engines.test_native import read, start, step
from tests.example import make_spec, make_steps


def masked(**changes: object) -> RunSpec:
    """The example with documents masked from each other."""
    fields = {"source": "stdlib", "document_mask": True, **changes}
    return make_spec(data=Data.model_validate(fields))


def test_runs_from_before_there_was_a_mask_keep_their_key() -> None:
    older = make_spec().model_dump(mode="json")
    older["data"].pop("document_mask")

    assert RunSpec.model_validate(older).key == make_spec().key != masked().key
    assert native.settings(masked())["data"]["document_mask"] is True


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            masked(source="synthetic"),
            "data.source synthetic does not have: use a decoder on stdlib",
        ),
        (masked(source="tokens", path="a.bin"), "data.source tokens does not"),
        (masked().model_copy(update={"model": FLUX}), "use a decoder"),
        (masked(packing="padded"), "a padded sample is one document"),
    ],
    ids=["synthetic", "tokens", "mmdit", "padded"],
)
def test_what_has_no_documents_to_mask_is_refused(spec: RunSpec, words: str) -> None:
    assert words in " ".join(native.unsupported(spec))
    assert native.unsupported(masked()) == []


def test_shares_of_ranks_count_by_their_samples() -> None:
    ranks = {
        rank: make_steps([1.0], samples=[samples], attended_share=[share])
        for rank, (samples, share) in enumerate([(3.0, 0.2), (1.0, 0.6)])
    }

    assert merge_ranks(ranks)["attended_share"].tolist() == pytest.approx([0.3])


def test_a_log_that_is_read_again_knows_its_shares() -> None:
    log = read(start(), *(step(number, attended_share=number / 8) for number in (1, 2, 3)))

    assert log.steps()["attended_share"].tolist() == [0.125, 0.25, 0.375]


def test_a_masked_run_is_not_held_against_another() -> None:
    ours, theirs = RunSettings.of(make_spec()), RunSettings.of(masked())

    (difference,) = compare_settings([ours], [theirs]).differences
    assert difference.key == "packing" and "document_mask yes" in difference.candidate
    assert not compare_settings([theirs], [theirs]).differences


def test_an_estimate_says_that_it_knows_no_documents() -> None:
    question = EstimateRequest("tiny-llama", "H100-SXM", 8)
    notes = estimate(replace(question, variant="documents"), shipped_evidence()).notes

    assert "assume full attention windows" in " ".join(notes)
    assert "assume full attention windows" not in " ".join(
        estimate(question, shipped_evidence()).notes
    )


def test_the_recipe_that_masks_documents_can_run_as_it_is() -> None:
    spec = make_plan(Request("tiny-llama", variant="documents", devices=1)).spec

    assert spec.data.document_mask and native.unsupported(spec) == []
