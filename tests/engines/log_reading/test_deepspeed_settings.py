"""Settings of a DeepSpeed log: from the command line, the hostfile and the configuration dumps."""

from __future__ import annotations

import pytest

from paceline.engines.log_reading.deepspeed_settings import DeepSpeedSettings, model_name
from paceline.engines.log_reading.log_content import Fact, LogContent


def facts(text: str) -> dict[str, Fact]:
    """Settings of a text, which must be the same line by line."""
    at_once, parts = DeepSpeedSettings(), DeepSpeedSettings()
    at_once.read(text.encode())
    for line in text.encode().splitlines(keepends=True):
        parts.read(line)
    logs = LogContent(), LogContent()
    at_once.keep(logs[0])
    parts.keep(logs[1])
    assert logs[0].facts == logs[1].facts
    return logs[0].facts


@pytest.mark.parametrize(
    "words",
    [
        "--max_seq_len '512' --per_device_train_batch_size '24'",
        "'--max_seq_len' '512' '--per_device_train_batch_size' '24'",
        "'--max_seq_len', '512', '--per_device_train_batch_size', '24'",
    ],
)
def test_the_quotes_of_pdsh_belong_to_no_value(words: str):
    assert facts(f"cmd = pdsh -f 1024 -w a,b python main.py {words}; \n") == {
        "seq_len": 512,
        "micro_batch": 24,
    }


def test_the_launch_command_states_the_workload():
    command = (
        "[INFO] [runner.py:568:main] cmd = python -u main.py --data_path a/b --model_name_or_path "
        "facebook/opt-350m --per_device_train_batch_size 24 --max_seq_len 512 --zero_stage 2 "
        "--gradient_accumulation_steps=4 --dtype bf16 --deepspeed\n"
    )

    assert facts(command) == {
        "model": "facebook/opt-350m",
        "micro_batch": 24,
        "seq_len": 512,
        "zero_stage": 2,
        "gradient_accumulation": 4,
        "dtype": "bf16",
    }


def test_the_command_of_a_spawned_process_is_quoted():
    command = (
        "with command: ['python', '--max_seq_len', '256', '--per_device_train_batch_size', '8']\n"
    )

    assert facts(command) == {"seq_len": 256, "micro_batch": 8}


def test_prompt_and_answer_make_a_sequence_and_the_actor_is_the_model():
    command = (
        "cmd = main.py --actor_model_name_or_path a/actor --critic_model_name_or_path a/critic "
        "--max_answer_seq_len 256 --max_prompt_seq_len 128 --actor_zero_stage 3 "
        "--critic_zero_stage 1\n"
    )

    assert facts(command) == {"model": "a/actor", "seq_len": 384, "zero_stage": 3}


def test_the_batch_follows_from_its_factors_or_is_stated():
    factors = (
        "--per_device_train_batch_size 24 --gradient_accumulation_steps 2\n"
        "[INFO] [launch.py:164:main] dist_world_size=16\n"
    )

    assert facts(factors)["global_batch"] == 768
    assert facts(factors + '    "train_batch_size": 384, \n')["global_batch"] == 384


def test_a_dump_writes_thousands_with_an_exponent():
    dump = '"train_batch_size": 1.024000e+03, \n"max_train_batch_size": 7, \n"stage": 1, \n'

    assert facts(dump) == {"global_batch": 1024, "zero_stage": 1}


def test_the_first_dump_is_the_trained_models():
    assert facts('"stage": 3, \n' + '"stage": 0, \n')["zero_stage"] == 3


def test_the_printed_configuration_is_read():
    printed = (
        "[INFO] [config.py:988:print]   bfloat16_enabled ............. True\n"
        "[INFO] [config.py:988:print]   fp16_enabled ................. False\n"
        "[INFO] [config.py:988:print]   train_batch_size ............. 64\n"
        "[INFO] [config.py:988:print]   train_micro_batch_size_per_gpu  4\n"
        "[INFO] [config.py:988:print]   world_size ................... 8\n"
        "[INFO] [config.py:988:print]   zero_optimization_stage ...... 3\n"
    )

    assert facts(printed) == {
        "dtype": "bfloat16",
        "global_batch": 64,
        "micro_batch": 4,
        "num_devices": 8,
        "zero_stage": 3,
    }


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("Creating fp16 optimizer with dynamic loss scale", "fp16"),
        ("Creating torch.float16 ZeRO stage 3 optimizer", "float16"),
        ("Creating BF16 optimizer", "bf16"),
    ],
)
def test_the_optimizer_tells_the_number_format(line: str, dtype: str):
    assert facts(f"[INFO] [logging.py:96:log_dist] [Rank 0] {line}\n")["dtype"] == dtype


def test_a_hostfile_counts_devices_where_the_launcher_does_not():
    hosts = "node-001 slots=8\r\nnode-002 slots=4\nnode-001 slots=8\n# node-003 slots=8\n"

    assert facts(hosts) == {"num_devices": 12}
    assert facts(hosts + "dist_world_size=16\n") == {"num_devices": 16}


def test_the_version_is_deepspeeds():
    assert facts("DeepSpeed info: version=0.14.4, git-hash=unknown\n") == {
        "framework_version": "0.14.4"
    }


@pytest.mark.parametrize("value", ["0", "1e400", "nan", "-4", "2.5", "x", "9" * 300])
def test_a_value_that_is_no_count_is_left_out(value: str):
    assert facts(f"--max_seq_len {value} --per_device_train_batch_size {value}\n") == {}


def test_a_model_in_the_hubs_cache_is_called_by_its_name():
    assert model_name("/x/models--facebook--opt-13b/snapshots/e515") == "facebook/opt-13b"
    assert model_name("facebook/opt-13b") == "facebook/opt-13b"
