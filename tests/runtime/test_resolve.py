"""The requested configuration, resolved or refused."""

from __future__ import annotations

import re
from typing import Literal

import msgspec
import pytest

from attention.backend import BackendChoice
from runtime.config import ConfigError, EngineConfig, ModelFacts, ResolvedConfig, check, resolve
from runtime.memory_plan import LIBRARY_BYTES, MemoryPlan
from runtime.startup.engine_spec import resolve_engine_spec

FACTS = ModelFacts(model_type="fake", max_position=512, vocab_size=100, kv_bytes_per_token=1024)


def resolve_config(*, budget: int = 1 << 30, **requested: int) -> ResolvedConfig:
    return resolve(
        EngineConfig(model="", **requested),
        FACTS,
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        attention="mha",
        memory=MemoryPlan(free=budget, share=1.0),
        threads=1,
    )


def test_a_small_token_budget_is_kept_and_bounds_the_sequences_that_run() -> None:
    resolved = resolve_config(max_batched_tokens=24)
    assert (resolved.max_batched_tokens, resolved.max_num_seqs) == (24, 24)
    assert resolve_config(max_num_seqs=900).max_batched_tokens == 900


def test_a_token_budget_below_the_sequences_asked_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-batched-tokens 8 .* --max-num-seqs 16"):
        resolve_config(max_batched_tokens=8, max_num_seqs=16)


def test_a_pool_too_small_for_one_request_of_the_length_asked_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 64$"):
        resolve_config(budget=64 * 1024, max_model_len=128)
    assert resolve_config(budget=64 * 1024).max_model_len == 64


def test_more_kv_tokens_than_memory_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="ask for at most 64"):
        resolve_config(budget=64 * 1024, kv_tokens=80)


def test_less_kv_than_one_request_was_asked_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-tokens 64 is less than --max-model-len 128"):
        resolve_config(kv_tokens=64, max_model_len=128)


@pytest.mark.parametrize(
    ("device", "free", "tokens", "sequences"),
    [("cuda", 79 << 30, 8192, 256), ("cuda", 20 << 30, 2048, 256), ("cpu", 79 << 30, 512, 64)],
)
def test_the_usual_step_is_as_large_as_the_device(
    device: Literal["cpu", "cuda"], free: int, tokens: int, sequences: int
) -> None:
    resolved = resolve(
        EngineConfig(model=""),
        FACTS,
        device=device,
        dtype="float16",
        kv_dtype="float16",
        attention="flash2",
        memory=MemoryPlan(free=free, share=0.9),
        threads=1,
    )
    assert (resolved.max_batched_tokens, resolved.max_num_seqs) == (tokens, sequences)


MIB = 2**20
TIGHT = MemoryPlan(free=1750 * MIB, share=0.8, weights=500 * MIB, activations=800 * MIB)


def settle_tight(memory: MemoryPlan = TIGHT, **requested: int) -> ResolvedConfig:
    """A page of 16 tokens is 16 MiB: 100 MiB hold 6."""
    return resolve(
        EngineConfig(model="", max_batched_tokens=4096, max_num_seqs=8, **requested),
        msgspec.structs.replace(FACTS, kv_bytes_per_token=MIB),
        device="cuda",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        attention="flash2",
        memory=memory,
        threads=1,
    )


def test_what_does_not_fit_names_two_numbers_that_make_it_fit_and_one_that_may() -> None:
    assert settle_tight().num_pages == 6
    with pytest.raises(ConfigError) as caught:
        settle_tight(max_model_len=160)
    said = str(caught.value)
    assert "less weights 500.0 MiB, less activations 800.0 MiB leaves 100.0 MiB" in said
    options = dict(re.findall(r"(--[a-z-]+) ([\d.]+)", said.split("makes it fit: ")[1]))
    assert list(options) == ["--max-model-len", "--gpu-memory", "--max-batched-tokens"]
    assert "; smaller steps may do: --max-batched-tokens" in said
    assert settle_tight(max_model_len=int(options["--max-model-len"])).num_pages == 6
    fewer = int(options["--max-batched-tokens"]) / 4096
    growing = TIGHT.activations - LIBRARY_BYTES
    smaller = msgspec.structs.replace(TIGHT, activations=LIBRARY_BYTES + int(growing * fewer))
    assert settle_tight(smaller, max_model_len=160).num_pages >= 10
    more = msgspec.structs.replace(TIGHT, share=float(options["--gpu-memory"]))
    assert settle_tight(more, max_model_len=160).num_pages >= 10


def test_weights_that_leave_no_memory_have_an_error_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"the shortest request takes 16\.0 MiB.*smaller model"):
        settle_tight(MemoryPlan(free=1000 * MIB, share=0.9, weights=1200 * MIB))


def test_what_is_missing_beyond_all_memory_is_not_found_in_smaller_steps() -> None:
    """300 MiB are missing before KV gets any, and steps take but 200."""
    with pytest.raises(ConfigError, match="the shortest request") as caught:
        settle_tight(
            MemoryPlan(free=1000 * MIB, share=0.9, weights=1000 * MIB, activations=200 * MIB)
        )
    assert "--max-batched-tokens 4" not in str(caught.value)
    assert "use a smaller model or a device" in str(caught.value)


def test_where_all_that_is_missing_is_in_steps_fewer_rows_and_tokens_are_named() -> None:
    with pytest.raises(ConfigError, match="fewer sequences and smaller steps may do") as caught:
        settle_tight(
            MemoryPlan(free=1000 * MIB, share=0.9, weights=100 * MIB, state=10**9, activations=1)
        )
    assert re.search(r"--max-num-seqs 2, --max-batched-tokens 1024$", str(caught.value))


