"""DeltaNetConfig: the gated delta nets of a model, read from config.json.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from model_zoo.json_fields import Fields

HEAD_DIM, CONV_WIDTH = 128, 4  # what the kernels compute
KINDS = ("full_attention", "linear_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """The layers that keep a recurrent state of each sequence in the place of keys and values.

    layers       indices of these layers; the others have attention
    key_heads    of queries and keys; each serves value_heads / key_heads value heads in order
    fused        the checkpoint has two tensors of input projections, by key head (Qwen3-Next)
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int = HEAD_DIM
    value_dim: int = HEAD_DIM
    conv_width: int = CONV_WIDTH
    fused: bool = False

    @property
    def keys_size(self) -> int:
        """Values of a token's queries, and of its keys."""
        return self.key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys_size + self.values_size

    def state_bytes(self, state_itemsize: int, conv_itemsize: int) -> int:
        """Bytes of a sequence's state in all layers."""
        matrix = self.value_heads * self.key_dim * self.value_dim * state_itemsize
        conv = self.conv_width * self.conv_dim * conv_itemsize
        return len(self.layers) * (matrix + conv)


def read_delta_net(fields: Fields, num_layers: int, *, fused: bool) -> DeltaNetConfig | None:
    """None: every layer has attention.  Raises ModelError, naming the field."""
    layers = tuple(
        index for index, kind in enumerate(_layer_types(fields, num_layers)) if kind == KINDS[1]
    )
    if not layers:
        return None
    key_heads = fields.integer("linear_num_key_heads", 16)
    value_heads = fields.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise fields.error(
            "linear_num_value_heads",
            value_heads,
            f"a multiple of the {key_heads} of `linear_num_key_heads` is expected",
        )
    for name, only in (
        ("linear_key_head_dim", HEAD_DIM),
        ("linear_value_head_dim", HEAD_DIM),
        ("linear_conv_kernel_dim", CONV_WIDTH),
    ):
        if fields.integer(name, only) != only:
            raise fields.error(name, fields.get(name), f"only {only} is supported")
    return DeltaNetConfig(layers=layers, key_heads=key_heads, value_heads=value_heads, fused=fused)


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    """The kind of each layer: of `layer_types`, or every `full_attention_interval`-th has
    attention."""
    kinds = fields.get("layer_types")
    if kinds is None:
        interval = fields.integer("full_attention_interval", 4)
        return [KINDS[bool((layer + 1) % interval)] for layer in range(num_layers)]
    if not isinstance(kinds, list) or set(map(str, kinds)) - set(KINDS):
        raise fields.error("layer_types", kinds, f"a list of {' and '.join(KINDS)} is expected")
    if len(kinds) != num_layers:
        raise fields.error("layer_types", kinds, f"{num_layers} layers are expected")
    if KINDS[0] not in kinds:
        raise fields.error("layer_types", kinds, "at least one full_attention is expected")
    return kinds
