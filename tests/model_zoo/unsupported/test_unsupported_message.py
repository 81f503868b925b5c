"""What is said of a model that is not supported: the nearest one that is, and what differs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model_zoo.config import MODEL_TYPES, ModelConfig, ModelError, read_config
from model_zoo.unsupported.message import explained
from model_zoo.unsupported.tensor_names import names_of_type
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.models.unsupported_checkpoints import TEXTS, WITH_VISION, write_unsupported

MAX_LINES, MAX_CHARACTERS = 8, 900
LAYER = "model.layers.*."
FUSED = f"{LAYER}mlp.gate_up_proj.weight, {LAYER}self_attn.qkv_proj.weight"
SPLIT = LAYER + "self_attn.{k_proj,q_proj,v_proj}.weight"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("unsupported")
    return {kind: write_unsupported(kind, folder / kind) for kind in (*TEXTS, *WITH_VISION)}


def message(directory: Path) -> list[str]:
    """The lines of the error for the model in a directory."""
    with pytest.raises(ModelError) as caught:
        read_config(directory)
    lines = explained(caught.value).splitlines()
    assert lines[0].startswith(f"{directory}/config.json: `model_type` is ")
    assert lines[0].endswith(": supported: " + ", ".join(MODEL_TYPES))
    return [line.strip() for line in lines]


def write(directory: Path, **fields: object) -> Path:
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


# kind: the nearest type, and words of the message
EXPECTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "cohere": (
        "llama",
        ("`logit_scale` 0.0625", f"missing tensors of llama: {LAYER}post_attention_layernorm"),
    ),
    "falcon": ("llama", ("`multi_query` true", "none of these names: transformer.h.*.")),
    "gptj": ("gpt2", ("positions (`rotary_dim` 8)", "attn.{k_proj,out_proj,q_proj,v_proj}")),
    "gpt_neox": ("llama", ("`use_parallel_residual` true", '`hidden_act` "gelu"', "embed_out")),
    "granite": ("llama", ("`embedding_multiplier` 12.0", "llama has the same names")),
    "mamba": (
        "llama",
        ("state-space layers (`state_size` 16", "no `num_attention_heads`", "mixer.A_log"),
    ),
    "nemotron": ("llama", ('`hidden_act` "relu2"', "llama: model.layers.*.mlp.gate_proj.weight")),
    "olmo2": (
        "qwen3",
        (
            f"that qwen3 lacks: {LAYER}post_feedforward_layernorm.weight",
            f"missing tensors of qwen3: {LAYER}input_layernorm.weight",
        ),
    ),
    "olmoe": ("qwen3_moe", ("mixture of experts (no `moe_intermediate_size`)", "the same names")),
    "phi3": ("mistral", (f"that mistral lacks: {FUSED}", SPLIT)),
    "seed_oss": ("llama", (f"missing tensors of llama: {LAYER}self_attn.o_proj.bias",)),
    "smollm3": ("llama", ("layers of several kinds", "`no_rope_layers` [1, 1]")),
    "starcoder2": ("qwen2", ('`hidden_act` "gelu_pytorch_tanh"', LAYER + "mlp.{c_fc,c_proj}")),
    "olmo_hybrid": (
        "qwen3",
        ("linear attention (`linear_num_key_heads` 2", LAYER + "linear_attn.A_log"),
    ),
    "mistral3": ("mistral", ('"mistral")', "mistral has the same names", "text model alone")),
    "llava": ("llama", ('"llama")', "llama has the same names", "text model alone, a llama")),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_nearest_type_is_named_with_what_differs(checkpoints: dict[str, Path], kind: str):
    nearest, words = EXPECTED[kind]
    lines = message(checkpoints[kind])
    assert re.fullmatch(rf"nearest.*: {nearest}", lines[1])
    for each in words:
        assert each in " ".join(lines), lines


def test_the_message_fits_on_a_screen_and_ends_with_the_remedy(checkpoints: dict[str, Path]):
    for directory in checkpoints.values():
        lines = message(directory)
        assert len(lines) <= MAX_LINES and sum(map(len, lines)) <= MAX_CHARACTERS
        assert lines[-1].startswith("remedy: ")


def test_fields_that_no_forward_pass_reads_are_not_mentioned(tmp_path: Path):
    harmless: dict[str, Any] = {
        "pad_token_id": 3,
        "attention_dropout": 0.1,
        "resid_pdrop": 0.1,
        "initializer_range": 0.02,
        "use_cache": True,
        "transformers_version": "5.0.0",
        "auto_map": {"AutoConfig": "a.B"},
        "router_aux_loss_coef": 0.001,
        "num_nextn_predict_layers": 1,
        "temperature": 1.0,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "rope_interleave": False,
        "residual_multiplier": 1.0,
        "layers_block_type": None,
        "no_rope_layers": [],
        "torch_dtype": "float8_e4m3fn",
        "quantization_config": {"quant_method": "fp8"},
        "vision_feature_layer": -2,
    }
    write(tmp_path, **_LLAMA, model_type="other", **harmless)
    assert message(tmp_path)[2] == "config.json: no field that llama does not know"


_LLAMA: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"residual_multiplier": 0.5}, "scale factors (`residual_multiplier` 0.5)"),
        ({"rope_scaling": {"type": "longrope"}}, 'positions (`rope_scaling.type` "longrope")'),
        ({"intermediate_size": None}, "sizes (no `intermediate_size`)"),
        (
            {"layer_types": ["chunked"] * 9},
            'layers of several kinds (`layer_types` ["chunked", "chunked...)',
        ),
        ({"\x1b[2J\nkey": "\x1b[31m"}, r"other (`\u001b[2J\nkey` " + r'"\u001b[31m")'),
    ],
)
def test_fields_that_change_the_computation_are_shown_with_their_values(
    tmp_path: Path, fields: dict[str, object], words: str
):
    write(tmp_path, **{**_LLAMA, "model_type": "other", **fields})
    assert message(tmp_path)[2] == f"config.json differs in {words}"


def test_a_type_of_the_same_shape_can_be_renamed_and_is_then_read(tmp_path: Path):
    write_checkpoint("llama3", tmp_path)
    path = tmp_path / "config.json"
    llama = json.loads(path.read_text())
    path.write_text(json.dumps({**llama, "model_type": "our_llama"}))
    lines = message(tmp_path)
    assert lines[1:4] == [
        "nearest: llama",
        "config.json: no field that llama does not know",
        "tensors: llama has the same names",
    ]
    assert '`model_type` to "llama"' in lines[4]
    path.write_text(json.dumps({**llama, "model_type": "llama"}))
    assert read_config(tmp_path).model_type == "llama"


def test_without_tensors_the_message_says_that_they_were_not_compared(tmp_path: Path):
    lines = message(write(tmp_path, **_LLAMA, model_type="other"))
    assert lines[3] == "tensors: not compared, because no safetensors file can be read"
    assert "model of a supported type" in lines[4]


VALUES = ("", "text", -1, 0, 2**80, -0.5, float("nan"), True, [], [{}], {}, {"a": [1]}, [[None]])
KEYS = [
    *sorted({key for fields in (*TEXTS.values(), *WITH_VISION.values()) for key in fields}),
    *("model_type", "layer_types", "rope_scaling", "rope_parameters", "rope_theta", "hidden_act"),
    *("eos_token_id", "torch_dtype", "architectures", "tie_word_embeddings", "rms_norm_eps"),
    *("sliding_window", "use_sliding_window", "attention_bias", "n_inner", "num_experts", ""),
]


@pytest.fixture(scope="module")
def names_once() -> Iterator[None]:
    """The tensors of a config, which it alone decides, are listed once: of most values they are
    those without the value."""
    known: dict[str, frozenset[str]] = {}

    def names(config: ModelConfig) -> frozenset[str]:
        key = repr(config)
        if key not in known:
            known[key] = names_of_type(config)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model_zoo.unsupported.nearest.names_of_type", names)
        yield


@pytest.mark.usefixtures("names_once")
@pytest.mark.parametrize("key", KEYS)
def test_wrong_values_make_no_other_error(tmp_path: Path, key: str):
    stored = {"model.layers.0.self_attn.q_proj.weight": "a.safetensors", "\x07": "a", "": "a"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": stored}))
    for value in VALUES:
        write(tmp_path, **{**_LLAMA, "model_type": "other", key: value})
        lines = message(tmp_path)
        assert len(lines) <= MAX_LINES and sum(map(len, lines)) <= MAX_CHARACTERS
        assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("text", [{}, [], "text", {"model_type": 5}, {"text_config": {}}, None])
def test_a_text_config_that_is_none_makes_no_other_error(tmp_path: Path, text: object):
    assert message(write(tmp_path, model_type="other", text_config=text))[-1].startswith("remedy")
