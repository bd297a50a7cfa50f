"""Settings are flattened, and only those that differ are shown."""

from __future__ import annotations

from paceline.compare.over_time.repeats import distinguishing, flat_settings
from paceline.core.layout import Layout
from tests.example import make_spec


def test_every_setting_has_its_dotted_name():
    settings = flat_settings(make_spec())
    assert settings["layout.zero_stage"] == "0" and settings["training.seq_len"] == "32"
    assert settings["model.tied_embeddings"] == "false" and "lora" not in settings


def test_only_what_differs_is_told():
    plain, other = make_spec(), make_spec(layout=Layout(micro_batch=4, zero_stage=3))
    assert distinguishing([flat_settings(plain), flat_settings(other)]) == [
        {"layout.zero_stage": "0"},
        {"layout.zero_stage": "3"},
    ]
    assert distinguishing([flat_settings(plain)] * 2) == [{}, {}]


def test_the_name_of_the_machine_is_no_setting():
    cluster = make_spec().cluster
    elsewhere = make_spec(cluster=cluster.model_copy(update={"name": "there"}))
    assert distinguishing([flat_settings(make_spec()), flat_settings(elsewhere)]) == [{}, {}]


def test_a_setting_that_one_side_lacks_is_told_of_the_other():
    assert distinguishing([{"a": "1"}, {"a": "1", "b": "2"}]) == [{}, {"b": "2"}]
