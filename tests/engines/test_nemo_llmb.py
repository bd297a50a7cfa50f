"""NVIDIA's recipes of today by llmb-run: its words and variables, and what it cannot be asked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.engines import engine, notes
from paceline.machines import slurm
from tests.command import paceline
from tests.engines.batch_site import LLMB, site, spec_of

FAKE_LLMB = Path(__file__).with_name("fake_llmb.py")
CONFIG = """\
schema_version: 2
llmb_repo: /lustre/llmb/llmb_repo
llmb_install: /lustre/llmb
gpu_type: {gpu}
environment: {{HF_TOKEN: hf_abcdefghijklmnopqrstuvwxyz{exported}}}
slurm:
  account: acct
  gpu: {{partition: batch, gres: null}}
workloads:
  installed: [pretrain_llama3.1]
"""
SBATCH = '#!/bin/sh\nprintf "%s\\n" "$@" >"$WORDS_FILE"\necho "4711;cluster"\n'


def installed(folder: Path, gpu: str = "h100", exported: str = "") -> Path:
    """An installation in which a program stands in for llmb-run."""
    install = folder / "llmb"
    install.mkdir()
    (install / "cluster_config.yaml").write_text(CONFIG.format(gpu=gpu, exported=exported))
    program = install / "llmb-run"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE_LLMB} "$@"\n')
    program.chmod(0o755)
    return install


def llmb(
    of: str = "llama31-70b", /, *overrides: str, cluster: Cluster | None = None, **own: Any
) -> RunSpec:
    return spec_of(
        "nemo",
        of,
        cluster or site(8, 8, "H100-SXM", account="acct", partition="batch"),
        {**LLMB, **own},
        None,
        *overrides,
    )


OF_70B = """
llmb-run submit -w pretrain_llama3.1 -s 70b --dtype bf16 --scale 64
 --mbridge-arg=--seq_length=8192 --mbridge-arg=--use_megatron_fsdp=false
