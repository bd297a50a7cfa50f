"""Models of the Hugging Face Hub as recipes: exact sizes, notes, defaults, caches and refusals."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
from math import log
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import IncompleteError, UserError
from paceline.core.shape import DecoderShape, num_parameters
from paceline.files.hf_config import NAMES, STRUCTURES, shape_of_config
from paceline.files.hf_hub import cached_config, hub_config
from paceline.files.recipe import load_recipe, recipe_names, recipe_path, recipe_yaml
from tests.files.published_models import MODELS, yarn

LLAMA = MODELS["meta-llama/Llama-3.1-8B"][0]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the machine's own caches and the network out of the tests."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write(folder: Path, config: Any, name: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(config))
    return folder / name


def notes_of(changes: dict[str, Any], base: dict[str, Any] = LLAMA) -> str:
    return "\n".join(shape_of_config({**base, **changes}, "config.json").notes)


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_exactly_its_parameters(name: str):
    config, published = MODELS[name]
    shape = shape_of_config(config, name)
    assert (
        num_parameters(DecoderShape.model_validate(shape.model)) + shape.num_uncounted == published
    )
    assert bool(shape.num_uncounted) == any("parameters" in note for note in shape.notes)


@pytest.mark.parametrize("name", MODELS)
def test_every_field_of_a_published_model_is_read(name: str):
    assert not any("not read" in note for note in shape_of_config(MODELS[name][0], name).notes)


def test_fields_that_nothing_reads_are_named_of_a_known_family_too():
    assert "not read: num_memory_slots" in notes_of({"num_memory_slots": 16})
    many = notes_of({f"num_parts_{number}": 1 for number in range(10)})
    assert "num_parts_7 and 2 more" in many


def test_fields_without_an_effect_on_size_or_work_are_not_named():
    usual = {
        "_name_or_path": "x",
        "attention_dropout": 0.1,
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
        "initializer_range": 0.02,
        "max_window_layers": 28,
        "pretraining_tp": 1,
        "quantization_config": {"quant_method": "fp8"},
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0",
        "use_cache": True,
    }
    assert "not read" not in notes_of(usual)


def test_the_default_configuration_of_every_known_family_is_read():
    transformers = pytest.importorskip("transformers")
    for family in STRUCTURES:
        try:
            config = transformers.AutoConfig.for_model(family).to_dict()
        except ValueError:  # a family outside transformers
            continue
        notes = shape_of_config(config, family).notes
        assert not [note for note in notes if "not read" in note], family


def test_a_shipped_recipe_has_the_shape_of_its_model():
    for recipe, model in (
        ("llama31-8b", "meta-llama/Llama-3.1-8B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("phi4-mini", "microsoft/Phi-4-mini"),
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("gpt-oss-120b", "openai/gpt-oss-120b"),
    ):
        fields = shape_of_config(MODELS[model][0], model).model
        shape = DecoderShape.model_validate(fields)
        assert num_parameters(shape) == num_parameters(load_recipe(recipe).model)
        if "gpt-oss" in recipe:
            assert shape == load_recipe(recipe).model


def test_a_deepseek_v3_is_read_with_its_router_and_yarn():
    config, _ = MODELS["deepseek-ai/DeepSeek-V3"]
    scaled = shape_of_config(config, "config.json").model
    plain = shape_of_config({**config, "rope_scaling": None}, "config.json").model
    recipe = load_recipe("deepseek-v3").model.model_dump(mode="json", exclude_defaults=True)

    del recipe["mtp_layers"]
    assert {**plain, "max_positions": 4096} == recipe
    factors = {name: value for name, value in scaled.items() if plain.get(name) != value}
    assert factors == {
        "rope_scaling_factor": 40.0,
        "rope_original_positions": 4096,
        # Scores of heads of width 192 are multiplied by (0.1 ln(40) + 1)^2.
        "query_pre_attn_scalar": pytest.approx(192 / (0.1 * log(40) + 1) ** 4),
    }


@pytest.mark.parametrize(
    "scaling",
    [
        yarn(1, 40),
        {**yarn(32, 40), "truncate": False},
        {**yarn(32, 40), "mscale": "1"},
        {**yarn(32, 40), "mscale_all_dim": 1e300},
        {**yarn(32, 40), "attention_factor": 1.1},
    ],
)
def test_yarn_of_a_deepseek_v3_that_a_shape_cannot_express_is_a_note(scaling: dict[str, Any]):
    config, _ = MODELS["deepseek-ai/DeepSeek-V3"]
    assert "(yarn) is left out" in notes_of({"rope_scaling": scaling}, config)


def test_an_unknown_family_is_read_like_a_llama_and_says_so():
    notes = notes_of({"model_type": "newest", "moe_layer_start": 3, "ssm_state": 16})
    assert "model_type newest is unknown and read like a Llama" in notes
    assert "not read: moe_layer_start, ssm_state" in notes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "scaling of rotary positions (yarn)"),
        ({"attn_logit_softcapping": 50.0}, "soft-capping"),
        ({"hidden_act": "xielu"}, "activation xielu is read as gelu"),
        ({"alibi": True}, "ALiBi positions are read as rotary ones"),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2},
            "some layers have no experts",
        ),
        (
            {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 16},
            "in an order that the shape reads as every 2th layer",
        ),
    ],
)
def test_what_a_shape_cannot_express_is_a_note(changes: dict[str, Any], words: str):
    assert words in notes_of(changes)


def test_the_language_model_of_a_multimodal_one_is_counted():
    text, published = MODELS["google/gemma-3-1b"]
    config = {"model_type": "gemma3", "vision_config": {"hidden_size": 8}, "text_config": text}
    shape = shape_of_config(config, "config.json")
    assert num_parameters(DecoderShape.model_validate(shape.model)) == published
    assert "only the language model (text_config) is counted" in shape.notes[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "mamba", "num_hidden_layers": 24, "hidden_size": 768, "vocab_size": 99},
            r"model_type mamba cannot be read as a decoder: it lacks num_heads .*; ffn_size",
        ),
        ({**LLAMA, "model_type": "bert"}, "model_type bert is not a decoder"),
        ({**LLAMA, "is_encoder_decoder": True}, "is not a decoder"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads or .* is 0"),
        ({**LLAMA, "num_attention_heads": "many"}, "is many"),
        ({**LLAMA, "intermediate_size": [1, 2]}, r"is \[1, 2\]"),
        ({**LLAMA, "num_attention_heads": 7}, "hidden_size 4096 is not a multiple of num_heads 7"),
    ],
)
def test_a_model_that_is_no_decoder_is_refused_with_what_is_missing(
    config: dict[str, Any], words: str, tmp_path: Path
):
    with pytest.raises(UserError, match=words):
        load_recipe(str(write(tmp_path / "model", config)))


def test_a_config_its_folder_and_its_hub_name_are_one_recipe(tmp_path: Path):
    path = write(tmp_path / "Llama-3.1-8B", LLAMA)
    commit = "0" * 40
    hub = tmp_path / "cache" / "huggingface" / "hub" / "models--meta-llama--Llama-3.1-8B"
    write(hub / "snapshots" / commit, LLAMA)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(commit)
    names = [str(path), str(path.parent), "meta-llama/Llama-3.1-8B"]
    recipes = [load_recipe(name) for name in names]
    assert recipes[0] == recipes[1] == recipes[2]
    assert recipes[0].name == "Llama-3.1-8B" and recipes[0].training.seq_len == 8192


def test_assumptions_are_stated_until_they_are_set(tmp_path: Path):
    name = str(write(tmp_path / "mine", LLAMA))
    (note,) = [note for note in load_recipe(name).notes if "assumed" in note]
    assert "sequences of 8,192 tokens" in note and "ZeRO stage 1" in note and "Adam" in note
    changes = ("training.seq_len=1024", "training.global_batch=64", "layout.zero_stage=3")
    changed = load_recipe(name, overrides=changes)
    (note,) = [note for note in changed.notes if "assumed" in note]
    assert changed.layout.zero_stage == 3 and "tokens" not in note and "sequences" not in note


def test_a_recipe_of_a_shape_alone_is_enough(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    shape = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_size": 128, "vocab_size": 512}
    path.write_text(json.dumps({"model": shape}))
    recipe = load_recipe(str(path))
    assert (recipe.name, recipe.title, recipe.training.batch_per_device) == ("mine", "mine", 16)
    assert "sequences of 2,048 tokens" in recipe.notes[0] and "ZeRO" not in recipe.notes[0]


def test_a_written_recipe_is_the_same_model(tmp_path: Path):
    for name in ("deepseek-ai/DeepSeek-V3", "google/gemma-3-1b", "openai/gpt-oss-20b"):
        path = str(write(tmp_path / name, MODELS[name][0]))
        written = tmp_path / "mine.yaml"
        written.write_text(recipe_yaml(path))
        again, first = load_recipe(str(written)), load_recipe(path)
        assert (again.model, again.training, again.layout) == (
            first.model,
            first.training,
            first.layout,
        )
        assert set(again.notes) <= set(first.notes)


def test_a_shipped_name_wins_over_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny-llama", LLAMA)
    assert recipe_path("tiny-llama").suffix == ".yaml" and "tiny-llama" in recipe_names()


def test_a_model_that_is_not_cached_needs_the_network():
    with pytest.raises(IncompleteError, match="HF_HUB_OFFLINE forbids the network; pass the path"):
        load_recipe("meta-llama/Llama-3.1-8B")


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean 'llama31-8b' or "):
        load_recipe("llama3-8b")


class TestDownload:
    """The hub itself, without its library."""

    @pytest.fixture(autouse=True)
    def online(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setenv("HF_TOKEN", "of-the-user")

    def test_a_download_is_kept(self, monkeypatch: pytest.MonkeyPatch):
        requests: list[urllib.request.Request] = []

        def opened(request: urllib.request.Request, timeout: float) -> io.BytesIO:
            requests.append(request)
            return io.BytesIO(json.dumps(LLAMA).encode())

        monkeypatch.setattr(urllib.request, "urlopen", opened)
        first, second = hub_config("a/b"), hub_config("a/b")
        assert first == second == cached_config("a/b") and len(requests) == 1
        assert requests[0].full_url == "https://huggingface.co/a/b/resolve/main/config.json"
        assert requests[0].get_header("Authorization") == "Bearer of-the-user"
        assert load_recipe("a/b").name == "b"

    @pytest.mark.parametrize(
        ("status", "words"),
        [
            (401, "is gated, private or does not exist .* set HF_TOKEN"),
            (403, "is gated"),
            (404, "has no config.json on https://huggingface.co"),
            (503, "https://huggingface.co cannot be reached"),
            (None, "https://huggingface.co cannot be reached; pass the path of its config.json"),
        ],
    )
    def test_a_refusal_says_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch, status: int | None, words: str
    ):
        def refused(request: urllib.request.Request, timeout: float) -> None:
            if status is None:
                raise urllib.error.URLError("Name or service not known")
            raise urllib.error.HTTPError(request.full_url, status, "no", None, None)  # type: ignore[arg-type]

        monkeypatch.setattr(urllib.request, "urlopen", refused)
        with pytest.raises((UserError, IncompleteError), match=words):
            hub_config("a/b")


def test_no_name_stands_for_two_fields():
    names = [name for field, names in NAMES.items() for name in names]
    assert len(names) == len(set(names))
