"""The attention block of all models: qkv projection, rope, KV write, attention, output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_zoo.config import ModelConfig
from model_zoo.inputs import ModelInput
from model_zoo.layers import fused_kernels
from model_zoo.layers.all_reduce.partial_sum import Addend
from model_zoo.layers.linear import Linear
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.normed_rows import NormOutput
from model_zoo.layers.quantized_rows import UnscaledRows
from model_zoo.layers.rope import rotate
from model_zoo.parallel.shard import Part


class Attention(nn.Module):
    """Attention with a fused qkv projection.

    index  of the layer among those with attention: in `config.attention_specs` and the KV pool
    sinks  [heads] float32 if its spec has them: a weight of the checkpoint
    gated  the qkv projection has a gate after each head's query, of its size
    """

    def __init__(self, config: ModelConfig, index: int, qkv: Linear, out: Linear) -> None:
        super().__init__()
        self.index, self._shard = index, config.shard
        self._name = f"model.layers.{config.attention_layers[index]}.self_attn"
        self.spec = config.attention_specs[index]
        self.qkv, self.out = qkv, out
        self.gated = config.attention_gate
        qkv.may_leave_scales, out.after_attention = not self.gated, True
        self.sinks: nn.Parameter | None = None
        if self.spec.has_sinks:
            sinks = torch.empty(self.spec.heads, dtype=torch.float32)
            self.sinks = nn.Parameter(sinks, requires_grad=False)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(
                    self.spec.head_dim,
                    config.norm_eps,
                    qkv.dtype,
                    plus_one=config.norm_plus_one,
                )
                for _ in range(2)
            )

    def other_parts(self) -> dict[str, Part | None]:
        """As Model.other_parts."""
        if self.sinks is None:
            return {}
        return {f"{self._name}.sinks": self._shard.part("outputs", (self.spec.heads,))}

    def add(
        self,
        x: NormOutput,
        residual: Tensor,
        inp: ModelInput,
        cos_sin: Tensor | None,
        logit_rows: Tensor | None = None,
    ) -> tuple[Addend | None, Tensor]:
        """x, residual [T, hidden] -> (output or None, residual), as Linear.add.

        cos_sin     of this layer's Rope; None: no rope
        logit_rows  [R] int64, the last token of each row, to which both results are reduced
        """
        mixed = self.mix(x, inp, cos_sin, logit_rows)
        if logit_rows is not None:
            residual = residual.index_select(0, logit_rows)
        return self.out.add(mixed, residual)

    def mix(
        self,
        x: NormOutput,
        inp: ModelInput,
        cos_sin: Tensor | None,
        logit_rows: Tensor | None = None,
    ) -> Tensor:
        """x [T, hidden] -> [T, heads * head_dim], before the output projection; as `add`."""
        qkv, meta = self.qkv(x) if self.gated else self.qkv.unscaled(x), inp.meta
        q = self._prepare(qkv, inp, cos_sin)
        if logit_rows is not None:
            q = q.index_select(0, logit_rows)
            # Of a row's tokens only the last is in this plan, the keys of the others are written: a
            # planner's kernel starts after all before it.
            meta = inp.backend.plan(meta.of_last_tokens(), inp.kv)
        mixed = inp.backend.attend(
            q,
            inp.kv.layers[self.index],
            meta,
            scale=self.spec.scale,
            window=self.spec.window,
            softcap=self.spec.softcap,
            sinks=self.sinks,
        )
        if self.gated:
            assert isinstance(qkv, Tensor)
            return self._gate(mixed, qkv, logit_rows).flatten(1)
        return mixed.flatten(1)

    def _queries(self, qkv: Tensor) -> Tensor:
        """[T, heads, head_dim] of a projection, or with gates [T, heads, 2 * head_dim]."""
        size = self.spec.heads * self.spec.head_dim * (1 + self.gated)
        return qkv[:, :size].unflatten(1, (self.spec.heads, -1))

    def _gate(self, mixed: Tensor, qkv: Tensor, logit_rows: Tensor | None) -> Tensor:
        """mixed [R, heads, head_dim] times the sigmoid of the gates."""
        gates = self._queries(qkv)[..., self.spec.head_dim :]
        if fused_kernels.use_fused_kernels(qkv.device):
            from model_zoo.layers.kernels.sigmoid_mul import sigmoid_mul

            return sigmoid_mul(mixed, gates, logit_rows)
        if logit_rows is not None:
            gates = gates.index_select(0, logit_rows)
        return (mixed.float() * gates.float().sigmoid()).to(mixed.dtype)

    def _prepare(
        self, qkv: Tensor | UnscaledRows, inp: ModelInput, cos_sin: Tensor | None
    ) -> Tensor:
        """Q/k norm, rope and KV write -> queries [T, heads, head_dim]."""
        if fused_kernels.use_fused_kernels(self.qkv.device):
            return self._prepare_fused(qkv, inp, cos_sin)
        qkv = qkv.scaled() if isinstance(qkv, UnscaledRows) else qkv
        spec = self.spec
        q = self._queries(qkv)[..., : spec.head_dim]
        kv = qkv[:, -2 * spec.kv_heads * spec.head_dim :].unflatten(1, (-1, spec.head_dim))
        k, v = kv.split(spec.kv_heads, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        inp.backend.write(k, v, inp.kv.layers[self.index], inp.meta)
        return q.contiguous()

    def _prepare_fused(
        self, qkv: Tensor | UnscaledRows, inp: ModelInput, cos_sin: Tensor | None
    ) -> Tensor:
        from model_zoo.layers.kernels.qk_norm_rope_write import qk_norm_rope_write

        kv = inp.kv.layers[self.index]
        return qk_norm_rope_write(
            qkv,
            kv.k,
            kv.v,
            inp.meta.slot_mappings[kv.group],
            heads=self.spec.heads,
            gated=self.gated,
            cos_sin=cos_sin,
            q_weight=None if self.q_norm is None else self.q_norm.weight,
            k_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=0.0 if self.q_norm is None else self.q_norm.eps,
            plus_one=self.q_norm is not None and self.q_norm.plus_one,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
        )
