"""Megatron-LM's command line in both spellings, our program on Megatron-Core, and refusals."""

from __future__ import annotations

import importlib
import json
from importlib import resources
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.core.training import RampUp, Training
from paceline.engines import engine
from paceline.engines.megatron.arguments import samples_of
from tests.engines.megatron_specs import Settings, settings, started, study
from tests.example import make_spec

PLAIN = "model.embedding_norm=false"


def lm(folder: Path, *changes: str, variant: str | None = None) -> RunSpec:
    return study(folder, PLAIN, *changes, variant=variant, name="megatron")


def llama(folder: Path, *changes: str) -> RunSpec:
    return study(folder, *changes, name="megatron", recipe="llama31-8b")


def test_a_llama_has_its_own_shape(tmp_path: Path):
    told = started(llama(tmp_path, "layout.tp=2", "layout.sequence_parallel=true"))
    assert told["--num-query-groups"] == ("8",) and "--group-query-attention" in told
    assert told["--normalization"] == ("RMSNorm",) and "--swiglu" in told
    assert told["--position-embedding-type"] == ("rope",)
    assert told["--rotary-base"] == ("500000",)
    assert {"--disable-bias-linear", "--untie-embeddings-and-output-weights"} <= set(told)
    assert "--sequence-parallel" in told and told["--tensor-model-parallel-size"] == ("2",)


def test_deepseek_has_its_own_shape(tmp_path: Path):
    told = started(study(tmp_path, "layout.ep=8", name="megatron", recipe="deepseek-v3"))
    latent = {"q-lora-rank": 1536, "kv-lora-rank": 512, "qk-head-dim": 128, "v-head-dim": 128}
    sizes = {**latent, "qk-pos-emb-head-dim": 64, "mtp-num-layers": 1, "num-experts": 256}
    widths = {"ffn-hidden-size": 18432, "moe-ffn-hidden-size": 2048}
    for name, value in {**sizes, **widths, "moe-shared-expert-intermediate-size": 2048}.items():
        assert told[f"--{name}"] == (str(value),)
    assert told["--moe-layer-freq"] == ("([0]*3+[1]*58)",) and told["--rope-type"] == ("rope",)
    assert {"--multi-latent-attention", "--qk-layernorm", "--no-rope-fusion"} <= set(told)


def test_forced_routing_is_an_argument_and_of_models_with_experts_only(tmp_path: Path):
    def mixtral(*changes: str) -> dict[str, tuple[str, ...]]:
        layout = "layout={ep: 4, zero_stage: 1}"
        return started(study(tmp_path, layout, *changes, name="megatron", recipe="mixtral-8x7b"))

    told = mixtral("training.routing=forced")
    assert told["--num-experts"] == ("8",) and told["--moe-router-topk"] == ("2",)
    assert told["--moe-router-dtype"] == ("fp32",) and "--moe-grouped-gemm" in told
    assert set(told) - set(mixtral()) == {"--moe-router-force-load-balancing"}
    with pytest.raises(UserError, match=r"training\.routing forced needs a model with experts"):
        llama(tmp_path, "training.routing=forced")
    for pattern, problem in {
        "pattern:1,2,3": "3 weights do not divide 8 experts",
        "pattern:9,1,1,1,1,1,1,1": "weight 9 of one expert is more than 8",
        "pattern:0,0": "use whole numbers up to 999",
        "balanced": "must be learned, forced or pattern:",
    }.items():
        with pytest.raises(UserError, match=problem):
            mixtral(f"training.routing={pattern}")


def test_stages_are_cut_as_the_layout_counts_them(tmp_path: Path):
    per_chunk = "--num-layers-per-virtual-pipeline-stage"
    ends = {"--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"}
    even = started(llama(tmp_path, "layout.pp=4", "layout.vp=2"))
    assert even[per_chunk] == ("4",) and not ends & set(even)
    large = {"name": "megatron", "recipe": "llama31-405b"}
    told = started(study(tmp_path, "layout={pp: 8, vp: 8, zero_stage: 1}", **large))
    assert told[per_chunk] == ("2",) and ends <= set(told), "126 layers as 128"
    deepseek = {"name": "megatron", "recipe": "deepseek-v3"}
    cut = "layout={pp: 8, vp: 4, zero_stage: 1}"
    told = started(study(tmp_path, cut, "global_batch=512", **deepseek))
    assert told["--pipeline-model-parallel-layout"] == ("Et|(t*2|)*30mL",)
    assert per_chunk not in told and not ends & set(told)
    cut = "layout={pp: 4, ep: 2, zero_stage: 1}"
    told = started(study(tmp_path, cut, "global_batch=512", **deepseek))
    assert told["--pipeline-model-parallel-layout"] == ("Et*15|(t*16|)*2t*14mL",)


