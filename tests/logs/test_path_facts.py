"""The results path of NVIDIA's recipes states dtype, size, GPUs and whether a run was traced."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from paceline.report.logs import log_lines
from tests.logs.example import megatron_log

NAME = "log-nemo_llama3.1_70b_123456.out"


def placed(root: Path, folders: str, user: UserSettings | None = None, text: str = ""):
    log = root / folders / NAME
    log.parent.mkdir(parents=True)
    log.write_text(text + megatron_log([11.0] * 20))
    return parse_log(log, user or UserSettings()).document


def test_dtype_size_and_gpus_come_from_the_path(tmp_path: Path):
    document = placed(tmp_path, "results/25.01/fp8/70b/64")
    facts = document.settings
    assert (facts.dtype, facts.nominal_parameters, facts.num_devices) == ("fp8", 70e9, 64)
    assert document.sources == dict.fromkeys(["dtype", "num_devices", "nominal_parameters"], "path")
    assert "  from the path: dtype fp8, num devices 64, 70.0B parameters" in list(
        log_lines(document)
    )


@pytest.mark.parametrize("folders", ["fp8/70b", "results/25.01/fp8/many/64", "fp8/70b/64x", "."])
def test_other_folders_say_nothing(tmp_path: Path, folders: str):
    document = placed(tmp_path / "x", folders)
    assert (document.settings.dtype, document.settings.num_devices, document.sources) == (
        None,
        None,
        {},
    )


def test_the_log_goes_before_its_path_and_the_user_before_both(tmp_path: Path):
    arguments = (
        "using world size: 32, data-parallel-size: 32\n"
        "------------------------ arguments ------------------------\n"
        "  bf16 ............................................ True\n"
        "  world_size ...................................... 32\n"
    )
    document = placed(tmp_path, "results/25.01/fp8/70b/64", text=arguments)
    assert document.settings.num_devices == 32 and document.sources.keys() >= {"nominal_parameters"}
    assert "the path says num devices 64; the log reports 32, which is used" in document.warnings
    given = placed(tmp_path, "results/25.01/bf16/70b/64", UserSettings(dtype="fp8"))
    assert given.settings.dtype == "fp8" and "dtype" not in given.sources
    assert "dtype fp8 was given, but the path says bf16" in given.warnings


def test_the_path_goes_before_the_recipe_and_doubts_another_model(tmp_path: Path):
    recipe = UserSettings(recipe="llama31-8b")
    document = placed(tmp_path, "results/25.01/fp8/70b/64", recipe)
    assert document.settings.dtype == "fp8"
    assert any("the path says 70b, but the given model has 8.03B" in w for w in document.warnings)


def test_the_folder_of_traced_runs_says_that_they_are(tmp_path: Path):
    document = placed(tmp_path, "results/25.01-nccl-trace/fp8/70b/64")
    assert document.settings.profiled and document.sources["profiled"] == "path"
    assert any("25.01-nccl-trace" in warning for warning in document.warnings)


def test_a_profile_of_the_same_job_beside_the_log_says_so(tmp_path: Path):
    reports = tmp_path / "results/25.01/fp8/70b/64/nsys"
    reports.mkdir(parents=True)
    (reports / "llama3.1-70b-fp8_64g_999999_0_0.nsys-rep").touch()
    log = reports.parent / NAME
    log.write_text(megatron_log([11.0] * 20))
    assert parse_log(log, UserSettings()).document.settings.profiled is None
    (reports / "llama3.1-70b-fp8_64g_123456_0_0.nsys-rep").touch()
    assert parse_log(log, UserSettings()).document.settings.profiled
