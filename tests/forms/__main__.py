"""`python -m tests.forms record` writes what every verb prints now; `compare` names the changes."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.forms.differences import differences
from tests.forms.invoking import FOLDER, Form, forms, load_cases

GOLDEN = FOLDER / "golden"


def recorded_forms() -> dict[str, dict[str, Form]]:
    """What was recorded, by group and name in the order of the cases."""
    return {group: json.loads(_file(group).read_text("utf-8")) for group in load_cases()}


def record(printed: dict[str, dict[str, Form]]) -> None:
    """Write one file a group."""
    GOLDEN.mkdir(exist_ok=True)
    for group, cases in printed.items():
        text = json.dumps(cases, indent=1, ensure_ascii=False)
        _file(group).write_text(f"{text}\n", encoding="utf-8")


def changes(printed: dict[str, dict[str, Form]]) -> list[str]:
    """Every divergence from what is recorded: group, case and JSON path, old and new value."""
    return list(differences(recorded_forms(), printed))


def _file(group: str) -> Path:
    return GOLDEN / f"{group}.json"


def main(verb: str) -> int:
    """Record or compare; 1 where something differs."""
    with tempfile.TemporaryDirectory() as work:
        printed = forms(load_cases(), Path(work).resolve())
    if verb == "record":
        record(printed)
        return 0
    found = changes(printed)
    print("\n".join(found) or f"{sum(map(len, printed.values()))} commands print what is recorded")
    return int(bool(found))


if __name__ == "__main__":
    if sys.argv[1:] not in (["record"], ["compare"]):
        sys.exit("usage: python -m tests.forms record|compare")
    sys.exit(main(sys.argv[1]))
