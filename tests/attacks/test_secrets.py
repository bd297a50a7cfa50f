"""Thirty secrets in every place of a run: none is left on disk, in arguments or in streams."""

from __future__ import annotations

import gzip
import os
import sqlite3
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from paceline.core.secrets import REDACTED
from paceline.runs import log_import
from tests.attacks.test_surroundings import LOG
from tests.command import paceline
from tests.runs.test_flow import SMALL

# Joined from parts, so that no scanner of repositories takes them for real ones.
PROCESS = {
    "HF_TOKEN": "314159265358",
    "WANDB_API_KEY": "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUt7nFEMI/K7MDENG+bPxRfiCY",
    "AWS_ACCESS_KEY_ID": "AKIA" + "Q3EXAMPLE7SAMPLE",
    "SITE_PASSWORD": "correct horse battery",
    "https_proxy": "http://proxyuser:pr0xyword@127.0.0.1:9",
    "PGPASSWORD": "plainlowerword",
    "CI_JOB_JWT": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIyIn0.c2lnbmF0dXJl",
}
CLUSTER = {
    "NGC_API_KEY": "anotherplainword",
    "NVIDIA_CATALOG": "nvapi-" + "c4t4l0g" * 5,
    "GIT_REMOTE": "https://t0kenw1thout@code.example/a.git",
    "GIT_MIRROR": "https://me:w1thcolon!@code.example/a.git",
    "EXTRA_HEADER": "Authorization: Bearer b34r3rvalue9",
    "OTHER_HEADER": "Authorization: Basic YmFzaWN2YWx1ZTk=",
    "STORAGE": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=q7Zk9w3E5rAA==",
    "DEPLOY": "-----BEGIN OPENSSH PRIVATE "
    + "KEY-----\nd3BsMHlrM3k\n-----END OPENSSH PRIVATE KEY-----",
    "COOKIE_JAR": "session-plain-cookie",
    "SITE_PASSPHRASE": "plainpassphrase",
    "SLACK_HOOK": "xoxp-" + "998877665544-p0sted",
    "HUB": "hf_" + "clusterB3dE5gH7jK9mN1pQ",
}
LOGGED = {
    "hub": "hf_" + "loggedaB3dE5gH7jK9mN1pQ",
    "chat": "xoxb-" + "123456789012-l0gged",
    "bearer": "Authorization: Bearer l0ggedb34r3r",
    "URL": "https://robot:l0ggedpw@registry.example/img",
    "key": "--wandb-api-key 99aa88bb77cc66dd55ee",
    "of the environment": PROCESS["PGPASSWORD"],
}
SETTINGS = ("https://u:s3tp4ss@host/a", "sk-" + "proj-s3tB2c3D4e5F6g7H8", "password=s3tw0rd")
TAGS = ("hf_" + "taggedaB3dE5gH7jK9mN1pQ", PROCESS["HF_TOKEN"])
IMAGE = "docker://robot:im4gepw@registry.example/img:1"
# What alone is searched for: the scheme or the host may stay.
PARTS = (
    *("pr0xyword", "t0kenw1thout", "w1thcolon", "b34r3rvalue9", "YmFzaWN2YWx1ZTk", "im4gepw"),
    *("q7Zk9w3E5rAA", "d3BsMHlrM3k", "l0ggedb34r3r", "l0ggedpw", "99aa88bb77cc66dd55ee"),
    *("s3tp4ss", "s3tw0rd"),
)
WHOLE = (*PROCESS.values(), *CLUSTER.values(), *LOGGED.values(), *SETTINGS, *TAGS, IMAGE)
NUMBER = len({*WHOLE})
CLUSTER_FILE = "name: site\ndevice: cpu\ndevices_per_node: 1\nthreads_per_device: 1\n"