"""
LAYOUT = {"TP": "4", "PP": "4", "CP": "2", "VP": "5"}
VARIABLES = {**LAYOUT, "MBS": "1", "GBS": "128", "MAX_STEPS": "50"}


def test_a_recipe_is_asked_for_with_its_layout_batch_and_steps() -> None:
    spec = llmb()
    assert engine("nemo").unsupported(spec) == []
    settings = engine("nemo").settings(spec)
    assert settings["command"] == OF_70B.split() and settings["folder"] == "/lustre/llmb"
    assert settings["variables"] == VARIABLES
    job = engine("nemo").job(spec, "x")
    assert job.env == {**VARIABLES, "SBATCH_NO_REQUEUE": "1"}
    assert job.timeout_s is None, "the recipe's own time limit decides"
    assert slurm.render(job).splitlines()[-1] == 'exec bash ./llmb.sh "$@"'


def test_precisions_nodes_and_switches_are_words_of_llmb_run() -> None:
    asked = {"exclude": ["n3"], "reservation": "r", "constraint": "c", "segment": 8, "mem": "64G"}
    env = {"NCCL_IB_HCA": "mlx5_0", "HF_TOKEN": "secret-1"}
    cluster = site(1, 8, "B200", **asked).model_copy(update={"hosts": ("n1",), "env": env})
    own: dict[str, Any] = {"profile": True, "force": True, "variant": "v1"}
    overrides = ("dtype=mxfp8", "layout.cp=1", "layout.zero_stage=3", "time_limit_s=5400")
    spec = llmb("llama31-8b", *overrides, cluster=cluster, **own)
    assert engine("nemo").unsupported(spec) == []
    settings = engine("nemo").settings(spec)
    words = {
        *("--nodelist=n1", "--exclude=n3", "--reservation=r", "--segment=8", "-p", "--force"),
        *(
            "--slurm-arg=constraint=c",
            "--slurm-arg=mem=64G",
            "--env=NCCL_IB_HCA=mlx5_0",
            "fp8",
            "8b",
        ),
        "--mbridge-arg=--use_megatron_fsdp=true",
    }
    assert words <= set(settings["command"])
    told = {"FP8_RECIPE": "mx", "CONFIG_VARIANT": "v1", "TIME_LIMIT": "01:30:00", "VP": "None"}
    assert told.items() <= settings["variables"].items()
    job = engine("nemo").job(spec, "x")
    assert job.env["HF_TOKEN"] == "secret-1" and job.timeout_s == 5400
    assert "secret-1" not in slurm.render(job) + "".join(job.files.values())


def test_older_recipes_get_no_argument_that_their_llmb_run_rejects(tmp_path: Path) -> None:
    """Release 26.06 has llmb-run 1.15, whose `submit` has no --mbridge-arg."""
    install = installed(tmp_path)
    (tmp_path / "release.yaml").write_text("llmb_version: 26.06.01\n")
    config = install / "cluster_config.yaml"
    config.write_text(config.read_text().replace("/lustre/llmb/llmb_repo", str(tmp_path)))
    spec = llmb(llmb_install=str(install))
    assert engine("nemo").unsupported(spec) == []
    assert not any("mbridge" in word for word in engine("nemo").settings(spec)["command"])
    other = llmb("llama31-70b", "seq_len=4096", "layout.zero_stage=3", llmb_install=str(install))
    problems = engine("nemo").unsupported(other)
    assert [problem.partition(" needs recipes of 26.08")[0] for problem in problems] == [
        "training.seq_len",
        "layout.zero_stage=3",
    ]
    (tmp_path / "release.yaml").write_text("llmb_version: 26.08.00\n")
    assert engine("nemo").settings(spec)["command"] == OF_70B.split()


def test_a_batch_of_2025_is_reported_for_recipes_of_today() -> None:
    (note,) = notes(llmb())
    assert "has global_batch 256 on 64 H100; use --variant bridge" in note
    cluster = site(8, 8, "H100-SXM")
    for variant in ("bridge", "bridge-fp8"):
        assert notes(spec_of("nemo", "llama31-70b", cluster, LLMB, variant)) == []


def test_what_launch_sh_decides_itself_is_refused() -> None:
    b200 = site(16, 8, "B200")
    (problem,) = engine("nemo").unsupported(llmb("llama31-70b", "dtype=fp8", cluster=b200))
    assert problem.startswith("training.dtype fp8: the recipe's launch.sh trains the 70B in mxfp8")
    (problem,) = engine("nemo").unsupported(llmb("llama31-405b", cluster=site(128, 8, "B200")))
    assert problem.endswith("use --set global_batch=6144")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (llmb(form="nemo2"), "engine_settings.form nemo2 must be launch or llmb"),
        (llmb(llmb_install=""), "engine_settings.llmb_install is missing"),
        (llmb(stage_path="/x"), "engine_settings.stage_path is not a setting of engine nemo"),
        (llmb(profile="no"), "engine_settings.profile no must be true or false"),
        (llmb("tiny-opt"), "tiny-opt is not a Llama 3.1: set engine_settings.workload and size"),
        (llmb(cluster=site(8, 8, "A100-SXM-80GB")), "device A100-SXM-80GB has no performance"),
        (llmb(cluster=site(16, 4, "H100-SXM")), "llmb-run uses 8 h100 per node"),
        (llmb(cluster=Cluster(name="here", device="H100-SXM", nodes=8, devices_per_node=8)),
         "needs Slurm"),
    ],
)  # fmt: skip
def test_what_it_cannot_be_asked_for_is_told(spec: RunSpec, sentence: str) -> None:
    assert any(sentence in problem for problem in engine("nemo").unsupported(spec))


def test_what_the_installation_says_otherwise_is_told(tmp_path: Path) -> None:
    install = str(installed(tmp_path, "b200", exported=", GBS: 64"))
    cluster = site(8, 8, "H100-SXM", account="other", partition="batch")
    spec = llmb(cluster=cluster, llmb_install=install)
    assert [problem.split(":")[0] for problem in engine("nemo").unsupported(spec)] == [
        "cluster.device h100",
        "cluster.slurm.account other",
        "GBS=128",
    ]
    assert engine("nemo").missing(spec) is None
    assert "does not list pretrain_qwen3; install it with" in str(
        engine("nemo").missing(llmb(llmb_install=install, workload="pretrain_qwen3"))
    )
    assert "cluster_config.yaml does not exist" in str(engine("nemo").missing(llmb()))
    Path(install, "llmb-run").unlink()
    assert "llmb-run is not in PATH or" in str(engine("nemo").missing(spec))


def test_the_run_is_shown_before_it_is_submitted(tmp_path: Path) -> None:
    chosen = (f"llmb_install={installed(tmp_path)}", "form=llmb")
    settings = (word for text in chosen for word in ("--set", f"engine_settings.{text}"))
    words = ("run", "llama31-70b", "--engine", "nemo", "--cluster", "dgx-h100", *settings)
    done = paceline(*words, "--dry-run", runs=tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert "and llmb.sh, which job.sh runs:" in done.stderr
    assert "llmb-run submit -w pretrain_llama3.1 -s 70b --dtype bf16" in done.stdout


def submitted(folder: Path, monkeypatch: pytest.MonkeyPatch, spec: RunSpec, *after: str) -> str:
    """The job's number, with a program that stands in for sbatch."""
    (folder / "bin").mkdir()
    for name, text in {"sbatch": SBATCH, "squeue": "#!/bin/sh\n"}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("WORDS_FILE", str(folder / "words"))
    run = folder / "run"
    run.mkdir()
    job = engine("nemo").job(spec, "x")
    slurm.prepare(job, run)
    return slurm.client.sbatch(job, run, "job.sh", [f"--dependency=afterok:{n}" for n in after])


