"""The page of formulas shows the coefficients and the steps that the package has."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from paceline.estimate.model.coefficients import NAMES

DOCS = Path(__file__).parents[2] / "docs" / "dev"


@pytest.fixture(scope="module")
def terms() -> dict[str, object]:
    return runpy.run_path(str(DOCS / "estimator_terms.py"))


def test_the_page_has_coefficients_of_the_package(terms: dict[str, object]):
    cases = terms["published_cases"]()  # pyright: ignore[reportCallIssue]
    page = (DOCS / "estimator-formulas.md").read_text()
    assert terms["coefficient_table"](cases) in page  # pyright: ignore[reportCallIssue]
    assert terms["picture"](cases) == (DOCS / "estimator-terms.svg").read_text()  # pyright: ignore[reportCallIssue]
    assert all(f"| `{name}` |" in page for name in NAMES)