@dataclass
class Watch:
    """Arguments and variables of all that a process has started, sampled until it ends."""

    process: subprocess.Popen[str]
    arguments: set[str] = field(default_factory=set[str])
    environments: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def look(self) -> None:
        """Sample until the process has ended."""
        while self.process.poll() is None:
            try:
                children = psutil.Process(self.process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                return
            for child in children:
                try:
                    self.arguments.add(" ".join(child.cmdline()))
                    self.environments.append(child.environ())
                except psutil.Error:
                    continue
            threading.Event().wait(0.05)


def assert_clean(text: str, where: object) -> None:
    """No secret is in `text`, nor the part of one that opens something."""
    left = [secret for secret in (*WHOLE, *PARTS) if secret in text]
    assert not left, f"{where}: {left}"


def assert_clean_folder(folder: Path) -> None:
    """No secret is in any file below, packed ones and databases included, nor in a name."""
    for path in folder.rglob("*"):
        assert_clean(str(path.relative_to(folder)), "a name")
        if path.is_file():
            content = path.read_bytes()
            if content.startswith(b"\x1f\x8b"):
                content = gzip.decompress(content)
            assert_clean(content.decode("utf-8", "replace"), path)


def yaml_value(text: str) -> str:
    return '"' + text.replace("\n", "\\n") + '"'


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch, str]:
    """A real run with secrets in both environments: its folder, its processes, what it printed."""
    folder = tmp_path_factory.mktemp("trained")
    variables = [f"  {name}: {yaml_value(value)}\n" for name, value in CLUSTER.items()]
    cluster = folder / "site.yaml"
    cluster.write_text(CLUSTER_FILE + "env:\n" + "".join(variables))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "paceline", "run", "tiny-llama", "--no-probe", *SMALL),
            *("--set", "steps=30", "--cluster", str(cluster), "--tag", "planted"),
        ],
        env={
            **os.environ,
            **PROCESS,
            "PACELINE_RUNS": str(folder / "runs"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        },
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch = Watch(process)
    sampler = threading.Thread(target=watch.look)
    sampler.start()
    out, err = process.communicate(timeout=200)
    sampler.join()
    assert process.returncode in (0, 4), err  # a busy machine may leave too few steady steps
    cluster.unlink()
    return folder, watch, out + err


def test_thirty_different_secrets_are_planted():
    assert NUMBER >= 30


def test_nothing_that_a_run_leaves_holds_a_secret(trained: tuple[Path, Watch, str]):
    folder, watch, printed = trained
    assert_clean(printed, "streams")
    assert_clean("\n".join(watch.arguments), "arguments")
    assert_clean_folder(folder)
    assert len(list(folder.rglob("*.jsonl"))) >= 2 and REDACTED in "".join(
        path.read_text() for path in folder.glob("runs/*/run.json")
    )


def test_secrets_arrive_in_the_training(trained: tuple[Path, Watch, str]):
    _, watch, _ = trained
    ranks = [variables for variables in watch.environments if "LOCAL_RANK" in variables]
    assert ranks
    for name, value in {**PROCESS, **CLUSTER}.items():
        assert ranks[-1].get(name) == value, name


def test_the_index_holds_the_run_and_no_secret(trained: tuple[Path, Watch, str]):
    folder, _, _ = trained
    (database,) = folder.glob("cache/**/*.sqlite")
    with sqlite3.connect(database) as index:
        rows = "\n".join(index.iterdump())
    assert "planted" in rows
    assert_clean(rows, database)


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_hold_a_secret_are_refused(tmp_path: Path, setting: str):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: tiny-gpt\nname: mine\ndata:\n  text_key: {setting}\n")
    for words in (["tiny-gpt", "--set", f"data.text_key={setting}"], [str(recipe)]):
        done = paceline("run", *words, runs=tmp_path, env=PROCESS)
        assert done.returncode == 1 and "looks like a secret" in done.stderr
        assert_clean(done.stdout + done.stderr, words)
    assert not list(tmp_path.glob("*/run.json"))


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_that_is_a_secret_is_refused(tmp_path: Path, tag: str):
    done = paceline("run", "tiny-gpt", "--tag", tag, runs=tmp_path, env=PROCESS)
    assert done.returncode == 1 and "--tag: contains what looks like a secret" in done.stderr
    assert_clean(done.stdout + done.stderr, "streams")
    assert_clean_folder(tmp_path)


def test_slurms_script_holds_no_secret(tmp_path: Path):
    cluster = tmp_path / "site.yaml"
    variables = "".join(f"  {name}: {yaml_value(value)}\n" for name, value in CLUSTER.items())
    text = f"{CLUSTER_FILE}nodes: 2\nlauncher: slurm\nenv:\n{variables}"
    dry = ("run", "tiny-gpt", "--dry-run", "--cluster", cluster)
    cluster.write_text(text)
    for form in ((), ("--json",)):
        done = paceline(*dry, *form, runs=tmp_path, env=PROCESS)
        assert done.returncode == 0 and "#SBATCH" in done.stdout, done.stderr
        assert_clean(done.stdout + done.stderr, "dry run")
    cluster.write_text(f"{text}slurm:\n  container_image: {IMAGE}\n")
    done = paceline(*dry, runs=tmp_path, env=PROCESS)
    assert done.returncode == 1 and "container_image: contains what looks like" in done.stderr
    assert_clean(done.stdout + done.stderr, "image")


@pytest.mark.parametrize("packed", [False, True])
def test_an_imported_log_loses_its_secrets_and_nothing_else(tmp_path: Path, packed: bool):
    planted = "".join(f"{name}: {secret} and more\n" for name, secret in LOGGED.items())
    text = planted + LOG
    log = tmp_path / f"{LOGGED['hub']}.log{'.gz' * packed}"
    log.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    runs = tmp_path / "runs"
    facts = ("--model", "tiny-gpt", "--seq-len", 256, "--device", "H100", "--gpus", 8)
    done = paceline("runs", "import", log, *facts, runs=runs, env=PROCESS)
    assert done.returncode == 0 and "tokens/s" in done.stdout, done.stderr
    assert_clean(done.stdout + done.stderr, "streams")
    assert_clean_folder(runs)
    (copy,) = runs.glob("*/logs/*.log*")
    content = copy.read_bytes()
    kept = (gzip.decompress(content) if packed else content).decode()
    assert kept.endswith(LOG) and kept.count(" and more\n") == len(LOGGED)
    assert paceline("runs", "show", "last", runs=runs).returncode == 0


def test_a_log_of_one_endless_line_is_searched_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log_import, "BLOCK_BYTES", 1000)
    log = tmp_path / "train.log"
    log.write_text(f"step 1\n{'x' * 10_000}")
    blocks = list(log_import._blocks(log))
    assert "".join(blocks) == log.read_text() and max(map(len, blocks)) <= 2000
