"""Information in Megatron's logs other than iterations."""

from __future__ import annotations

import pytest

from paceline.engines.log_reading.log_content import LogContent
from paceline.engines.log_reading.megatron_settings import MegatronSettings
from tests.engines.megatron_specs import record

MIB, GB = 2**20, 10**9


def settings(*pieces: bytes) -> LogContent:
    """What is said by a log that comes in these pieces."""
    log = LogContent()
    reader = MegatronSettings(log)
    for piece in pieces:
        reader.read(piece)
    reader.finish()
    return log


def dump(**arguments: object) -> bytes:
    """Arguments as Megatron prints them at its start."""
    lines = [f"  {name} {'.' * max(3, 48 - len(name))} {v}" for name, v in arguments.items()]
    return "\n".join(lines).encode() + b"\n"


def test_arguments_become_facts():
    text = dump(
        context_parallel_size=2,
        ffn_hidden_size=14336,
        global_batch_size=128,
        hidden_size=4096,
        log_interval=10,
        micro_batch_size=1,
        num_attention_heads=32,
        num_layers=32,
        padded_vocab_size=128256,
        pipeline_model_parallel_size=4,
        seq_length=8192,
        tensor_model_parallel_size=2,
        train_iters=500,
        world_size=64,
        expert_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=2,
    )
    assert settings(text).facts == {
        "cp": 2,
        "ffn_size": 14336,
        "global_batch": 128,
        "hidden_size": 4096,
        "log_interval": 10,
        "micro_batch": 1,
        "num_heads": 32,
        "num_layers": 32,
        "vocab_size": 128256,
        "pp": 4,
        "seq_len": 8192,
        "tp": 2,
        "total_steps": 500,
        "num_devices": 64,
        "ep": 1,
        "vp": 2,
    }


@pytest.mark.parametrize(
    "text",
    [
        dump(virtual_pipeline_model_parallel_size=None, train_iters="None", seq_length="9" * 40),
        dump(decoder_seq_length=77, encoder_num_layers=3, data_world_size=5),
        b"global_batch_size . 5\nworld_size: 7\n",
    ],
)
def test_what_is_no_number_or_another_argument_is_no_fact(text: bytes):
    assert settings(text).facts == {}


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"params_dtype": "torch.bfloat16", "fp8": None}, {"dtype": "bf16"}),
        ({"params_dtype": "torch.float16"}, {"dtype": "fp16"}),
        ({"params_dtype": "torch.bfloat16", "fp8": "hybrid"}, {"dtype": "fp8"}),
        ({"zero_stage": 1, "deepspeed": True}, {"zero_stage": 1}),
        ({"zero_stage": 1, "deepspeed": False}, {}),
        (
            {"num_attention_heads": 32, "group_query_attention": True, "num_query_groups": 8},
            {"num_heads": 32, "num_kv_heads": 8},
        ),
        (
            {"num_attention_heads": 32, "group_query_attention": False, "num_query_groups": 1},
            {"num_heads": 32, "num_kv_heads": 32},
        ),
        ({"num_attention_heads": 32}, {"num_heads": 32}),
    ],
)
def test_arguments_that_depend_on_each_other(
    arguments: dict[str, object], facts: dict[str, object]
):
    assert settings(dump(**arguments)).facts == facts


def test_older_names_count_where_the_usual_ones_are_missing():
    older = dump(pipe_parallel_size=4, train_batch_size=1024, model_parallel_size=2)
    assert settings(older).facts == {"tp": 2, "pp": 4, "global_batch": 1024}
    assert settings(dump(pipe_parallel_size=0)).facts == {"pp": 1}
    usual = dump(pipeline_model_parallel_size=8, global_batch_size=2048)
    assert settings(usual + older).facts == {"tp": 2, "pp": 8, "global_batch": 2048}


def test_a_line_of_arguments_a_piece_gives_the_same():
    text = dump(
        num_attention_heads=32, group_query_attention=True, num_query_groups=8, world_size=4
    )

    assert settings(*text.splitlines(True)).facts == settings(text).facts


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        (
            b"using world size: 64, data-parallel-size: 1, tensor-model-parallel size: 4, "
            b"pipeline-model-parallel size: 16 \n",
            {"num_devices": 64, "tp": 4, "pp": 16},
        ),
        (
            b"using world size: 8, data-parallel size: 2, context-parallel size: 2, hierarchical "
            b"context-parallel sizes: None, tensor-model-parallel size: 2, "
            b"encoder-tensor-model-parallel size: 0, pipeline-model-parallel size: 1\n",
            {"num_devices": 8, "cp": 2, "tp": 2, "pp": 1},
        ),
        (
            b" > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)\n",
            {"vocab_size": 50304},
        ),
        (b'    "train_micro_batch_size_per_gpu": 48, \n', {"micro_batch": 48}),
        (b"[INFO] [config.py:904:print]   train_micro_batch_size_per_gpu  4\n", {"micro_batch": 4}),
        (b"[config.py:1007:print]   train_micro_batch_size_per_gpu  2\n", {"micro_batch": 2}),
        (b"[config.py:1022:print]   world_size ................... 8\n", {"num_devices": 8}),
        (
            b"using world size: 4, data-parallel-size: 2, tensor-model-parallel size: 2, \n"
            b"[config.py:1022:print]   world_size ................... 2\n",
            {"num_devices": 4, "tp": 2},
        ),
    ],
)
def test_lines_of_the_start(line: bytes, facts: dict[str, int]):
    assert settings(line).facts == facts