@pytest.mark.parametrize("kind", ["cosine", "constant"])
def test_a_training_that_ends_within_its_warm_up_decays_behind_it(tmp_path: Path, kind: str):
    schedule = f"training.lr_schedule={{kind: {kind}, warmup: 100}}"
    told = started(llama(tmp_path, schedule, "steps=50"))
    assert told["--lr-warmup-iters"] == ("100",) and told["--lr-decay-iters"] == ("101",)
    told = started(llama(tmp_path, schedule, "steps=200"))
    assert told.get("--lr-decay-iters") == (("200",) if kind == "cosine" else None)


def test_the_null_tokenizer_adds_the_last_of_the_vocabulary(tmp_path: Path):
    told = started(lm(tmp_path))
    assert told["--tokenizer-type"] == ("NullTokenizer",) and told["--vocab-size"] == ("50256",)
    assert told["--data-path"] == (str(tmp_path / "pile_text_document"),)


def test_synthetic_tokens_are_its_mock_data(tmp_path: Path):
    told = started(lm(tmp_path, "data.source=synthetic"))
    assert "--mock-data" in told and "--data-path" not in told


def test_the_axes_of_a_layout(tmp_path: Path):
    layout = "layout={tp: 2, pp: 2, vp: 3, cp: 2, cp_exchange: ring, zero_stage: 1}"
    told = started(lm(tmp_path, layout, "model.attention_dropout=0"))
    assert told["--num-layers-per-virtual-pipeline-stage"] == ("4",)
    assert told["--context-parallel-size"] == ("2",) and told["--cp-comm-type"] == ("p2p",)
    assert "--use-distributed-optimizer" in told and "--use-megatron-fsdp" not in told


@pytest.mark.parametrize(("stage", "shards"), [(2, "optim_grads"), (3, "optim_grads_params")])
def test_zero_2_and_3_are_megatron_fsdp(tmp_path: Path, stage: int, shards: str):
    spec = lm(tmp_path, f"layout.zero_stage={stage}")
    told = started(spec)
    assert told["--data-parallel-sharding-strategy"] == (shards,) and "--use-megatron-fsdp" in told
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in engine("megatron").job(spec, "x").env


