"""A home folder of an unknown user is reported as an error of the setting, in every engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.engines import engine
from paceline.files.home import home_path
from tests.engines.batch_site import MLPERF, NEMO, site
from tests.example import make_spec

NOBODYS = "~no-such-user/x"


@pytest.mark.parametrize(
    ("name", "field", "more"),
    [
        ("nemo", "stage_path", {}),
        ("nemo", "script", NEMO),
        ("mlperf", "config", MLPERF),
        ("mlperf", "implementation", MLPERF),
        ("deepspeed_chat", "model", {}),
        ("deepspeed_chat", "data", {}),
    ],
)
def test_a_home_folder_that_nobody_has_is_told(name: str, field: str, more: dict[str, str]) -> None:
    settings = {**more, field: NOBODYS}
    spec = make_spec(engine=name, engine_settings=settings, cluster=site(1, 2))
    text = f"engine_settings.{field} {NOBODYS}: refers to a user without"
    with pytest.raises(UserError, match=text):
        engine(name).job(spec, "x")


def test_a_home_folder_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert home_path("field", "~/x") == Path("/home/somebody/x")
    assert home_path("field", "a/~/x") == Path("a/~/x")
