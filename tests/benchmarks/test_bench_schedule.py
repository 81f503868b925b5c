"""Chunks of prefill on simulated devices, beside the policies of other servers."""

from __future__ import annotations

import pytest

from benchmarks.schedule.bench_beside_images import IMAGE, TEXT, alone_ms
from benchmarks.schedule.bench_beside_images import simulate as simulate_beside
from benchmarks.schedule.bench_schedule import preferable
from benchmarks.schedule.device_model import DEVICES, H200_VL
from benchmarks.schedule.simulation import Percentiles, percentile_ms, simulate_load
from benchmarks.schedule.traffic import closed

H200, H100 = DEVICES["h200"], DEVICES["h100"]
MEASURED = Percentiles(1000.0, 100.0, 200.0, 10.0, 20.0, 512, 4.0)


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("peer", ["vllm", "sglang"])
@pytest.mark.parametrize("clients", [32, 128])
def test_no_other_policy_is_preferable(device: str, peer: str, clients: int) -> None:
    load = closed(clients, 1024, 256, 4)
    ours = simulate_load(DEVICES[device], load)
    assert not preferable(simulate_load(DEVICES[device], load, peer), ours)


def test_many_clients_do_not_stand_in_a_queue_where_there_is_room() -> None:
    for model in (H100, H200):
        figures = simulate_load(model, closed(128, 1024, 256, 5))
        assert figures.ttft_p50 < 250 and figures.itl_p99 < 40


@pytest.mark.parametrize("target_ms", [15.0, 25.0, 40.0])
@pytest.mark.parametrize("clients", [8, 32, 128])
def test_a_target_is_kept_within_ten_percent(target_ms: float, clients: int) -> None:
    """The decode-only step of 128 clients takes 11 ms of an H200, 0.73 of the shortest target."""
    figures = simulate_load(H200, closed(clients, 1024, 256, 4), target_ms=target_ms)
    assert figures.itl_p99 <= 1.1 * target_ms


def test_streams_wait_no_longer_beside_images_than_the_limit_says() -> None:
    """1.3 times what they wait beside as much text."""
    text, image = (simulate_beside(size, callers=12, seconds=8.0) for size in (TEXT, IMAGE))
    assert image.answers and image.gaps
    worst = [percentile_ms(seen.gaps, 0.99) for seen in (text, image)]
    assert worst[1] <= 1.3 * worst[0]


def test_a_target_is_kept_beside_images() -> None:
    seen = simulate_beside(IMAGE, callers=8, seconds=8.0, target_ms=15.0)
    assert seen.answers and percentile_ms(seen.gaps, 0.99) <= 1.1 * 15.0


def test_alone_an_image_adds_the_time_of_its_encoder_and_no_more() -> None:
    encoder = H200_VL.encoder
    assert encoder is not None
    assert alone_ms(IMAGE) <= 1.05 * (alone_ms(TEXT) + encoder.ms(1024, 0, 28))


def test_preferable_needs_all_figures_as_good_and_one_better() -> None:
    assert not preferable(MEASURED, MEASURED)
    assert preferable(MEASURED._replace(ttft_p99=150.0, ttft_p50=104.0), MEASURED)
    assert not preferable(MEASURED._replace(ttft_p99=150.0, itl_p99=25.0), MEASURED)
