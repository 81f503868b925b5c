"""`wavefill plan`: what a model needs several devices for, and what they hold."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from model_zoo.config import ModelError, read_config
from runtime.config import ConfigError, EngineConfig, ResolvedConfig
from runtime.engine import auto_ranks
from runtime.engine.auto_ranks import with_chosen_ranks
from runtime.startup import device
from runtime.startup.device import UnusableGPU
from runtime.startup.fit import ranks as choosing
from runtime.startup.fit.choose_ranks import choose
from runtime.startup.fit.ranks import Problem, RankChoice, choose_ranks, visible_gpus
from runtime.startup.fit.target import FitQuery, with_ranks
from runtime.startup.fit_report import report

GIB = 2**30
AUTO = 0
TOKENS = re.compile(r"KV holds ([\d,]+) tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 1.3 billion parameters, 2.5 GiB in bfloat16."""
    directory = tmp_path_factory.mktemp("model")
    Qwen3Config(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        dtype="bfloat16",
        eos_token_id=1,
    ).save_pretrained(directory)
    return directory


def requested(model: Path, ranks: int, **options: int) -> EngineConfig:
    sizes = {"tensor_parallel": ranks, "max_batched_tokens": 2048, **options}
    return EngineConfig(model=str(model), **sizes)  # type: ignore[arg-type]


def plan(model: Path, gib: int, ranks: int = 1, **options: int) -> str:
    return report(FitQuery(config=requested(model, ranks, **options), card=gib * GIB))


def tokens_of(text: str) -> int:
    found = TOKENS.search(text)
    assert found is not None, text
    return int(found[1].replace(",", ""))


def test_what_two_devices_hold_is_what_the_plan_with_two_ranks_says(model: Path):
    one, two = plan(model, 6), plan(model, 6, 2)
    assert f"with --tensor-parallel 2, on two of them: {tokens_of(two):,} tokens" in one
    assert tokens_of(two) > 2 * tokens_of(one)
    assert "divided among 2 devices: what follows is of each" in two
    assert "--tensor-parallel" not in two


def test_the_error_of_a_model_that_does_not_fit_says_how_many_devices_hold_it(model: Path):
    with pytest.raises(ConfigError, match=r"; --tensor-parallel 2, on 2 of them, holds") as error:
        plan(model, 3)
    held = int(str(error.value).rsplit(" ", 2)[1].replace(",", ""))
    assert held == tokens_of(plan(model, 3, 2))


def test_ranks_that_do_not_divide_the_model_are_refused(model: Path):
    with pytest.raises(ModelError, match="3 does not divide the 16 attention heads"):
        plan(model, 6, 3)


def test_auto_takes_the_fewest_devices_that_have_a_useful_kv(model: Path):
    chosen, one, two = plan(model, 6, AUTO), plan(model, 6), plan(model, 6, 2)
    assert tokens_of(one) < 32_768 <= tokens_of(two)
    line = (
        f"--tensor-parallel auto takes 2: 2 devices with KV of {tokens_of(two):,} tokens, "
        f"1 would hold {tokens_of(one):,}"
    )
    assert [each for each in chosen.splitlines() if each != line] == two.splitlines()
    assert line in chosen
    assert "auto takes 1: one device with KV of" in plan(model, 12, AUTO)


def test_auto_takes_one_device_where_it_holds_the_kv_that_was_asked_for(model: Path):
    assert "--tensor-parallel auto takes 1:" in plan(model, 6, AUTO, kv_tokens=4096)
    line = "auto takes 4: 4 devices with KV of 4,096 tokens, 2 do not hold it\n"
    assert line in plan(model, 3, AUTO, kv_tokens=4096)


def test_auto_takes_all_devices_where_none_of_the_numbers_has_a_useful_kv(model: Path):
    query = FitQuery(config=requested(model, AUTO), card=4 * GIB)
    found = choose(query, 2)
    assert found.ranks == 2 and found.reason.endswith("tokens, the most there is room for")


def test_auto_is_one_on_a_cpu_and_where_there_is_one_gpu(model: Path):
    query = FitQuery(config=requested(model, AUTO), card=12 * GIB)
    assert choose(query, 0).ranks == choose(query, 1).ranks == 1
    config, reason = with_chosen_ranks(query.config, has_driver=False)
    assert config.tensor_parallel == 1 and "CPU" in reason
    assert with_chosen_ranks(requested(model, 2), has_driver=True) == (requested(model, 2), "")


def test_the_error_of_auto_says_how_many_gpus_would_hold_the_model(model: Path):
    query = FitQuery(config=requested(model, AUTO), card=2 * GIB)
    message = r"--tensor-parallel auto: 2 devices do not hold it: .*; --tensor-parallel 8, on 8 of"
    with pytest.raises(ConfigError, match=message):
        choose(query, 3)


def test_one_gpu_that_does_not_hold_the_model_is_refused_as_several_are(model: Path):
    query = FitQuery(config=requested(model, AUTO), card=2 * GIB)
    with pytest.raises(
        ConfigError, match=r"auto: one device does not hold it: .*; --tensor-parall"
    ):
        choose(query, 1)


