"""Runs of programs that fail and print as the two forks of DeepSpeed-Chat were seen to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paceline.core.run_report import RunReport
from paceline.machines.placement import Request
from paceline.runs import flow
from paceline.runs.plan import make_plan

LISTS = Path(__file__).parents[1] / "engines" / "deepspeed_chat_options.json"
COMMON = """
import os, sys
OPTIONS = {options}
words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]

def value(name):
    return words[words.index(name) + 1]

unknown = [word for word in words if word.startswith("--") and word not in OPTIONS]
if unknown:
    sys.exit("error: unrecognized arguments: " + " ".join(unknown))
if "Dahoas/rm-static" not in value("--data_path"):
    raise RuntimeError("no configuration for dataset " + value("--data_path"))
if os.environ["PATH"].split(":")[0] != os.path.dirname(sys.executable):
    raise RuntimeError("Ninja is required to load C++ extensions")
os.makedirs(value("--data_output_path"), exist_ok=True)
first = os.environ["RANK"] == "0"
"""
LAMBDA = (
    """
import os
os.environ["CACHE"] = os.getenv("PROJECT_PATH") + "/.cache/huggingface/transformers"
os.environ["PATH"] += ":/home/" + os.getenv("USER") + "/.local/bin/"
"""
    + COMMON
    + """
model = "models--" + value("--model_name_or_path").replace("/", "--")
if not os.path.isdir(os.environ["CACHE"] + "/" + model):
    raise OSError("couldn't find the model in the cached files")
steps = int(value("--num_warmup_steps")) + int(value("--max_steps"))
for _ in range(steps):
    print("[Rank 0] time (ms) | fwd: 30.00 | bwd: 60.00 | bwd_inner: 59.00 | step: 10.00")
print(f"Execution time: 0.5000 seconds for {{value('--max_steps')}} steps")
print(f"Throughput: {{8 * int(value('--max_steps')) / 0.5:.4f}} samples/sec")
"""
)
DEEPSPEEDAI = (
    "import dschat\n"
    + COMMON
    + """
if os.path.exists(value("--data_path")):
    if not os.path.isfile(value("--data_path") + "/dataset_dict.json"):
        raise FileNotFoundError("neither a `Dataset` directory nor a `DatasetDict` directory")
for _ in range(12 * first):
    print("Model Parameters: 0.003 B, Latency: 0.17s, TFLOPs: 0.01, Samples/sec: 48.48, "
          "Time/seq 0.02s, Batch Size: 8, Sequence Length: 128")
"""
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "Dahoas" / "rm-static"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        (folder / f"{part}.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')
    return folder


def run(tmp_path: Path, data: Path, repository: str, program: str, devices: int) -> RunReport:
    real = json.loads(LISTS.read_text())[repository]
    main = tmp_path / "checkout" / real["program"]
    main.parent.mkdir(parents=True)
    main.write_text(program.format(options=list(real["options"])))
    modules = main.parents[2] / "dschat"
    modules.mkdir()
    (modules / "__init__.py").write_text("")
    (tmp_path / "hub" / "models--paceline--opt-350m-sft-tiny").mkdir(parents=True)
    cluster = tmp_path / "cluster.yaml"
    is_lambda = program is LAMBDA
    device = "V100-SXM2-16GB" if is_lambda else "cpu"
    cluster.write_text(
        f"name: here\ndevice: {device}\ndevices_per_node: {devices}\nnodes: 1\nlauncher: local\n"
        f"python: {sys.executable}\n"
        f"env: {{TMPDIR: {tmp_path}, HF_HUB_CACHE: {tmp_path / 'hub'}}}\n"
    )
    changes = [
        *("training.steps=5", "training.lr_schedule.warmup=2"),
        *(f"engine_settings.program={main}", f"engine_settings.data={data}"),
        "training.dtype=" + ("fp16" if is_lambda else "bf16"),
    ]
    request = Request(
        "opt-350m-sft-tiny", "deepspeed-chat", cluster=str(cluster), overrides=tuple(changes)
    )
    return flow.run(make_plan(request), tmp_path / "runs", ["x"], lambda _: None, probe=False)


def test_a_program_like_lambdas_starts_and_gives_its_throughput_and_every_step(
    tmp_path: Path, data: Path
):
    result = run(tmp_path, data, "LambdaLabsML/DeepSpeedExamples@7770cec", LAMBDA, 1).result
    assert result.status == "ok", (result.reason, result.log_tail)
    assert (result.steps_done, result.steps_requested) == (7, 7)
    assert result.metrics["samples_per_s"].value == pytest.approx(80.0)


def test_a_program_like_deepspeedais_starts_and_its_rate_is_that_of_all_devices(
    tmp_path: Path, data: Path
):
    pytest.importorskip("datasets")
    repository = "deepspeedai/DeepSpeedExamples@45b4b71"
    result = run(tmp_path, data, repository, DEEPSPEEDAI, 2).result
    assert result.status == "ok", (result.reason, result.log_tail)
    assert (result.steps_done, result.steps_requested) == (12, 0)
    assert result.metrics["samples_per_s"].value == pytest.approx(2 * 48.48)