def test_llmb_runs_answer_is_the_jobs_number_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = llmb("llama31-8b", "layout.cp=1", llmb_install=str(installed(tmp_path)))
    assert submitted(tmp_path, monkeypatch, spec, "17") == "4711"
    seen = json.loads((tmp_path / "run" / "experiment" / "seen.json").read_text())
    assert seen["argv"][-1] == "--slurm-arg=dependency=afterok:17"
    assert (tmp_path / "words").read_text().split() == [
        *("--parsable", "--dependency=afterok:17", "job.sh")
    ]
    assert seen["env"]["GBS"] == "1024" and seen["env"]["MAX_STEPS"] == "50"
    assert "jobid=4711" in (tmp_path / "run" / "logs" / "llmb-run.log").read_text()


def test_llmb_runs_refusal_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = llmb(
        *("llama31-8b", "layout.cp=1"),
        cluster=site(1, 1, "H100-SXM"),
        llmb_install=str(installed(tmp_path)),
    )
    with pytest.raises(SystemFaultError, match=r"llmb\.sh: no job was queued: .*No matching job"):
        submitted(tmp_path, monkeypatch, spec)


def test_no_setting_becomes_a_command_of_the_script(tmp_path: Path) -> None:
    install = tmp_path / "a $(touch x)`touch y`\"'"
    install.mkdir()
    (install / "llmb-run").write_text('#!/bin/sh\nprintf "%s\\n" "$@" >words\necho jobid=3\n')
    (install / "llmb-run").chmod(0o755)
    hostile: dict[str, Any] = {"workload": "$(touch x)", "size": "`touch y`", "variant": "';id"}
    job = engine("nemo").job(llmb(llmb_install=str(install), **hostile), "x")
    (tmp_path / "logs").mkdir()
    (tmp_path / "llmb.sh").write_text(job.files["llmb.sh"])
    bash = shutil.which("bash") or "bash"
    done = subprocess.run([bash, "llmb.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert (install / "words").read_text().splitlines()[:5] == [
        *("submit", "-w", "$(touch x)", "-s", "`touch y`")
    ]
    assert sorted(path.name for path in install.iterdir()) == ["llmb-run", "words"]
