"""Write the table and the picture of docs/dev/estimator-formulas.md.

`python docs/dev/estimator_terms.py` evaluates the time model on all published steps that Paceline
ships, and shows how much each term and each coefficient matters in them.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.concepts.pictures import BLUE, GREY, INK, box, line, text
from paceline.core.errors import UserError
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.interval import NUDGE, Z80
from paceline.estimate.model.case import Cases, Floats, cases_of
from paceline.estimate.model.coefficients import NAMES, PRIORS, coefficient_values
from paceline.estimate.model.step import StepTime, step_time
from paceline.estimate.similar_steps import published_steps
from paceline.files.references import find_rows, source_names
from paceline.reference import table

PAGE = Path(__file__).with_name("estimator-formulas.md")
PICTURE = PAGE.parent / "estimator-terms.svg"
BEGIN, END = "<!-- generated: python docs/dev/estimator_terms.py -->", "<!-- end -->"
PARTS = tuple(field.name for field in fields(StepTime))


def published_cases() -> Cases:
    """Return the cases of all shipped published steps on GPUs and TPUs."""
    cases = []
    for name in source_names():
        try:
            cases += [case for case, _ in published_steps(name, find_rows(name))]
        except UserError:
            continue  # A source without step times.
    return cases_of(cases)


def _parts(x: Cases, logs: Floats) -> Floats:
    """Return the seconds of each part, of shape (parts, cases)."""
    return np.array([vars(step_time(x, coefficient_values(logs)))[name] for name in PARTS])


def coefficient_table(x: Cases) -> str:
    """Return the coefficients with prior, fitted value, and where and how much they matter.

    The last column is the largest change of a step in percent for a change of the coefficient by
    1%, over the published steps.
    """
    fitted = shipped_evidence().fit()
    deviations = np.sqrt(np.diag(fitted.covariance))
    rows = []
    for i, prior in enumerate(PRIORS):
        nudge = NUDGE * np.eye(len(NAMES))[i]
        change = _parts(x, fitted.centre + nudge) - _parts(x, fitted.centre - nudge)
        elasticity = change / (2 * NUDGE) / _parts(x, fitted.centre).sum(axis=0)
        largest = float(np.abs(elasticity.sum(axis=0)).max())
        part = PARTS[int(np.abs(elasticity).max(axis=1).argmax())] if largest >= 0.005 else "none"
        before = _interval(np.log(prior.value), prior.sd)
        after = _interval(fitted.centre[i], deviations[i])
        size = f"{largest:.2f}%" if part != "none" else "not in them"
        rows.append((f"`{prior.name}`", prior.what, before, after, part, size))
    head = ("coefficient", "meaning", "prior", "fitted", "counts in", "1% more changes a step by")
    return table(head, rows)


def _interval(log: float, sd: float) -> str:
    """Return a median with its 80% interval."""
    low, median, high = (f"{np.exp(log + z * sd):.2g}" for z in (-Z80, 0.0, Z80))
    return f"{median} ({low} to {high})"


def picture(x: Cases) -> str:
    """Return an SVG with the share of a step that each part has in the published steps."""
    parts = _parts(x, shipped_evidence().fit().centre)
    shares = parts / parts.sum(axis=0)
    x0, x1, top, height = 110, 640, 46, 24
    width = x1 - x0
    title = f"Share of the parts of a step in {x.size} published steps"
    marks = [text(x0, 22, f"{title}: median, 10 to 90%, largest", size=14)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = x0 + share * width
        marks.append(line(at, top - 8, at, top + height * len(PARTS), GREY, width=0.5))
        marks.append(text(at, top + height * len(PARTS) + 16, f"{share:.0%}", anchor="middle"))
    for row, (name, values) in enumerate(zip(PARTS, shares, strict=True)):
        y = top + row * height + height / 2
        low, median, high, most = (x0 + q * width for q in np.quantile(values, (0.1, 0.5, 0.9, 1)))
        marks.append(text(x0 - 8, y + 4, name, anchor="end"))
        marks.append(box(low, y - 6, max(high - low, 0.5), 12, BLUE, opacity=0.45))
        marks.append(line(median, y - 8, median, y + 8, INK, width=2))
        marks.append(line(most, y - 4, most, y + 4, GREY, width=2))
    bottom = top + height * len(PARTS) + 26
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {bottom}" role="img" '
        f'font-family="system-ui, sans-serif"><title>{title}</title>'
    )
    return "\n".join([head, box(0, 0, 680, bottom, "#ffffff"), *marks, "</svg>"]) + "\n"


def main() -> None:
    """Write both."""
    x = published_cases()
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{coefficient_table(x)}{END}{after}", encoding="utf-8")
    PICTURE.write_text(picture(x), encoding="utf-8")


if __name__ == "__main__":
    main()
