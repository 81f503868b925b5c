"""Reads config.json of Gemma 2 and Gemma 3.  Imports no torch.

transformers leaves out what has the class's default, and the published files of Gemma 3 do, too:
most fields have a default here.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_zoo.families.model_config import ModelConfig, read_dtype, read_eos_ids
from model_zoo.json_fields import Fields
from model_zoo.rope_config import RopeConfig, read_layer_ropes, read_rope

KINDS = ("full_attention", "sliding_attention")
DEFAULT_WINDOW, DEFAULT_SCALAR = 4096, 256


@dataclass(frozen=True, slots=True)
class Defaults:
    """Of the fields that the two generations differ in."""

    vocab_size: int
    max_position: int
    pattern: int  # every so manieth layer has no window
    attention_softcap: float
    logit_softcap: float


GEMMA_2 = Defaults(256_000, 8192, 2, 50.0, 30.0)
GEMMA_3 = Defaults(262_208, 131_072, 6, 0.0, 0.0)
THETA, LOCAL_THETA = 1e6, 1e4  # of Gemma 3


def read_gemma(outer: Fields, model_type: str) -> ModelConfig:
    """outer: config.json, which nests the text model in `text_config` if it sees images too."""
    fields = outer.nested("text_config") if model_type == "gemma3" else outer
    defaults = GEMMA_2 if model_type == "gemma2" else GEMMA_3
    if model_type == "gemma3" and outer.get("text_config") is None:
        raise outer.error("text_config", None, "an object with the fields of the text model")
    hidden_size = fields.integer("hidden_size", 2304)
    num_heads = fields.integer("num_attention_heads", 8)
    num_kv_heads = fields.integer("num_key_value_heads", 4)
    head_dim = fields.integer("head_dim", 256)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads is expected"
        )
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "an even number is expected")
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    fields.refuse("use_bidirectional_attention", "only causal attention is supported")
    attention_bias = fields.flag("attention_bias", False)
    num_layers = fields.integer("num_hidden_layers", 26)
    vocab_size = fields.integer("vocab_size", defaults.vocab_size)
    max_position = fields.integer("max_position_embeddings", defaults.max_position)
    rope, local_rope, max_position = _ropes(fields, model_type, max_position)
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 9216),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        tie_embeddings=fields.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", True)),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=False,
        qk_norm=model_type != "gemma2",
        text_part=fields is not outer,
        fits_float16=False,
        norm_plus_one=True,
        embedding_scale=hidden_size**0.5,
        eos_ids=tuple(
            dict.fromkeys(read_eos_ids(outer, vocab_size) + read_eos_ids(fields, vocab_size))
        ),
        dtype=read_dtype(outer, fields),
        windows=_windows(fields, num_layers, defaults.pattern),
        attention_scale=fields.number("query_pre_attn_scalar", DEFAULT_SCALAR) ** -0.5,
        attention_softcap=_softcap(fields, "attn_logit_softcapping", defaults.attention_softcap),
        logit_softcap=_softcap(fields, "final_logit_softcapping", defaults.logit_softcap),
    )


def _ropes(
    fields: Fields, model_type: str, max_position: int
) -> tuple[RopeConfig, RopeConfig | None, int]:
    """-> rope, local rope, longest sequence.

    That of Gemma 3 is `max_position_embeddings`, which counts the factor of its rope already.
    """
    if model_type == "gemma2":
        rope, max_position = read_rope(fields, max_position)
        return rope, None, max_position
    rope, local = read_layer_ropes(fields, max_position, theta=THETA, local_theta=LOCAL_THETA)
    return rope, local, max_position


def _windows(fields: Fields, num_layers: int, pattern: int) -> tuple[int, ...]:
    """ModelConfig.windows: by `layer_types`, or by the pattern that older files say."""
    kinds = fields.get("layer_types")
    if kinds is None:
        for name in ("sliding_window_pattern", "_sliding_window_pattern"):
            pattern = fields.integer(name, pattern)
        kinds = [KINDS[bool((layer + 1) % pattern)] for layer in range(num_layers)]
    if not isinstance(kinds, list) or set(map(str, kinds)) - set(KINDS):
        raise fields.error("layer_types", kinds, f"a list of {' and '.join(KINDS)} is expected")
    if len(kinds) != num_layers:
        raise fields.error("layer_types", kinds, f"{num_layers} layers are expected")
    if KINDS[1] not in kinds:
        return ()
    window = fields.integer("sliding_window", DEFAULT_WINDOW)
    return tuple(window if kind == KINDS[1] else 0 for kind in kinds)


def _softcap(fields: Fields, name: str, default: float) -> float:
    """0 where the field is null; absent: the default."""
    return fields.number(name, 0.0 if name in fields.values else default)