RANKS = b" > number of parameters on (tensor, pipeline) model parallel rank (%d, %d): %d\n"
SINGLE = dump(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (SINGLE + RANKS % (0, 0, 124_475_904), 124_475_904),
        (dump(expert_model_parallel_size=2) + SINGLE + RANKS % (0, 0, 51_616), None),
        (RANKS % (0, 0, 124_475_904), None),
        (RANKS % (0, 0, 5) + RANKS % (0, 1, 6), None),
        (
            b"Total number of parameters in billions: 6.44\n"
            b"Number of parameters in most loaded shard in billions: 6.4367\n",
            6_436_700_000,
        ),
        (
            b"Total number of parameters in billions: 70.55\n"
            b"Number of parameters in most loaded shard in billions: 2.3456\n",
            70_550_000_000,
        ),
        (b"Total number of parameters in billions:  8.03\n", 8_030_000_000),
        (b"Number of parameters in most loaded shard in billions: 2.3456\n", None),
        (
            b"STAGE_PARAMS=8 (0.0M) TOTAL_PARAMS=13 (1M) UNIQUE_PARAMS=12862513152 (12862.513M)\n",
            12_862_513_152,
        ),
        (b"Total number of parameters in billions: 1.2.3\n", None),
    ],
)
def test_the_number_of_parameters_where_it_is_sure(text: bytes, number: int | None):
    assert settings(text).facts.get("num_parameters") == number


@pytest.mark.parametrize(
    ("arguments", "routing"),
    [
        ({"num_experts": 8, "moe_router_force_load_balancing": True, "load": "None"}, "forced"),
        (
            {"num_experts": 8, "moe_router_force_load_balancing": False, "load": "None"},
            "learned from scratch",
        ),
        ({"num_experts": 8, "moe_router_force_load_balancing": False, "load": "/weights"}, None),
        ({"num_experts": "None", "moe_router_force_load_balancing": False, "load": "None"}, None),
    ],
)
def test_the_choice_of_experts_where_it_is_sure(arguments: dict[str, object], routing: str | None):
    assert settings(dump(**arguments)).facts.get("routing") == routing


@pytest.mark.parametrize(
    ("line", "peaks"),
    [
        (
            b"[Rank 0] (after 20 iterations) memory (MB) | allocated: 48465.2 | max allocated: "
            b"75078.5 | reserved: 75682.0 | max reserved: 75684.0\n",
            {"allocated": 75078.5 * MIB, "reserved": 75684 * MIB},
        ),
        (
            b"after 1 iterations memory (MB) | allocated: 1.0 | max allocated: 26118.25 | "
            b"reserved: 3.0 | max reserved: 28560.0\n",
            {"allocated": 26118.25 * MIB, "reserved": 28560 * MIB},
        ),
        (
            b"[Rank 0] (after 1 iterations) memory (GB) | mem-allocated-gigabytes: 50.8 | "
            b"mem-reserved-gigabytes: 127.0 | mem-max-allocated-gigabytes: 116.5 | "
            b"mem-max-reserved-gigabytes: 127.25 | mem-alloc-retires: 0\n",
            {"allocated": 116.5 * GB, "reserved": 127.25 * GB},
        ),
        (b"host-mem-max-allocated-gigabytes: 5.0\n", {}),
        (b"Theoretical memory footprints: weight and optimizer=57438.81 MB\n", {}),
        (b"max allocated: 5.0 | max reserved: 6.0\n", {}),
    ],
)
def test_memory_lines(line: bytes, peaks: dict[str, float]):
    assert settings(line).memory_bytes == peaks


def test_the_largest_rank_counts():
    line = b"[Rank %d] (after 1 iterations) memory (MB) | max allocated: %d.0 | max reserved: 9.0\n"

    assert (
        settings(line % (0, 5), line % (1, 7) + line % (2, 6)).memory_bytes["allocated"] == 7 * MIB
    )


@pytest.mark.parametrize(
    "line",
    [
        b"[after training is done] datetime: 2026-03-27 23:13:36",
        b"[exiting program at iteration 100] datetime: 2021-06-10 20:47:51",
        b"[exiting program after 110.5 minutes] datetime: 2021-06-10 20:47:51",
    ],
)
def test_the_end_of_the_program(line: bytes):
    assert settings(record(1) + line + b" \n").end_line == line.decode()


def test_iterations_after_an_end_are_of_another_start():
    end = b"[exiting program at iteration 1] datetime: 2021-06-10 20:47:51\n"

    assert settings(record(1) + end, record(2)).end_line is None
    assert settings(record(1) + end + record(2)).end_line is None


@pytest.mark.parametrize(
    "line",
    [
        b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        b"RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
        b"RuntimeError: HIP out of memory. Tried",
        b"slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.",
        b"kernel: Out of memory: Killed process 5",
        b"terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_the_end_of_memory(line: bytes):
    log = settings(record(1), record(2) + b"[rank3]: " + line + b"\n")

    assert log.out_of_memory == f"[rank3]: {line.decode()}"


def test_iterations_after_the_end_of_memory_show_that_it_was_started_again():
    line = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"

    assert settings(record(1) + line, record(2)).out_of_memory is None
    assert settings(record(1) + line + record(2)).out_of_memory is None
    assert settings(record(1) + line, b"foo\n").out_of_memory is not None


def test_a_warning_of_memory_is_not_its_end():
    text = b"set this lest you run out of memory; room for zoom\n"

    assert settings(record(1) + text, record(2)).out_of_memory is None
