"""Peers on the same inputs: FlashAttention-3 from a library file, torch's SDPA.

No code of FlashAttention-3 is included: `--fa3 FILE` names the extension of a vLLM wheel
(vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so), which registers its operators with torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention.inputs import Inputs
from benchmarks.attention.subjects import PeerUnavailable, Prepared

FA3_OPERATORS = "_vllm_fa3_C"


def load_fa3(file: str) -> None:
    """Register FlashAttention-3's operators.

    Raises PeerUnavailable if the file is not the library of a wheel for this torch.
    """
    try:
        torch.ops.load_library(file)
    except OSError as error:
        raise PeerUnavailable(f"--fa3 {file}: {error}") from error


def flash_attention_3(inputs: Inputs) -> Prepared:
    """Paged FlashAttention-3; its own split heuristic, the scheduler metadata precomputed.

    It is timed on its own layout [pages, page, kv_heads, D] over the same memory, and its result is
    compared on ours, passed as strides.
    """
    case, operators = inputs.case, getattr(torch.ops, FA3_OPERATORS)
    if case.kv_dtype == "fp8" or case.dtype == "fp32":
        raise PeerUnavailable("FlashAttention-3 takes q, k and v of one 16-bit type")
    max_q_len, max_kv_len = max(case.q_lens), max(case.kv_lens)
    window = case.window - 1  # tokens before the query's own; -1: all
    right = 0 if case.window else -1
    sinks = None if inputs.sinks is None else inputs.sinks.to(inputs.q.dtype)
    metadata = operators.get_scheduler_metadata(
        case.rows, max_q_len, max_kv_len, case.heads, case.kv_heads, case.head_dim, case.head_dim,
        inputs.q.dtype, inputs.cache_seqlens, inputs.cu_seqlens_q, None, None, None, None,
        case.page, 0, True, window, right, case.softcap > 0, 0, None, 0,
    )  # fmt: skip

    def run(k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return operators.fwd(
            inputs.q, k, v, None, None, None, None, inputs.cu_seqlens_q, None, None, None,
            inputs.cache_seqlens, max_q_len, max_kv_len, table, None, None, None, None, None,
            None, None, None, inputs.scale, True, window, right, case.softcap, True,
            metadata, 0, None, 0, sinks, 1, 0, None,
        )[0]  # fmt: skip

    native = (len(inputs.k), case.page, case.kv_heads, case.head_dim)
    k, v = (half.view(native) for half in inputs.memory.chunk(2))
    ours = (inputs.k.transpose(1, 2), inputs.v.transpose(1, 2))
    return Prepared(
        call=lambda number: run(k, v, inputs.tables[number]),
        result=lambda: run(*ours, inputs.tables[0]),
    )


def contiguous_attention(backend: SDPBackend) -> Callable[[Inputs], Prepared]:
    """torch's scaled_dot_product_attention on contiguous rows of one length: no pages."""

    def prepare(inputs: Inputs) -> Prepared:
        case = inputs.case
        if len(set(case.q_lens)) > 1 or case.q_lens != case.kv_lens:
            raise PeerUnavailable("contiguous attention is timed on prompts of one length")
        rows, length, dim = case.rows, case.q_lens[0], case.head_dim
        q = inputs.q.view(rows, length, case.heads, dim).transpose(1, 2).contiguous()
        k, v = (
            half[: rows * case.kv_heads * length * dim].view(rows, case.kv_heads, length, dim)
            for half in inputs.memory.chunk(2)
        )

        def call(_: int) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return Prepared(call, None)

    return prepare