def test_exchanges_wait_behind_one_queue_of_kernels(tmp_path: Path):
    job = engine("megatron").job(lm(tmp_path), "x")
    assert job.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_without_fusions_those_that_need_other_packages_are_off(tmp_path: Path):
    told = started(lm(tmp_path, "engine_settings.fusions=false", "model.positions=rope"))
    parts = ("rope", "gradient-accumulation", "masked-softmax")
    assert {f"--no-{part}-fusion" for part in parts} | {"--no-persist-layer-norm"} < set(told)
    assert not any(name.startswith("--no-") for name in started(lm(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        (("model.vocab_multiple=1", "model.vocab_size=501"), 501),
        (("model.vocab_multiple=1", "model.vocab_size=501", "layout.tp=2"), 502),
        (("model.vocab_multiple=128", "model.vocab_size=513"), 640),
        (("model.vocab_multiple=128", "model.vocab_size=512"), 512),
    ],
)
def test_the_vocabulary_is_the_same_whether_its_end_counts_or_not(
    tmp_path: Path, changes: tuple[str, ...], size: int
):
    spec = lm(tmp_path, "data={source: synthetic}", *changes)
    told = started(spec)
    (asked,), (divisor,) = told["--vocab-size"], told["--make-vocab-size-divisible-by"]
    multiple = int(divisor) * spec.layout.tp
    assert [-(-n // multiple) * multiple for n in (int(asked), int(asked) + 1)] == [size, size]


def test_recomputation_by_granularity(tmp_path: Path):
    full, selective = (
        started(lm(tmp_path, f"layout.recompute={kind}")) for kind in ("full", "selective")
    )
    assert full["--recompute-granularity"] == ("full",)
    assert full["--recompute-method"] == ("uniform",) and full["--recompute-num-layers"] == ("1",)
    assert selective["--recompute-granularity"] == ("selective",)
    assert "--recompute-method" not in selective


def test_the_loss_scale_of_fp16(tmp_path: Path):
    told = started(lm(tmp_path))
    assert told["--initial-loss-scale"] == ("4096.0",) and told["--loss-scale-window"] == ("500",)
    assert told["--hysteresis"] == ("2",) and "--fp16" in told


def test_fp8_is_computed_by_transformer_engine(tmp_path: Path):
    told = started(lm(tmp_path, "training.dtype=mxfp8"))
    assert "--bf16" in told and told["--fp8-recipe"] == ("mxfp8",)


def test_a_growing_batch_in_the_old_spelling_and_in_the_new(tmp_path: Path):
    ramp = "training.ramp_up={start: 128, increment: 128, samples: 3000}"
    old = started(lm(tmp_path, ramp, "steps=50"))
    new = started(lm(tmp_path, ramp, "steps=50", "engine_settings.spelling=new"))
    assert old["--rampup-batch-size"] == ("128", "128", "3000")
    assert old["--global-batch-size"] == ("512",)
    schedule = f"0:128 {1000 * 2048}:256 {2000 * 2048}:384 {3000 * 2048}:512"
    assert new["--step-batch-size-schedule"] == (schedule,)
    assert "--global-batch-size" not in new and "--rampup-batch-size" not in new


def test_a_checkout_that_does_nothing_by_the_old_spelling_is_told_from_others(tmp_path: Path):
    file = tmp_path / "megatron" / "core" / "num_microbatches_calculator.py"
    file.parent.mkdir(parents=True)
    ramp = "training.ramp_up={start: 128, increment: 128, samples: 3000}"
    there = f'engine_settings.checkout="{tmp_path}"'

    def problems(*more: str) -> list[str]:
        return engine("megatron").unsupported(lm(tmp_path, there, *more))

    file.write_text("class RampupBatchsizeNumMicroBatchesCalculator: ...")
    assert problems(ramp) == []
    file.write_text("'rampup_batch_size is deprecated'")
    assert "use engine_settings.spelling=new" in problems(ramp, "engine_settings.spelling=old")[0]
    assert problems(ramp) == problems(ramp, "engine_settings.spelling=new") == problems() == []


def batches_of_megatron(told: Settings) -> list[int]:
    """Global batch of each step, as the calculator for --rampup-batch-size computes it."""
    full, to_train = int(told["--global-batch-size"][0]), int(told["--train-samples"][0])
    start, increment, samples = map(int, told.get("--rampup-batch-size", (full, 1, 0)))
    per_increment = samples / max(1, (full - start) // increment)
    consumed, steps = 0, list[int]()
    while consumed <= samples and start < full:
        growth = int(consumed / per_increment) * increment
        steps.append(full if consumed > samples else start + growth)
        consumed += steps[-1]
    return [*steps, *[full] * ((to_train - consumed) // full)]


@pytest.mark.parametrize("steps", [1, 20, 4167, 4168, 6250, 6251, 6252, 14000, 14833, 15000])
def test_a_training_that_ends_within_its_ramp_up_takes_the_same_steps(
    tmp_path: Path, steps: int
) -> None:
    spec = lm(tmp_path, f"steps={steps}", variant="ramp-up")
    told = started(spec)
    training = spec.training
    counts = [samples_of(training.model_copy(update={"steps": n})) for n in range(steps + 1)]
    assert batches_of_megatron(told) == [b - a for a, b in pairwise(counts)]
    assert "--exit-interval" not in told, "BigScience's fork would save a checkpoint"


def test_deepspeeds_batch_is_the_last_one_that_is_reached(tmp_path: Path) -> None:
    spec = study(tmp_path, "steps=20", variant="ramp-up")
    told, job = started(spec), engine("megatron_deepspeed").job(spec, "x")
    assert told["--global-batch-size"] == ("32",) and "--rampup-batch-size" not in told
    assert json.loads(job.files["ds_config.json"])["train_batch_size"] == 32
    assert told["--train-samples"] == (str(20 * 32),)


def test_samples_of_a_ramp_up() -> None:
    training = Training(
        seq_len=32,
        global_batch=16,
        steps=5,
        dtype="fp32",
        ramp_up=RampUp(start=4, increment=4, samples=48),
    )
    assert samples_of(training) == 4 * 4 + 8
    assert samples_of(training.model_copy(update={"steps": 12})) == 16 + 16 + 24 + 4 * 16


def test_our_program_starts_where_no_checkout_is_named():
    spec = make_spec(engine="megatron", layout=Layout(micro_batch=4, tp=2))
    job = engine("megatron").job(spec, "x")
    words = job.program[job.program.index("core_program.py") + 1 :]
    assert engine("megatron").unsupported(spec) == []
    assert settings(words)["--text"] == ("stdlib",) and "--mock-data" not in words
    assert {"core_program.py", "core_arguments_program.py", "core_model_program.py"} <= set(
        job.files
    )
    assert "PACELINE_WORKING_FOLDER" not in job.env


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("model.activation=silu",), "use gelu, or silu with a gate"),
        (("engine_settings.spelling=odd",), "must be old or new"),
        (("engine_settings.fusions=odd",), "fusions odd must be true or false"),
        (("engine_settings.vocab_file=/v.json",), "belong together: set both, or neither"),
        (("engine_settings.merge_file=/m.txt",), "belong together: set both, or neither"),
        (
            ("engine_settings.vocab_file=v.json", "engine_settings.merge_file=/m.txt"),
            "engine_settings.vocab_file v.json must be an absolute path",
        ),
        (("data.path=tokens.u16",), "must be the .bin file of an indexed data set"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, changes: tuple[str, ...], says: str):
    problems = engine("megatron").unsupported(lm(tmp_path, *changes))
    assert any(says in problem for problem in problems)


def test_a_setting_of_null_is_none_at_all():
    absent = dict.fromkeys(("checkout", "spelling", "vocab_file", "transformer_impl"))
    layout = Layout(micro_batch=4, tp=2)
    spec = make_spec(engine="megatron", layout=layout, engine_settings=absent)
    assert engine("megatron").unsupported(spec) == []
    assert "core_program.py" in engine("megatron").job(spec, "x").program
    assert "None" not in engine("megatron").job(spec, "x").program
    unfit = spec.model_copy(update={"layout": Layout(cp=2)})
    assert any(
        "set engine_settings.checkout to a checkout of Megatron-LM" in what
        for what in engine("megatron").unsupported(unfit)
    )


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("layout.tp=2", "training.dtype=bf16", "engine_settings.overlap=true"),
        ("data.source=synthetic", "layout.recompute=none", "layout.pp=2"),
        ("training.ramp_up={start: 32, increment: 32, samples: 2000000}",),
        ("model.gated_ffn=true", "model.activation=silu", "model.num_kv_heads=4"),
        ("training.lr_schedule={kind: constant}", "model.norm=rmsnorm", "model.positions=rope"),
    ],
)
def test_our_program_takes_every_argument_that_it_is_given(
    tmp_path: Path, changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    named = study(tmp_path, *changes, name="megatron")
    own = {name: value for name, value in named.engine_settings.items() if name != "checkout"}
    spec = named.model_copy(update={"engine_settings": own})
    assert engine("megatron").unsupported(spec) == []
    program = engine("megatron").job(spec, "x").program
    words = program[program.index("core_program.py") + 1 :]
    monkeypatch.syspath_prepend(str(resources.files("paceline.engines.megatron")))
    monkeypatch.setattr("sys.argv", ["core_program.py", *words])
    arguments = importlib.import_module("core_arguments_program").parse_arguments()

    tp = spec.layout.tp
    assert arguments.padded_vocab_size == spec.model.padded_vocab(tp)  # type: ignore[union-attr]
    steps = arguments.train_iters or arguments.exit_interval or arguments.iterations_of_samples
    assert steps == spec.training.steps


def test_a_folder_without_the_program_is_missing(tmp_path: Path):
    spec = make_spec(engine="megatron", engine_settings={"checkout": str(tmp_path)})
    assert (engine("megatron").missing(spec) or "").startswith(str(tmp_path / "pretrain_gpt.py"))
