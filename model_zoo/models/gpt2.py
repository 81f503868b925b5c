"""GPT-2: learned positions, LayerNorm, no rope; its weights are stored as [in, out]."""

from __future__ import annotations

from torch import Tensor, nn

from model_zoo.config import ModelConfig
from model_zoo.inputs import ModelInput
from model_zoo.layers.attention import Attention
from model_zoo.layers.embedding import Embedding
from model_zoo.layers.linear import Linear
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.mlp import MLP
from model_zoo.layers.norm import LayerNorm
from model_zoo.model import Model, Weights


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, linears: LinearFactory) -> None:
        super().__init__()
        name, hidden, inner = f"transformer.h.{index}", config.hidden_size, config.intermediate_size

        def column(part: str, *blocks: int) -> Linear:
            whole = f"{name}.{part}"
            return linears.column(
                hidden, {whole: sum(blocks)}, bias=True, transposed=True, blocks={whole: blocks}
            )

        def row(part: str, inputs: int) -> Linear:
            return linears.row(inputs, {f"{name}.{part}": hidden}, bias=True, transposed=True)

        heads = config.num_heads * config.head_dim
        self.attention_norm = LayerNorm(hidden, config.norm_eps, linears.dtype)
        self.attention = Attention(
            config,
            index,
            qkv=column("attn.c_attn", heads, heads, heads),
            out=row("attn.c_proj", heads),
        )
        self.mlp_norm = LayerNorm(hidden, config.norm_eps, linears.dtype)
        self.mlp = MLP(column("mlp.c_fc", inner), row("mlp.c_proj", inner))

    def forward(
        self, x: Tensor, residual: Tensor, inp: ModelInput, logit_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x, the norm of residual, and residual [T, hidden] -> (MLP output, residual).

        logit_rows: as for Attention.add.
        """
        mixed = self.attention.out(self.attention.mix(x, inp, None, logit_rows))
        if logit_rows is not None:
            residual = residual.index_select(0, logit_rows)
        x, residual = self.mlp_norm.add(mixed, residual)
        return self.mlp(x), residual


class GPT2(Model):
    EMBEDDING = "transformer.wte.weight"
    norm: LayerNorm

    def __init__(self, config: ModelConfig, linears: LinearFactory) -> None:
        super().__init__(config, linears, Layer, LayerNorm)
        self.position = Embedding(config.max_position, config.hidden_size, linears.dtype)

    def forward(self, inp: ModelInput) -> Tensor:
        residual = self.embedding(inp.tokens) + self.position(inp.positions)
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        x = norms[0](residual)
        for layer, norm in zip(self.layers, norms[1:], strict=True):
            logit_rows = inp.ends if layer is self.layers[-1] else None
            x, residual = norm.add(*layer(x, residual, inp, logit_rows))
        return x

    def other_weights(self) -> Weights:
        table: Weights = {
            "transformer.wte.weight": self.embedding.weight,
            "transformer.wpe.weight": self.position.weight,
            "transformer.ln_f.weight": self.norm.weight,
            "transformer.ln_f.bias": self.norm.bias,
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            name = f"transformer.h.{index}"
            for part, norm in (("ln_1", layer.attention_norm), ("ln_2", layer.mlp_norm)):
                table[f"{name}.{part}.weight"] = norm.weight
                table[f"{name}.{part}.bias"] = norm.bias
        return table
