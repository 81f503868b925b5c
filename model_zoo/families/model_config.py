"""ModelConfig: the shape of a model, and what is read alike of every family.  Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from attention.spec import AttentionSpec
from model_zoo.families.delta_net_config import DeltaNetConfig
from model_zoo.json_fields import Fields
from model_zoo.moe_config import MoEConfig
from model_zoo.parallel.shard import WHOLE, Shard
from model_zoo.rope_config import RopeConfig
from model_zoo.vision.vision_config import VisionConfig

VISION_WEIGHTS = "model.visual."  # what names of the weights of an image encoder begin with
DTYPES = ("float32", "bfloat16", "float16")
# Names of classes with a language head, or with none but its embeddings: Qwen3Model, and neither
# Qwen2ForRewardModel nor Qwen2ForProcessRewardModel.
HEADS = re.compile(r".*(ForCausalLM|ForConditionalGeneration|LMHeadModel)|((?!For|Reward).)*Model")


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
    max_position: int  # longest sequence that is computed exactly
    norm_eps: float
    rope: RopeConfig | None  # None: learned positions
    tie_embeddings: bool  # the output projection is the input embedding
    qkv_bias: bool
    out_bias: bool  # of the projection after attention
    mlp_bias: bool
    qk_norm: bool  # RMSNorm of each head's query and key
    eos_ids: tuple[int, ...]
    moe: MoEConfig | None = None  # None: every layer has one MLP
    dtype: str  # of the weights on disk: "float32" | "bfloat16" | "float16"
    windows: tuple[int, ...] = ()  # sliding window of each layer, 0: none; (): no layer has one
    attention_scale: float = 0.0  # of the logits; 0: head_dim**-0.5
    attention_softcap: float = 0.0  # as AttentionSpec.softcap
    attention_sinks: bool = False
    local_rope: RopeConfig | None = None  # of the layers with a window; None: `rope`, as all
    fits_float16: bool = True  # activations stay within its range
    norm_plus_one: bool = False  # RMSNorms multiply by their weight + 1
    embedding_scale: float = 1.0  # multiplies embeddings, but not a tied head
    logit_softcap: float = 0.0  # final logits become cap * tanh(logit / cap); 0: unchanged
    attention_gate: bool = (
        False  # attention's output is multiplied by a sigmoid, as Attention.gated
    )
    delta_net: DeltaNetConfig | None = None  # None: every layer has attention
    text_part: bool = False  # config.json is of a model that sees images, too
    skipped_weights: tuple[str, ...] = ()  # of the checkpoint, by the beginning of their names
    # After the last layer: layers that predict further tokens, which are not loaded.
    prediction_layers: int = 0
    vision: VisionConfig | None = None  # the image encoder; None: it reads text alone
    # Of one of the ranks that share a model: which one it is, and the model that is divided.  Heads
    # and inner sizes above are those of the rank then.
    shard: Shard = WHOLE
    whole: ModelConfig | None = None

    def without_vision(self) -> ModelConfig:
        """Of the text model alone, where there is an image encoder."""
        if self.vision is None:
            return self
        rope = None if self.rope is None else replace(self.rope, sections=())
        skipped = (*self.skipped_weights, VISION_WEIGHTS)
        return replace(self, vision=None, text_part=True, skipped_weights=skipped, rope=rope)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The attention of each of `attention_layers`."""
        return tuple(
            AttentionSpec(
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.attention_scale or self.head_dim**-0.5,
                window=window,
                softcap=self.attention_softcap,
                has_sinks=self.attention_sinks,
            )
            for window in self.windows or (0,) * len(self.attention_layers)
        )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values, in order."""
        others = () if self.delta_net is None else self.delta_net.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return 2 * len(self.attention_layers) * self.num_kv_heads * self.head_dim * dtype_bytes

    @property
    def mlp_values(self) -> int:
        """Values of a token that an MLP, or a layer's experts, keep in memory at their peak."""
        experts = 0 if self.moe is None else self.moe.token_values(self.hidden_size)
        return max(3 * self.intermediate_size, experts)


def check_head(fields: Fields) -> None:
    """A classifier or reward model has the weights of a chat model but no language head."""
    names = fields.get("architectures") or []
    if names and not any(HEADS.fullmatch(str(name)) for name in names):
        raise fields.error(
            "architectures",
            names,
            "a causal language model is expected: reward models and classifiers are not supported",
        )


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_heads(fields: Fields, head_dim: int | None = None) -> Heads:
    """head_dim: where the fields say none; None: hidden_size / num_attention_heads"""
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    head_dim = fields.integer("head_dim", head_dim or fields.integer("hidden_size") // num_heads)
    assert head_dim is not None
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads is expected"
        )
    if head_dim % 2 or not head_dim:  # 0 if there are more heads than hidden_size
        raise fields.error("head_dim", head_dim, "an even number above 0 is expected")
    return Heads(num_heads, num_kv_heads, head_dim)


def windows_of(
    fields: Fields, layer_types: list[object], num_layers: int, default: int | None = None
) -> tuple[int, ...]:
    """ModelConfig.windows of the kinds of all layers; default: of the window, None: it must be in
    the fields"""
    kinds = set(map(str, layer_types))
    if kinds - {"full_attention", "sliding_attention"}:
        raise fields.error(
            "layer_types", sorted(kinds), "supported: full_attention, sliding_attention"
        )
    if kinds == {"full_attention"}:
        return ()
    if len(layer_types) != num_layers:
        raise fields.error("layer_types", layer_types, f"{num_layers} layers are expected")
    name = "sliding_window"
    window = fields.integer(name) if default is None else fields.integer(name, default)
    return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)


def read_dtype(*places: Fields, default: str = "float32") -> str:
    """That of the first object which says one; default: none does"""
    for fields in places:
        for name in ("dtype", "torch_dtype"):
            value = fields.get(name)
            if value is None:
                continue
            if str(value).removeprefix("torch.") not in DTYPES:
                raise fields.error(name, value, "supported: " + ", ".join(DTYPES))
            return str(value).removeprefix("torch.")
    return default


def read_eos_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """All end-of-sequence ids: those of generation_config.json first."""
    generation = fields.path.with_name("generation_config.json")
    files = [Fields.read(generation), fields] if generation.is_file() else [fields]
    ids: list[int] = []
    for file in files:
        value: Any = file.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise file.error("eos_token_id", value, f"ids below {vocab_size} are expected")
            ids.append(token)
    return tuple(dict.fromkeys(ids))
