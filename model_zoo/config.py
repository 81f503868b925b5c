"""ModelConfig: a model's shape, read from Hugging Face's config.json.  Needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_TYPES = ("qwen3", "qwen2", "llama", "mistral", "gpt2")
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
DTYPES = ("float32", "bfloat16", "float16")


class ModelError(ValueError):
    """The model's files cannot be served; the message names the file, the value and the remedy."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions and their scaling beyond the length the model was first trained at."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # tokens a sequence may have
    norm_eps: float
    tie_embeddings: bool
    eos_ids: tuple[int, ...]
    dtype: str  # of the weights
    rope: RopeConfig | None = None  # None: learned positions (GPT-2)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def read_config(directory: Path | str) -> ModelConfig:
    """Read and check `directory`/config.json (and generation_config.json for the end tokens).

    Raises ModelError for a missing file, an unsupported architecture or a value we cannot honour.
    """
    path = Path(directory) / "config.json"
    raw = _read_json(path)
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ModelError(
            f"{path}: model_type {model_type!r} is not supported: this version serves "
            f"{', '.join(MODEL_TYPES)}"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{path}: quantization_config ({method}) is not supported: use the model's "
            "unquantized bf16 or fp16 weights"
        )
    fields = _Fields(path, raw)
    eos_ids = _eos_ids(Path(directory), raw)
    return _gpt2(fields, eos_ids) if model_type == "gpt2" else _llama_like(fields, eos_ids)


class _Fields:
    """Typed access to config.json with errors that name file and field."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.path}: {name} is {value!r}: a positive integer is needed")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {name} is {value!r}: a number is needed")
        return float(value)

    def dtype(self) -> str:
        name = str(self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32")
        if name not in DTYPES:
            raise ModelError(f"{self.path}: dtype {name!r}: one of {', '.join(DTYPES)} is needed")
        return name


def _llama_like(fields: _Fields, eos_ids: tuple[int, ...]) -> ModelConfig:
    raw, model_type = fields.raw, str(fields.raw["model_type"])
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"{fields.path}: {heads} query heads are no multiple of {kv_heads} KV heads"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{fields.path}: hidden_act {raw['hidden_act']!r}: only silu is supported")
    rope = _rope(fields)
    return ModelConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", hidden // heads),
        max_position=_max_position(fields, rope),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        # The default differs between Llama's and Qwen's configuration classes, but both save it.
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_ids=eos_ids,
        dtype=fields.dtype(),
        rope=rope,
        qkv_bias=model_type == "qwen2" or bool(raw.get("attention_bias")),
        out_bias=model_type != "qwen2" and bool(raw.get("attention_bias")),
        mlp_bias=bool(raw.get("mlp_bias")),
        qk_norm=model_type == "qwen3",
    )


def _gpt2(fields: _Fields, eos_ids: tuple[int, ...]) -> ModelConfig:
    raw = fields.raw
    hidden, heads = fields.integer("n_embd"), fields.integer("n_head")
    for name, supported in (
        ("activation_function", "gelu_new"),
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
    ):
        if raw.get(name, supported) != supported:
            raise ModelError(f"{fields.path}: {name} {raw[name]!r}: only {supported!r} works")
    return ModelConfig(
        model_type="gpt2",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("n_inner", 4 * hidden),
        num_layers=fields.integer("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position=fields.integer("n_positions"),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=bool(raw.get("tie_word_embeddings", True)),
        eos_ids=eos_ids,
        dtype=fields.dtype(),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        activation="gelu_new",
    )


def _rope(fields: _Fields) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    raw = fields.raw
    scaling = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    inner = _Fields(fields.path, scaling)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"{fields.path}: rope type {kind!r} is not supported: one of {', '.join(ROPE_KINDS)}"
        )
    if raw.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{fields.path}: partial_rotary_factor must be 1.0")
    attention_factor = scaling.get("attention_factor")
    return RopeConfig(
        kind=kind,
        theta=inner.number("rope_theta", fields.number("rope_theta", 10000.0)),
        factor=inner.number("factor", 1.0),
        original_max_position=inner.integer(
            "original_max_position_embeddings", fields.integer("max_position_embeddings")
        ),
        low_freq_factor=inner.number("low_freq_factor", 1.0),
        high_freq_factor=inner.number("high_freq_factor", 4.0),
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=inner.number("mscale", 0.0),
        mscale_all_dim=inner.number("mscale_all_dim", 0.0),
        truncate=bool(scaling.get("truncate", True)),
    )


def _max_position(fields: _Fields, rope: RopeConfig) -> int:
    """The longest sequence on which we compute what the model's authors computed.

    Linear and yarn scaling stretch the trained length by their factor.  Dynamic scaling changes
    all positions' angles as a sequence grows, which keys in a cache cannot follow: it is served up
    to the trained length, where it scales nothing.  A sliding window narrower than the model's
    length is served up to the window, where it hides nothing.
    """
    limit = fields.integer("max_position_embeddings")
    if rope.kind == "linear":
        limit = int(limit * rope.factor)
    elif rope.kind == "yarn":
        limit = max(limit, int(rope.original_max_position * rope.factor))
    raw = fields.raw
    window = raw.get("sliding_window")
    if window and raw.get("use_sliding_window", raw["model_type"] == "mistral"):
        limit = min(limit, int(window))
    return limit


def _eos_ids(directory: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """All ids that end a text, the generation config's first."""
    path = directory / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    ids: list[int] = []
    for value in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path}: no such file: give a directory that holds config.json, "
            "*.safetensors and tokenizer.json"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is needed")
    return value
