"""read_config: the ModelConfig of a Hugging Face config.json.  Imports no torch."""

from __future__ import annotations

from pathlib import Path

from model_zoo.families.gemma import read_gemma
from model_zoo.families.glm4_moe import read_glm4_moe
from model_zoo.families.gpt_oss import read_gpt_oss
from model_zoo.families.model_config import (
    ModelConfig,
    check_head,
    read_dtype,
    read_eos_ids,
    read_heads,
    windows_of,
)
from model_zoo.families.qwen3_5 import MODEL_TYPES as QWEN3_5
from model_zoo.families.qwen3_5 import read_qwen3_5
from model_zoo.families.qwen3_vl import MODEL_TYPES as QWEN3_VL
from model_zoo.families.qwen3_vl import read_qwen3_vl
from model_zoo.json_fields import Fields, ModelError, UnsupportedModel
from model_zoo.moe_config import read_moe
from model_zoo.rope_config import RopeConfig, read_rope

__all__ = ["ModelConfig", "ModelError", "RopeConfig", "read_config"]

GEMMA = ("gemma2", "gemma3", "gemma3_text")
MODEL_TYPES = (
    *GEMMA,
    "glm4_moe",
    "gpt2",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    *QWEN3_5,
    "qwen3_moe",
    *QWEN3_VL,
)
# The published files of gpt-oss do not say theirs.
DEFAULT_DTYPES = {"gpt_oss": "bfloat16"}
# Of transformers, where config.json has no such field.
DEFAULT_WINDOW, DEFAULT_MAX_WINDOW_LAYERS = 4096, 28


def read_config(directory: Path | str, *, images: bool = True) -> ModelConfig:
    """The config of the model in `directory`.  Raises ModelError with file, field and remedy.

    images: False: of its text model alone
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist: give a directory that holds config.json, *.safetensors and "
            "tokenizer.json of a model, as its Hugging Face repository does"
        )
    fields = Fields.read(path)
    if fields.get("model_type") not in (*MODEL_TYPES, None):
        raise UnsupportedModel(fields, MODEL_TYPES)
    model_type = fields.choice("model_type", MODEL_TYPES)
    check_head(fields)
    default = DEFAULT_DTYPES.get(model_type, "float32")
    config = read_as(fields, model_type, read_dtype(fields, default=default))
    return config if images else config.without_vision()


def read_as(fields: Fields, model_type: str, dtype: str) -> ModelConfig:
    """The fields as a model of this type has them.  Raises ModelError."""
    if model_type in GEMMA:
        return read_gemma(fields, model_type)
    if model_type in QWEN3_5:
        return read_qwen3_5(fields, model_type)
    if model_type in QWEN3_VL:
        return read_qwen3_vl(fields, model_type, _llama_family)
    if model_type == "gpt2":
        return _gpt2(fields, dtype)
    if model_type == "gpt_oss":
        return read_gpt_oss(fields, dtype)
    if model_type == "glm4_moe":
        return read_glm4_moe(fields, dtype)
    return _llama_family(fields, model_type, dtype)


def _llama_family(fields: Fields, model_type: str, dtype: str) -> ModelConfig:
    """llama, mistral, qwen2, qwen3, and those of them with experts: one block, with and without
    biases and q/k norms."""
    hidden_size = fields.integer("hidden_size")
    heads = read_heads(fields)
    fields.choice("hidden_act", ("silu",), "silu")
    attention_bias = False
    if model_type in ("llama", "qwen3", "qwen3_moe"):
        attention_bias = fields.flag("attention_bias", False)
    rope, max_position = read_rope(fields, fields.integer("max_position_embeddings"))
    if model_type == "qwen2_moe":
        qkv_bias = fields.flag("qkv_bias", True)
    else:
        qkv_bias = attention_bias or model_type == "qwen2"
    vocab_size = fields.integer("vocab_size")
    num_layers = fields.integer("num_hidden_layers")
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        out_bias=attention_bias,
        mlp_bias=model_type == "llama" and fields.flag("mlp_bias", False),
        eos_ids=read_eos_ids(fields, vocab_size),
        moe=read_moe(fields, model_type, num_layers),
        dtype=dtype,
        windows=_windows(fields, model_type, num_layers),
    )


def _gpt2(fields: Fields, dtype: str) -> ModelConfig:
    hidden_size = fields.integer("n_embd")
    num_heads = fields.integer("n_head")
    if hidden_size % num_heads:
        raise fields.error("n_head", num_heads, f"a divisor of n_embd {hidden_size} is expected")
    fields.refuse("scale_attn_weights", "only true is supported", allowed=(None, True))
    fields.refuse("scale_attn_by_inverse_layer_idx", "only false is supported")
    fields.refuse("add_cross_attention", "only false is supported")
    # Two names of one function: the approximation by tanh.
    fields.choice("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        model_type="gpt2",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("n_inner", 4 * hidden_size),
        num_layers=fields.integer("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position=fields.integer("n_positions"),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        qk_norm=False,
        rope=None,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        eos_ids=read_eos_ids(fields, vocab_size),
        dtype=dtype,
    )


def _windows(fields: Fields, model_type: str, num_layers: int) -> tuple[int, ...]:
    """ModelConfig.windows of the llama family, as transformers reads these fields."""
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list):
        return windows_of(fields, layer_types, num_layers)
    window, first = _sliding_window(fields, model_type)
    if window is None or first >= num_layers:
        return ()
    return (0,) * first + (window,) * (num_layers - first)


def _sliding_window(fields: Fields, model_type: str) -> tuple[int | None, int]:
    """The window, or None, and the first layer that has it."""
    if model_type == "mistral":
        default = None if "sliding_window" in fields.values else DEFAULT_WINDOW
        return fields.integer("sliding_window", default), 0
    if model_type == "mixtral":
        return fields.integer("sliding_window", None), 0
    if not fields.flag("use_sliding_window", False):
        return None, 0
    return fields.integer("sliding_window", DEFAULT_WINDOW), _max_window_layers(fields)


def _max_window_layers(fields: Fields) -> int:
    """The number of layers without the window, at the front; it may be 0."""
    value = fields.get("max_window_layers")
    if value is None:
        return DEFAULT_MAX_WINDOW_LAYERS
    return 0 if value == 0 else fields.integer("max_window_layers")