def chosen(
    model: Path, gib: int, most: int, problems: dict[int, Problem], **options: int
) -> RankChoice:
    """Of cards on which these numbers of ranks have problems of their own."""
    query = FitQuery(config=requested(model, AUTO, **options), card=gib * GIB)
    whole = read_config(model)

    def of(ranks: int) -> ResolvedConfig | Problem:
        return problems.get(ranks) or with_ranks(query, whole, ranks)

    return choose_ranks(query.config, whole, most, of)


def test_the_reason_of_auto_says_what_hinders_other_numbers(model: Path):
    scales, busy = ModelError("a part begins within a block"), UnusableGPU("GPU 1 is busy")
    found = chosen(model, 3, 4, {2: scales}, kv_tokens=4096)
    assert found.reason == "4 devices with KV of 4,096 tokens, it cannot be divided among 2"
    found = chosen(model, 3, 4, {2: busy}, kv_tokens=4096)
    assert found.reason == "4 devices with KV of 4,096 tokens, GPU 1 is busy"
    found = chosen(model, 6, 2, {2: busy})
    assert found.ranks == 1 and found.reason.endswith("the most there is room for, GPU 1 is busy")
    found = chosen(model, 2, 2, {2: scales})
    assert (found.ranks, found.fits) == (1, False)
    assert found.reason == "one device does not hold it, it cannot be divided among 2"


def test_errors_that_do_not_depend_on_the_number_are_raised_as_they_are(model: Path):
    query = FitQuery(config=requested(model, AUTO, page_size=17), card=6 * GIB)
    with pytest.raises(ConfigError, match=r"^--page-size 17: choose one of"):
        choose(query, 4)
    same = ModelError("a file is broken")
    with pytest.raises(ModelError, match=r"^a file is broken$"):
        chosen(model, 6, 2, {1: same, 2: same})


def test_a_gpu_that_gives_no_context_is_named(monkeypatch: pytest.MonkeyPatch):
    def busy(index: torch.device) -> tuple[int, int]:
        raise RuntimeError("CUDA error: all devices are busy\nmore lines")

    monkeypatch.setattr(torch.cuda, "mem_get_info", busy)
    message = r"^GPU 3 cannot be used: CUDA error: all devices are busy$"
    with pytest.raises(UnusableGPU, match=message):
        device.gpu_free_bytes(3)


def test_gpus_are_counted_after_cuda_has_started(monkeypatch: pytest.MonkeyPatch):
    """Before, whole GPUs are counted where a part of one is visible."""
    counts = [8]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: counts.append(1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: counts[-1])
    assert visible_gpus(EngineConfig(model="m")) == 1

    def fail() -> None:
        raise RuntimeError("CUDA unknown error")

    monkeypatch.setattr(choosing.torch.cuda, "init", fail)
    with pytest.raises(ConfigError, match="CUDA cannot be used: CUDA unknown error"):
        visible_gpus(EngineConfig(model="m"))


def test_whole_experts_of_one_device_are_said_to_change_nothing(model: Path):
    config = EngineConfig(model=str(model), tensor_parallel=AUTO, expert_parallel=True)
    assert "--expert-parallel changes nothing" in with_chosen_ranks(config, has_driver=False)[1]
    with pytest.raises(ModelError, match="--expert-parallel: this qwen3 model has no experts"):
        choose(FitQuery(config=config, card=12 * GIB), 1)


def test_a_killed_choice_ends_the_engine_with_a_sentence_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    killed = SimpleNamespace(returncode=-9, stdout=b"")
    monkeypatch.setattr(auto_ranks.subprocess, "run", lambda *args, **options: killed)
    with pytest.raises(SystemExit) as ended:
        with_chosen_ranks(EngineConfig(model="m", tensor_parallel=AUTO), has_driver=True)
    assert ended.value.code == 1
    assert "ended with signal SIGKILL: the system may have run out" in capsys.readouterr().err


GROUPS_OF_128 = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
}


@pytest.mark.parametrize("method", GROUPS_OF_128)
def test_config_json_alone_says_that_ranks_would_cut_groups(tmp_path: Path, method: str) -> None:
    """2,560 gates are 640, five groups of 128, for each of 4 ranks, and 320 for each of 8."""
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=2048, intermediate_size=2560, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, dtype="bfloat16",
        eos_token_id=1, quantization_config=GROUPS_OF_128[method],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert "tokens" in plan(tmp_path, 24, 4)
    layer = {"fp8": "gate_proj", "gptq": "down_proj"}[method]  # groups are of inputs alone in gptq
    with pytest.raises(ModelError, match=r"--tensor-parallel 8: .* within a group") as error:
        plan(tmp_path, 24, 8)
    assert f"model.layers.0.mlp.{layer} would begin at 320 of its 2560" in str(error.value)
    assert "use fewer ranks, or a repository of this qwen3 model" in str(error.value)