@pytest.mark.parametrize("requested", [{"max_num_seqs": 65_537}, {"max_batched_tokens": 1 << 30}])
def test_absurd_steps_are_refused_before_anything_is_loaded(requested: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"a step has at most \d+"):
        check(EngineConfig(model="", **requested), FACTS)


def test_more_sequences_than_a_plan_of_attention_holds_are_refused_before_anything_is_loaded() -> (
    None
):
    most = BackendChoice("flash2").max_rows
    assert most is not None and BackendChoice("batch-invariant").max_rows == most
    check(EngineConfig(model="", max_num_seqs=most), FACTS, "flash2", most)
    requested = EngineConfig(model="", max_num_seqs=most + 1)
    with pytest.raises(ConfigError, match=f"--max-num-seqs {most + 1}: .*flash2.* at most {most}"):
        check(requested, FACTS, "flash2", most)
    for unplanned in ("flash1", "mha"):
        check(requested, FACTS, unplanned, BackendChoice(unplanned).max_rows)


def test_an_engine_whose_plans_hold_fewer_sequences_is_not_resolved() -> None:
    requested = EngineConfig(
        model="model_zoo/tiny_chat", device="cpu", attention="flash2", max_num_seqs=9000
    )
    with pytest.raises(ConfigError, match="--max-num-seqs 9000"):
        resolve_engine_spec(requested)


def test_the_lines_of_a_plan_add_up_to_what_was_free() -> None:
    lines = TIGHT.lines(96 * MIB)
    assert [name for name, _ in lines] == ["weights", "activations", "KV", "unused"]
    assert sum(count for _, count in lines) == TIGHT.free


HYBRID = msgspec.structs.replace(FACTS, state_bytes=1 << 20)


def resolve_hybrid(budget: int, **requested: int) -> ResolvedConfig:
    return resolve(
        EngineConfig(model="", **requested),
        HYBRID,
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        attention="mha",
        memory=MemoryPlan(free=budget, share=1.0),
        threads=1,
    )


def test_recurrent_states_take_a_part_of_the_memory_and_pages_the_rest() -> None:
    resolved = resolve_hybrid(20 * 2**20)
    assert resolved.num_states == 8  # 40 %
    assert resolved.num_pages == 12 * 2**20 // (16 * 1024)


def test_there_are_no_more_states_than_sequences_can_use() -> None:
    assert resolve_hybrid(1 << 30, max_num_seqs=16).num_states == 16 + 2
    assert resolve_hybrid(1 << 30, max_num_seqs=1).num_states == 2


def test_kv_tokens_leave_the_rest_to_states() -> None:
    resolved = resolve_hybrid(9 * 2**20, kv_tokens=1024)
    assert (resolved.num_pages, resolved.num_states) == (64, 8)


def test_more_sequences_than_states_are_refused() -> None:
    few = r"--max-num-seqs 9: .* state of 1.0 MiB, and 8 fit .* "
    with pytest.raises(ConfigError, match=few + r"\(40% of it\): .*: lower it to 8"):
        resolve_hybrid(20 * 2**20, max_num_seqs=9)
    assert resolve_hybrid(20 * 2**20, max_num_seqs=8).num_states == 8
    with pytest.raises(ConfigError, match=few + r"\(beside --kv-tokens\): "):
        resolve_hybrid(9 * 2**20, max_num_seqs=9, kv_tokens=1024)


def test_a_long_request_goes_before_states() -> None:
    resolved = resolve_hybrid(5 * 2**19, max_model_len=512)
    assert (resolved.num_states, resolved.max_model_len) == (2, 512)


def test_memory_for_fewer_than_two_states_is_refused() -> None:
    message = r"2 recurrent states of 1.0 MiB and KV for 512 tokens take 2.5 MiB: .* leaves 2.0 MiB"
    with pytest.raises(ConfigError, match=message):
        resolve_hybrid(2 << 20, max_model_len=512)


def test_a_model_with_states_has_as_many_snapshots_as_fit_into_their_bytes() -> None:
    resolved = resolve_hybrid(1 << 30, snapshot_bytes=7 << 20, snapshot_every=100)
    assert (resolved.num_snapshots, resolved.snapshot_every) == (7, 128)
    assert resolved.prefix_cache and resolve_hybrid(1 << 30).num_snapshots == 1024
    assert resolve_config().num_snapshots == 0


def test_without_snapshots_there_is_no_prefix_cache_and_the_other_way_round() -> None:
    assert not resolve_hybrid(1 << 30, snapshot_bytes=1000).prefix_cache
    assert resolve_hybrid(1 << 30, prefix_cache=False).num_snapshots == 0


def test_bytes_for_less_than_one_snapshot_are_refused() -> None:
    few = EngineConfig(model="", snapshot_bytes=(1 << 20) - 1)
    with pytest.raises(ConfigError, match=r"1048575: .* takes 1048576 bytes \(1.0 MiB\): raise"):
        check(few, HYBRID)
    check(msgspec.structs.replace(few, prefix_cache=False), HYBRID)
    check(few, FACTS)


def test_snapshots_closer_than_the_tokens_of_a_kernel_are_refused() -> None:
    requested = EngineConfig(model="", snapshot_every=32)
    with pytest.raises(ConfigError, match="--snapshot-every 32: at least 64 tokens"):
        check(requested, HYBRID)
